"""Receiving a file: a body that goes on to the store part by part and is never held in memory."""

import asyncio
import math
import re
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Collection, Generator
from contextlib import contextmanager
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
from rushes_core.store_upload import Upload
from starlette.requests import ClientDisconnect

from rushes_api.body import MULTIPART, parse_json
from rushes_api.boundary import ANSWER_WITHIN, ASKS_DATABASE
from rushes_api.errors import ApiError, BodyTooLarge, Unavailable, UnsupportedMedia, body_too_slow
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

_FIELDS = ("purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]")
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
    boundary_of(request)
    return declared_bytes(request, max_bytes=max_bytes)


def declared_bytes(request: Request, *, max_bytes: int) -> int:
    """About how many bytes the file of the request has, 0 where nobody says.

    Raises:
        BodyTooLarge: more than `max_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if not (declared.isascii() and declared.isdigit()):
        return 0
    if len(declared) > 18 or int(declared) > max_bytes + OVERHEAD_BYTES:
        raise _too_large(max_bytes)
    return max(0, int(declared) - OVERHEAD_BYTES)


def boundary_of(request: Request) -> bytes:
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

    Raises:
        ApiError: it is not what is expected, or came too slowly.
        StorageError: the store failed.
    """
    form = _UploadForm(max_bytes)
    await receive_form(request, upload, form, max_bytes=max_bytes, limiter=limiter)
    return form.wanted(sha256=upload.sha256)


async def receive_form(
    request: Request, upload: Upload, form: "FileForm", *, max_bytes: int, limiter: CapacityLimiter
) -> None:
    """Store the file of a multipart body as `upload`, and gather the rest in `form`.

    The body may take longer than others, by its size.

    Raises:
        ApiError, InvalidRequest: it is not what `form` expects, or came too slowly.
        StorageError: the store failed.
    """
    with _taking_long(request):
        try:
            parser = MultipartParser(boundary_of(request), form.callbacks())
            async for chunk in _paced(request, max_bytes=max_bytes + OVERHEAD_BYTES):
                for start in range(0, len(chunk), _HELD_BYTES):
                    parser.write(chunk[start : start + _HELD_BYTES])
                    await _pass_on(form.unstored, upload, least=_HELD_BYTES, limiter=limiter)
            await _pass_on(form.unstored, upload, least=1, limiter=limiter)
            form.check()
        except FormParserError as error:
            raise _invalid(f"the multipart body is malformed: {printable(str(error))}") from error
        except InvalidForm as error:
            raise ApiError(str(error), param=error.param, code=error.code) from error
        await in_store(upload.complete, limiter=limiter)


async def receive_body(request: Request, upload: Upload, *, max_bytes: int, limiter: CapacityLimiter) -> None:
    """Store the whole body as `upload`.

    Raises:
        ApiError: it is empty, or came too slowly.
        BodyTooLarge: it has more than `max_bytes`.
        StorageError: the store failed.
    """
    unstored = bytearray()
    with _taking_long(request):
        async for chunk in _paced(request, max_bytes=max_bytes):
            for start in range(0, len(chunk), _HELD_BYTES):
                unstored += chunk[start : start + _HELD_BYTES]
                await _pass_on(unstored, upload, least=_HELD_BYTES, limiter=limiter)
        await _pass_on(unstored, upload, least=1, limiter=limiter)
        if not upload.num_bytes:
            raise _invalid("the request body is empty")
        await in_store(upload.complete, limiter=limiter)


async def store_bytes(data: bytes, upload: Upload, *, limiter: CapacityLimiter) -> None:
    """Store what is in memory as `upload`.

    Raises:
        StorageError: the store failed.
    """
    await in_store(upload.write, data, limiter=limiter)
    await in_store(upload.complete, limiter=limiter)


@contextmanager
def _taking_long(request: Request) -> Generator[None]:
    """Within it, the request may take as long as its body does; after it, a moment to be answered."""
    began = time.monotonic()
    request.scope[ANSWER_WITHIN] = math.inf
    yield
    request.scope[ANSWER_WITHIN] = time.monotonic() - began + ANSWER_SECONDS
    request.scope[ASKS_DATABASE] = True


async def _pass_on(unstored: bytearray, upload: Upload, *, least: int, limiter: CapacityLimiter) -> None:
    if len(unstored) >= least:
        data = bytes(unstored)
        unstored.clear()
        await in_store(upload.write, data, limiter=limiter)


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
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        yield chunk


class FileForm(HeaderCollector):
    """Gathers what the parser reports of a form with one file; of that only what has not been stored.

    Args:
        max_bytes: of the file.
        fields: names of the other fields; one that ends with `[]` is a map, whose fields are `name[key]`.
        max_text_bytes: of each of them.
    """

    def __init__(self, max_bytes: int, *, fields: Collection[str], max_text_bytes: int) -> None:
        super().__init__()
        self.unstored = bytearray()
        self.num_bytes = 0
        self.filename = ""
        self.texts: list[tuple[str, Value]] = []
        self._max_bytes = max_bytes
        self._max_text_bytes = max_text_bytes
        self._fields = fields
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

    def check(self) -> None:
        """
        Raises:
            InvalidForm: the form is not whole.
        """
        if not self._is_complete:
            raise InvalidForm("the multipart body is malformed: it ends before its last boundary")
        if "file" not in self._seen:
            raise _missing("file")
        if not self.num_bytes:
            raise InvalidForm("file is empty", param="file", code="invalid_value")

    def has(self, name: str) -> bool:
        """Whether this field came."""
        return name in self._seen

    def check_text(self, name: str, value: Value) -> None:
        """Refuse the value of a field as soon as it is there.

        Raises:
            InvalidForm
        """

    def begin_file(self) -> None:
        """Refuse what was said before the file, of which nothing has been read.

        Raises:
            ApiError, InvalidForm, InvalidRequest
        """

    def _part_begin(self) -> None:
        self._headers = {}
        self._text = bytearray()

    def _headers_finished(self) -> None:
        self._head = head = part_head(self._headers)
        name = printable(head.name)
        if head.name != "file" and not self._is_known(head.name):
            raise InvalidForm(f"unknown parameter: {name}", param=name, code="unknown_parameter")
        if head.name in self._seen:
            raise InvalidForm(f"duplicate field: {name}", param=name, code="duplicate_parameter")
        self._seen.add(head.name)
        if head.name == "file":
            if head.filename is None:
                raise InvalidForm("file must be a file: its part needs a filename", param="file", code="invalid_value")
            self.filename = safe_filename(head.filename)
            self.begin_file()
        elif head.filename is not None:
            raise InvalidForm(f"{name} must be text, got a file", param=name, code="invalid_value")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._head is not None
        if self._head.name != "file":
            self._text += data[start:end]
            if len(self._text) > self._max_text_bytes:
                name = printable(self._head.name)
                raise InvalidForm(
                    f"{name} may have at most {self._max_text_bytes} bytes, got more", param=name, code="invalid_value"
                )
            return
        piece = data[start:end]
        self.num_bytes += len(piece)
        if self.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self.unstored += piece

    def _part_end(self) -> None:
        head = self._head
        assert head is not None
        if head.name == "file":
            return
        value = head.text(bytes(self._text))
        self.check_text(head.name, value)
        self.texts.append((head.name, value))

    def _end(self) -> None:
        self._is_complete = True

    def _is_known(self, name: str) -> bool:
        return name in self._fields or ("[" in name and f"{name.partition('[')[0]}[]" in self._fields)


class _UploadForm(FileForm):
    """A file for later."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, fields=_FIELDS, max_text_bytes=_MAX_TEXT_BYTES)

    def check(self) -> None:
        super().check()
        if not self.has("purpose"):
            raise _missing("purpose")

    def check_text(self, name: str, value: Value) -> None:
        if name == "purpose" and value not in PURPOSES:
            raise InvalidForm(
                f"purpose must be one of {', '.join(PURPOSES)}, got {shown(value)}",
                param="purpose",
                code="invalid_value",
            )

    def wanted(self, *, sha256: str) -> Wanted:
        """What the whole form says.

        Args:
            sha256: of the file.

        Raises:
            ApiError, InvalidRequest
        """
        try:
            members = assemble(self.texts, parse_json=parse_json, max_depth=2)
        except InvalidForm as error:
            raise ApiError(str(error), param=error.param, code=error.code) from error
        if "expires_after" in members:
            members["expires_after"] = _typed(members["expires_after"])
        sent = {"filename": self.filename, "bytes": self.num_bytes, "sha256": sha256}
        return parse_as(Wanted, members | sent)


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
    return body_too_slow(
        f"after {GRACE_SECONDS:g} seconds it must come with at least {LEAST_BYTES_PER_SECOND} bytes per second, and "
        f"without pauses of {SILENT_SECONDS:g} seconds"
    )


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_body")
