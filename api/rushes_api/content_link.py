"""Addresses of clips that work without an API key, for a while: for players and for clients that send none."""

import hmac
import time
from collections.abc import Sequence
from functools import cache
from hashlib import scrypt, sha256
from http import HTTPStatus

from anyio import to_thread
from fastapi import Request
from rushes_core.models import Job
from rushes_core.settings import ContentDelivery, Settings
from rushes_core.stored import stored_variants
from rushes_core.variants import VIDEO

from rushes_api.content import signed_url
from rushes_api.deps import State
from rushes_api.errors import ApiError

PATH = "/v2/video_generation/{video_id}/content"
PARAMETERS = ("expires", "signature")


async def content_links(jobs: Sequence[Job], request: Request, state: State) -> dict[str, str]:
    """By id, where the clip of each of `jobs` that has one can be fetched: from the store where content is redirected
    to it, otherwise from the API."""
    settings = state["settings"]
    clips = [(job, clip) for job in jobs if (clip := stored_variants(job).get(VIDEO.name)) is not None]
    if settings.content_delivery is ContentDelivery.REDIRECT:

        def sign() -> dict[str, str]:
            return {job.id: signed_url(job, clip, state) for job, clip in clips}

        return await to_thread.run_sync(sign, limiter=state["store_limiter"]) if clips else {}
    origin = settings.api_origin or str(request.base_url).rstrip("/")
    expires = int(time.time()) + settings.presigned_url_seconds
    return {job.id: origin + _path(job.id, expires, settings) for job, _ in clips}


def check_link(video_id: str, expires: str | None, signature: str | None, settings: Settings) -> None:
    """Refuse an address that was not made by `content_links`, or too long ago.

    Raises:
        ApiError
    """
    if expires is None or signature is None:
        raise _refused("lacks its parameters expires and signature", "invalid_link")
    is_number = expires.isascii() and expires.isdigit() and len(expires) <= 12
    if not is_number or not hmac.compare_digest(_signature(video_id, expires, settings).encode(), signature.encode()):
        raise _refused("is not as it was given: ask for the task again, which has a new one", "invalid_link")
    if int(expires) < time.time():
        raise _refused("worked for a while and is too old: ask for the task again, which has a new one", "link_expired")


def _refused(why: str, code: str) -> ApiError:
    return ApiError(f"this address of a clip {why}", code=code, status=HTTPStatus.FORBIDDEN)


def _path(video_id: str, expires: int, settings: Settings) -> str:
    signature = _signature(video_id, str(expires), settings)
    return f"{PATH.format(video_id=video_id)}?expires={expires}&signature={signature}"


def _signature(video_id: str, expires: str, settings: Settings) -> str:
    """HMAC-SHA-256: 64 hexadecimal digits."""
    key = _key(settings.api_key.get_secret_value())
    return hmac.new(key, f"content of {video_id} until {expires}".encode(), sha256).hexdigest()


@cache
def _key(secret: str) -> bytes:
    """What addresses are signed with, made of the operator's key, which all processes of the API have.

    Made slowly, once a process: whoever is shown an address can try keys on it without asking anybody.
    """
    return scrypt(secret.encode(), salt=b"addresses of clips", n=2**14, r=8, p=1, dklen=32)
