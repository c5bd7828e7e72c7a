"""Handing out a finished clip: streamed through the API with ranges, or by a redirect to the store."""

import time
from collections.abc import AsyncIterator, Generator, Iterator
from http import HTTPStatus
from typing import cast

from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from rushes_core.errors import ObjectMissing
from rushes_core.models import Job
from rushes_core.request import shown
from rushes_core.settings import ContentDelivery
from rushes_core.states import JobState
from rushes_core.storage import content_disposition

from rushes_api.byte_range import ByteRange, Unsatisfiable, etag_matches, parse_range
from rushes_api.deps import State
from rushes_api.errors import ApiError, GenerationFailed, NotReady, RangeNotSatisfiable
from rushes_api.video import CONTENT_TYPE, MIN_POLL_MS, removed_at

VARIANTS = ("video",)


def check_variant(variant: str) -> None:
    """Refuse what the store does not hold."""
    if variant not in VARIANTS:
        raise ApiError(f"variant must be one of {', '.join(VARIANTS)}, got {shown(variant)}", param="variant")


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
        error = job.error or {}
        code = str(error.get("code", "generation_failed"))
        raise GenerationFailed(f"{job.id} is {state.public_status}: {error.get('message', '')}".rstrip(": "), code=code)
    if removed_at(job) is not None:
        message = f"the clip of {job.id} was removed when its retention period ended"
        raise ApiError(message, code="video_expired", status=HTTPStatus.GONE)


async def deliver(job: Job, request: Request, state: State, *, redirect: str | None) -> Response:
    """The clip of a completed job, in the way that the settings say.

    Raises:
        ApiError: a parameter or precondition fails, or the object is gone.
        StorageError: the store cannot be reached.
    """
    # a URL that is signed for GET answers HEAD with 403, and the row knows what HEAD asks for
    if state["settings"].content_delivery is ContentDelivery.REDIRECT and request.method != "HEAD":
        if redirect not in (None, "true", "false"):
            raise ApiError(f"redirect must be true or false, got {shown(redirect)}", param="redirect")
        return await _redirect(job, state, as_json=redirect == "false")
    if redirect is not None and request.method != "HEAD":
        raise ApiError("redirect is not available: this deployment streams clips itself", param="redirect")
    return await _stream(job, request, state)


async def _redirect(job: Job, state: State, *, as_json: bool) -> Response:
    seconds = state["settings"].presigned_url_seconds
    key, filename = _result(job)["key"], _filename(job)

    def sign() -> str:
        return state["store"].presigned_url(key, filename=filename, content_type=CONTENT_TYPE, seconds=seconds)

    expires_at = int(time.time()) + seconds
    url = await to_thread.run_sync(sign, limiter=state["store_limiter"])
    no_store = {"Cache-Control": "no-store"}
    if as_json:
        return JSONResponse({"url": url, "expires_at": expires_at}, headers=no_store)
    return RedirectResponse(url, HTTPStatus.FOUND, headers=no_store)


async def _stream(job: Job, request: Request, state: State) -> Response:
    result = _result(job)
    num_bytes, etag = int(result["bytes"]), f'"{result["sha256"]}"'
    headers = {
        "Accept-Ranges": "bytes",
        # a deleted clip must not be played from a cache
        "Cache-Control": "private, no-cache",
        "Content-Disposition": content_disposition(_filename(job)),
        "ETag": etag,
    }
    if "if-match" in request.headers and not etag_matches(request.headers["if-match"], etag, weak=False):
        raise ApiError(
            "the clip is another than If-Match names",
            param="If-Match",
            code="precondition_failed",
            status=HTTPStatus.PRECONDITION_FAILED,
        )
    if etag_matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    wanted = _wanted_range(request, etag, num_bytes)
    part = wanted or ByteRange(0, num_bytes - 1)
    headers["Content-Length"] = str(part.num_bytes)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {part.first}-{part.last}/{num_bytes}"
    status = HTTPStatus.OK if wanted is None else HTTPStatus.PARTIAL_CONTENT
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=CONTENT_TYPE)
    pieces = await _open(job, state, result["key"], part)
    return StreamingResponse(
        _in_threads(pieces, state["store_limiter"]), status, headers=headers, media_type=CONTENT_TYPE
    )


def _wanted_range(request: Request, etag: str, num_bytes: int) -> ByteRange | None:
    if request.method != "GET" or request.headers.get("if-range", etag) != etag:
        return None
    try:
        return parse_range(request.headers.get("range"), num_bytes)
    except Unsatisfiable as error:
        raise RangeNotSatisfiable(str(error), num_bytes=num_bytes) from error


async def _open(job: Job, state: State, key: str, part: ByteRange) -> Iterator[bytes]:
    store, limiter = state["store"], state["store_limiter"]
    try:
        return await to_thread.run_sync(store.read, key, part.first, part.last, limiter=limiter)
    except ObjectMissing as error:
        message = f"the clip of {job.id} is no longer in the object store"
        raise ApiError(message, code="video_content_missing", status=HTTPStatus.NOT_FOUND) from error


async def _in_threads(pieces: Iterator[bytes], limiter: CapacityLimiter) -> AsyncIterator[bytes]:
    try:
        while piece := await to_thread.run_sync(next, pieces, b"", limiter=limiter):
            yield piece
    finally:
        cast("Generator[bytes]", pieces).close()


def _result(job: Job) -> dict[str, str]:
    assert job.result is not None, "a completed job has a result"
    return job.result


def _filename(job: Job) -> str:
    return f"{job.id}.mp4"
