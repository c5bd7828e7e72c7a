"""Handing out a finished clip: and what lies beside it: streamed through the API with ranges, or by a redirect to
the store."""

import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from rushes_core.content_disposition import content_disposition
from rushes_core.errors import ObjectMissing
from rushes_core.fields import shown
from rushes_core.models import Job
from rushes_core.object_keys import bucket_of_result
from rushes_core.settings import ContentDelivery
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore
from rushes_core.stored import StoredVariant, filename, stored_variants
from rushes_core.variants import PICTURES, VARIANTS, Variant
from rushes_core.video import error_of, removed_at

from rushes_api.byte_range import ByteRange, Unsatisfiable, etag_matches, parse_range
from rushes_api.deps import State
from rushes_api.errors import ApiError, GenerationFailed, NotReady, RangeNotSatisfiable
from rushes_api.polling import MIN_POLL_MS


def variant_named(name: str) -> Variant:
    """The variant that a client asks for.

    Raises:
        ApiError
    """
    if name not in VARIANTS:
        raise ApiError(f"variant must be one of {', '.join(VARIANTS)}, got {shown(name)}", param="variant")
    return VARIANTS[name]


def check_finished(job: Job) -> None:
    """Refuse a job that has no clip.

    Raises:
        NotReady: it may have one later.
        GenerationFailed: it never will; carries the job's own error.
        ApiError: it is gone.
    """
    state = job.state
    if not state.is_final:
        raise NotReady(f"{job.id} is {state.public_status}: its clip is not ready", retry_after=MIN_POLL_MS // 1_000)
    if state is not JobState.COMPLETED:
        error = error_of(job.error or {})
        assert error is not None
        raise GenerationFailed(f"{job.id} is {state.public_status}: {error.message}".rstrip(": "), code=error.code)
    if removed_at(job) is not None:
        message = f"the clip of {job.id} was removed when its retention period ended"
        raise ApiError(message, code="video_expired", status=HTTPStatus.GONE)


def find_variant(job: Job, variant: Variant) -> StoredVariant:
    """What is stored of a completed job under this name.

    Raises:
        ApiError: it has no such variant.
    """
    stored = stored_variants(job)
    if variant.name in stored:
        return stored[variant.name]
    output: dict[str, Any] = job.request.get("output") or {}
    if "variants" not in (job.result or {}):
        why = "it was made by a release that stored the clip only"
    elif variant in PICTURES and output.get("thumbnail") is False:
        why = "output.thumbnail was false"
    else:
        why = "it could not be made"
    raise ApiError(
        f"{job.id} has no {variant.name}: {why}; variant may be {', '.join(stored)}",
        param="variant",
        code="variant_not_available",
        status=HTTPStatus.NOT_FOUND,
    )


async def deliver(job: Job, stored: StoredVariant, request: Request, state: State, *, redirect: str | None) -> Response:
    """One object of a completed job, in the way that the settings say.

    Raises:
        ApiError: a parameter or precondition fails, or the object is gone.
        StorageError: the store cannot be reached.
    """
    # a URL that is signed for GET answers HEAD with 403, and the row knows what HEAD asks for
    if redirect not in (None, "true", "false") and request.method != "HEAD":
        raise ApiError(f"redirect must be true or false, got {shown(redirect)}", param="redirect")
    if state["settings"].content_delivery is ContentDelivery.REDIRECT and request.method != "HEAD":
        return await _redirect(job, stored, state, as_json=redirect == "false")
    if redirect is not None and request.method != "HEAD":
        raise ApiError("redirect is not available: this deployment streams clips itself", param="redirect")
    return await _stream(job, stored, request, state)


def signed_url(job: Job, stored: StoredVariant, state: State) -> str:
    """Where the store has it, for `presigned_url_seconds`. For a thread: credentials may have to be fetched."""
    return _store_of(job, state).presigned_url(
        stored.key,
        filename=filename(job, stored.variant),
        content_type=stored.variant.content_type,
        seconds=state["settings"].presigned_url_seconds,
    )


async def _redirect(job: Job, stored: StoredVariant, state: State, *, as_json: bool) -> Response:
    expires_at = int(time.time()) + state["settings"].presigned_url_seconds
    url = await to_thread.run_sync(signed_url, job, stored, state, limiter=state["store_limiter"])
    no_store = {"Cache-Control": "no-store"}
    if as_json:
        return JSONResponse({"url": url, "expires_at": expires_at}, headers=no_store)
    return RedirectResponse(url, HTTPStatus.FOUND, headers=no_store)


async def _stream(job: Job, stored: StoredVariant, request: Request, state: State) -> Response:
    name = stored.variant.name
    return await stream(
        Representation(
            store=_store_of(job, state),
            key=stored.key,
            num_bytes=stored.bytes,
            sha256=stored.sha256,
            content_type=stored.variant.content_type,
            disposition=content_disposition(filename(job, stored.variant)),
            what=name,
        ),
        request,
        state,
        if_lost=ApiError(
            f"the {name} of {job.id} is no longer in the object store",
            code="video_content_missing",
            status=HTTPStatus.NOT_FOUND,
        ),
    )


@dataclass(frozen=True, slots=True)
class Representation:
    """An object of the store as it is handed out."""

    store: ObjectStore
    key: str
    num_bytes: int
    sha256: str
    content_type: str
    disposition: str
    """The value of Content-Disposition."""
    what: str
    """What it is, for errors."""


async def stream(one: Representation, request: Request, state: State, *, if_lost: ApiError) -> Response:
    """`one`, or the range of it that was asked for; its head alone for HEAD.

    Raises:
        ApiError: a precondition fails; `if_lost` when the store has no such object.
        StorageError: the store cannot be reached.
    """
    num_bytes, etag = one.num_bytes, f'"{one.sha256}"'
    headers = {
        "Accept-Ranges": "bytes",
        # what was deleted must not be shown from a cache
        "Cache-Control": "private, no-cache",
        "Content-Disposition": one.disposition,
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
    }
    if (wanted_tags := _joined(request, "if-match")) is not None and not etag_matches(wanted_tags, etag, weak=False):
        raise ApiError(
            f"the {one.what} is another than If-Match names",
            param="If-Match",
            code="precondition_failed",
            status=HTTPStatus.PRECONDITION_FAILED,
        )
    if etag_matches(_joined(request, "if-none-match"), etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    wanted = _wanted_range(request, etag, num_bytes)
    part = wanted or ByteRange(0, num_bytes - 1)
    headers["Content-Length"] = str(part.num_bytes)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {part.first}-{part.last}/{num_bytes}"
    status = HTTPStatus.OK if wanted is None else HTTPStatus.PARTIAL_CONTENT
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=one.content_type)
    limiter = state["store_limiter"]
    try:
        pieces = await to_thread.run_sync(one.store.read, one.key, part.first, part.last, limiter=limiter)
    except ObjectMissing as error:
        raise if_lost from error
    return StreamingResponse(_in_threads(pieces, limiter), status, headers=headers, media_type=one.content_type)


def _joined(request: Request, name: str) -> str | None:
    """A header that is a list, which may come in several lines."""
    return ", ".join(request.headers.getlist(name)) if name in request.headers else None


def _wanted_range(request: Request, etag: str, num_bytes: int) -> ByteRange | None:
    # no Last-Modified is sent, so a date in If-Range names no version that is known here
    if request.method != "GET" or request.headers.get("if-range", etag) != etag:
        return None
    try:
        return parse_range(request.headers.get("range"), num_bytes)
    except Unsatisfiable as error:
        raise RangeNotSatisfiable(str(error), num_bytes=num_bytes) from error


async def _in_threads(pieces: Iterator[bytes], limiter: CapacityLimiter) -> AsyncIterator[bytes]:
    try:
        while piece := await to_thread.run_sync(next, pieces, b"", limiter=limiter):
            yield piece
    finally:
        cast("Generator[bytes]", pieces).close()


def _store_of(job: Job, state: State) -> ObjectStore:
    return state["store"].in_bucket(bucket_of_result(job.request, job.result or {}))
