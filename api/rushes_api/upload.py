"""Receiving a file: a multipart body that goes on to the store part by part and is never held in memory."""

import asyncio
import math
import re
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar, cast

import anyio
from anyio import CapacityLimiter, WouldBlock, to_thread
from fastapi import Request
from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser
from rushes_core.errors import StorageError
from rushes_core.fields import Fields, printable, shown
from rushes_core.files import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, PURPOSES
from rushes_core.log import get_logger
from rushes_core.parsing import parse_as
from rushes_core.storage import Upload
from starlette.requests import ClientDisconnect

from rushes_api.body import MULTIPART, parse_json
from rushes_api.boundary import ANSWER_WITHIN, ASKS_DATABASE
from rushes_api.errors import ApiError, BodyTooLarge, Unavailable, UnsupportedMedia
from rushes_api.form import HeaderCollector, InvalidForm, PartHead, Value, assemble, part_head, split_header

log = get_logger(__name__)

GRACE_SECONDS = 10.0
"""How long a client may take in all besides what `LEAST_BYTES_PER_SECOND` allows it."""
LEAST_BYTES_PER_SECOND = 16_384
SILENT_SECONDS = 20.0
"""How long nothing may come, however fast it came before."""
STORE_SECONDS = 30.0
"""How long the store may take for one part, its time to try again included."""
ANSWER_SECONDS = 10.0
"""How long it may take from the last byte in the store to the answer."""
OVERHEAD_BYTES = 65_536
"""What a body may have beside the bytes of the file."""
MAX_FILENAME_BYTES = 255

_FIELDS = ("file", "purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]")
_DIGITS = re.compile("[0-9]{1,20}", re.ASCII)
_MAX_TEXT_BYTES = 1_024
_HELD_BYTES = 262_144
"""What is held in memory of a file, about."""
_DISCARD_SECONDS = 1.0
"""How long an answer waits until what it refuses is out of the store. It is removed all the same."""
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# a name must not look like another one
_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_Result = TypeVar("_Result")


class ExpiresAfter(Fields):
    """When the file is removed, counted from when it was stored."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)]


class Wanted(Fields):
    """What was uploaded, as far as it decides whether another request is the same."""

    filename: str
    bytes: int
    sha256: str
    purpose: str
    expires_after: ExpiresAfter | None = None


def check_head(request: Request, *, max_bytes: int) -> int:
    """Refuse what can be refused without its body; about how many bytes the file has, 0 where nobody says.

    Args:
        max_bytes: of the file.

    Raises:
        UnsupportedMedia, BodyTooLarge, ApiError
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedMedia(f"Content-Encoding {shown(encoding)} is not supported; send the body as it is")
    _boundary_of(request)
    declared = request.headers.get("content-length", "")
    if not (declared.isascii() and declared.isdigit()):
        return 0
    if len(declared) > 18 or int(declared) > max_bytes + OVERHEAD_BYTES:
        raise _too_large(max_bytes)
    return max(0, int(declared) - OVERHEAD_BYTES)


def _boundary_of(request: Request) -> bytes:
    content_types = request.headers.getlist("content-type")
    if len(content_types) != 1:
        what = "missing" if not content_types else "given more than once"
        raise UnsupportedMedia(f"Content-Type is {what}; supported: {MULTIPART}")
    media_type, parameters = split_header(content_types[0])
    if media_type != MULTIPART:
        raise UnsupportedMedia(f"Content-Type {shown(media_type)} is not supported; supported: {MULTIPART}")
    if not parameters.get("boundary"):
        raise _invalid(f"Content-Type {MULTIPART} lacks its boundary")
    return parameters["boundary"].encode("latin-1")


@contextmanager
def seat(limiter: CapacityLimiter, holder: object) -> Generator[None]:
    """One of the places for uploads.

    Raises:
        Unavailable: there is none.
    """
    try:
        limiter.acquire_on_behalf_of_nowait(holder)
    except WouldBlock as error:
        raise Unavailable("Too many files are being uploaded at once. Try again later.", code="overloaded") from error
    try:
        yield
    finally:
        limiter.release_on_behalf_of(holder)


async def receive(request: Request, upload: Upload, *, max_bytes: int, limiter: CapacityLimiter) -> Wanted:
    """Store the file of the request as `upload`; what else its form says.

    Its body may take longer than others, by its size.

    Raises:
        ApiError: it is not what is expected, or came too slowly.
        StorageError: the store failed.
    """
    began = time.monotonic()
    request.scope[ANSWER_WITHIN] = math.inf
    form = _Form(max_bytes)

    async def pass_on(least: int) -> None:
        if len(form.unstored) >= least:
            data = bytes(form.unstored)
            form.unstored.clear()
            await in_store(upload.write, data, limiter=limiter)

    try:
        parser = MultipartParser(_boundary_of(request), form.callbacks())
        async for chunk in _paced(request, max_bytes=max_bytes):
            for start in range(0, len(chunk), _HELD_BYTES):
                parser.write(chunk[start : start + _HELD_BYTES])
                await pass_on(_HELD_BYTES)
        await pass_on(1)
        wanted = form.wanted(sha256=upload.sha256)
    except FormParserError as error:
        raise _invalid(f"the multipart body is malformed: {printable(str(error))}") from error
    except InvalidForm as error:
        raise ApiError(str(error), param=error.param, code=error.code) from error
    await in_store(upload.complete, limiter=limiter)
    request.scope[ANSWER_WITHIN] = time.monotonic() - began + ANSWER_SECONDS
    request.scope[ASKS_DATABASE] = True
    return wanted


async def in_store(work: Callable[..., _Result], *arguments: object, limiter: CapacityLimiter) -> _Result:
    """`work` in a thread, which is left alone when the store does not answer.

    Raises:
        StorageError
    """
    try:
        with anyio.fail_after(STORE_SECONDS):
            return await to_thread.run_sync(work, *arguments, limiter=limiter, abandon_on_cancel=True)
    except TimeoutError as error:
        raise StorageError(f"no answer within {STORE_SECONDS:g} seconds") from error


_discarding: set[asyncio.Task[None]] = set()


async def discard(upload: Upload, *, limiter: CapacityLimiter) -> None:
    """Leave nothing of `upload` in the store. What cannot be removed now is left to the sweeper."""
    task = asyncio.create_task(_discard(upload, limiter))
    _discarding.add(task)
    task.add_done_callback(_discarding.discard)
    await asyncio.wait({task}, timeout=_DISCARD_SECONDS)


async def _discard(upload: Upload, limiter: CapacityLimiter) -> None:
    try:
        await in_store(upload.discard, limiter=limiter)
    except StorageError as error:
        log.warning("upload_stays", key=upload.key, error=str(error).splitlines()[0])


async def _paced(request: Request, *, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes. Only the time that is spent waiting for it counts."""
    stream = request.stream()
    num_bytes, waited = 0, 0.0
    while True:
        patience = min(SILENT_SECONDS, GRACE_SECONDS + num_bytes / LEAST_BYTES_PER_SECOND - waited)
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _too_slow() from error
        except ClientDisconnect as error:
            raise _invalid("the request body ended early") from error
        waited += time.monotonic() - began
        num_bytes += len(chunk)
        if num_bytes > max_bytes + OVERHEAD_BYTES:
            raise _too_large(max_bytes)
        yield chunk


class _Form(HeaderCollector):
    """Gathers what the parser reports; of the file only what has not been stored."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.unstored = bytearray()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._filename: str | None = None
        self._texts: list[tuple[str, Value]] = []
        self._seen: set[str] = set()
        self._is_complete = False
        self._head: PartHead | None = None
        self._text = bytearray()

    def callbacks(self) -> Any:
        return {
            **self.header_callbacks(),
            "on_part_begin": self._part_begin,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def wanted(self, *, sha256: str) -> Wanted:
        """What the whole form says.

        Args:
            sha256: of the file.

        Raises:
            InvalidForm, InvalidRequest
        """
        if not self._is_complete:
            raise InvalidForm("the multipart body is malformed: it ends before its last boundary")
        if self._filename is None:
            raise _missing("file")
        if not self._num_bytes:
            raise InvalidForm("file is empty", param="file", code="invalid_value")
        if "purpose" not in self._seen:
            raise _missing("purpose")
        members = assemble(self._texts, parse_json=parse_json, max_depth=2)
        if "expires_after" in members:
            members["expires_after"] = _typed(members["expires_after"])
        sent = {"filename": self._filename, "bytes": self._num_bytes, "sha256": sha256}
        return parse_as(Wanted, members | sent)

    def _part_begin(self) -> None:
        self._headers = {}
        self._text = bytearray()

    def _headers_finished(self) -> None:
        self._head = head = part_head(self._headers)
        name = printable(head.name)
        if head.name not in _FIELDS:
            raise InvalidForm(f"unknown parameter: {name}", param=name, code="unknown_parameter")
        if head.name in self._seen:
            raise InvalidForm(f"duplicate field: {name}", param=name, code="duplicate_parameter")
        self._seen.add(head.name)
        if head.name == "file":
            if head.filename is None:
                raise InvalidForm("file must be a file: its part needs a filename", param="file", code="invalid_value")
            self._filename = safe_filename(head.filename)
        elif head.filename is not None:
            raise InvalidForm(f"{name} must be text, got a file", param=name, code="invalid_value")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._head is not None
        if self._head.name != "file":
            self._text += data[start:end]
            if len(self._text) > _MAX_TEXT_BYTES:
                name = self._head.name
                raise InvalidForm(
                    f"{name} may have at most {_MAX_TEXT_BYTES} bytes, got more", param=name, code="invalid_value"
                )
            return
        piece = data[start:end]
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self.unstored += piece

    def _part_end(self) -> None:
        head = self._head
        assert head is not None
        if head.name == "file":
            return
        value = head.text(bytes(self._text))
        if head.name == "purpose" and value not in PURPOSES:
            raise InvalidForm(
                f"purpose must be one of {', '.join(PURPOSES)}, got {shown(value)}",
                param="purpose",
                code="invalid_value",
            )
        self._texts.append((head.name, value))

    def _end(self) -> None:
        self._is_complete = True


def _typed(expiry: Any) -> Any:
    """What a form says of `expires_after`, with the number that it means: a form has none."""
    if isinstance(expiry, str) and expiry.lstrip().startswith("{"):
        return parse_json(expiry)
    if isinstance(expiry, dict):
        members = cast("dict[str, Any]", expiry)
        seconds = members.get("seconds")
        if isinstance(seconds, str) and _DIGITS.fullmatch(seconds):
            return {**members, "seconds": int(seconds)}
        return members
    return expiry


def safe_filename(name: str) -> str:
    """The last part of a path, without control characters.

    Raises:
        InvalidForm: nothing is left of it, or too much.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c for c in last if unicodedata.category(c) not in _UNSAFE_CATEGORIES and c not in _BIDI).strip()
    if kept in ("", ".", ".."):
        raise InvalidForm(f"file: its filename must be a name, got {shown(name)}", param="file", code="invalid_value")
    num_bytes = len(kept.encode())
    if num_bytes > MAX_FILENAME_BYTES:
        raise InvalidForm(
            f"file: its filename may have at most {MAX_FILENAME_BYTES} bytes, got {num_bytes}",
            param="file",
            code="invalid_value",
        )
    return kept


def _missing(name: str) -> InvalidForm:
    return InvalidForm(f"{name} is required", param=name, code="missing_required_parameter")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"file may have at most {max_bytes} bytes, got more", param="file")


def _too_slow() -> ApiError:
    return ApiError(
        f"The request body did not arrive in time: after {GRACE_SECONDS:g} seconds it must come with at least "
        f"{LEAST_BYTES_PER_SECOND} bytes per second, and without pauses of {SILENT_SECONDS:g} seconds.",
        code="request_timeout",
        status=HTTPStatus.REQUEST_TIMEOUT,
        # the rest of the body may still come
        headers={"Connection": "close"},
    )


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_body")
