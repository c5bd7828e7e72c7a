"""Request bodies: JSON and both kinds of form, through one strict door, to one plain dict."""

from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Any, cast

from fastapi import Request
from rushes_core import strict_json
from rushes_core.fields import printable, shown
from rushes_core.strict_json import DuplicateKey, InvalidJson
from starlette.requests import ClientDisconnect

from rushes_api.errors import ApiError, BodyTooLarge, UnsupportedMedia
from rushes_api.form import InvalidForm, Value, assemble, parse_multipart, parse_urlencoded, split_header

MAX_DEPTH = 16
MAX_MEMBERS = 256
"""Fields of a form, or members of all the objects of a JSON body together."""

JSON = "application/json"
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body. One that says that it is too large is refused unread, one that turns out so as soon as it does.

    Raises:
        BodyTooLarge, ApiError
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes, f"{declared[:20]} bytes")
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes, "more")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ApiError("the request body ended early", code="invalid_body") from error
    return b"".join(chunks)


def parse_body(body: bytes, *, content_types: list[str], content_encoding: str = "") -> dict[str, Any]:
    """The members of an object that came as JSON or as a form.

    Args:
        content_types: the values of the request's Content-Type headers, of which there must be one.

    Raises:
        UnsupportedMedia: the type or encoding is not understood.
        ApiError: the body is not what its type says, or holds something twice.
    """
    if content_encoding.lower() not in ("", "identity"):
        raise UnsupportedMedia(f"Content-Encoding {shown(content_encoding)} is not supported; send the body as it is")
    if len(content_types) != 1:
        what = "missing" if not content_types else "given more than once"
        raise UnsupportedMedia(f"Content-Type is {what}; supported: {JSON}, {MULTIPART}, {URLENCODED}")
    media_type, parameters = split_header(content_types[0])
    if media_type not in (JSON, MULTIPART, URLENCODED):
        raise UnsupportedMedia(
            f"Content-Type {shown(media_type)} is not supported; supported: {JSON}, {MULTIPART}, {URLENCODED}"
        )
    charset = parameters.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia(f"charset {shown(charset)} is not supported; send UTF-8")
    if not body:
        raise _invalid("the request body is empty")
    if media_type == JSON:
        return parse_json_object(body)
    if body.lstrip()[:1] == b"{":
        raise UnsupportedMedia(f"the body looks like JSON, but Content-Type is {media_type}; send {JSON}")
    items: Sequence[tuple[str, Value]]
    try:
        if media_type == MULTIPART:
            items = parse_multipart(body, boundary=parameters.get("boundary", ""), max_parts=MAX_MEMBERS)
        else:
            items = parse_urlencoded(_decoded(body), max_fields=MAX_MEMBERS)
        return assemble(items, parse_json=parse_json, max_depth=MAX_DEPTH)
    except InvalidForm as error:
        raise ApiError(str(error), param=error.param, code=error.code) from error


def parse_json_object(body: bytes, *, max_depth: int = MAX_DEPTH, max_members: int = MAX_MEMBERS) -> dict[str, Any]:
    """The JSON object that `body` is, as `parse_json` reads it.

    Raises:
        ApiError: it is none, or not in UTF-8.
    """
    value = parse_json(_decoded(body), max_depth=max_depth, max_members=max_members)
    if not isinstance(value, dict):
        raise _invalid(f"the request body must be a JSON object, got {_json_type(value)}")
    return cast("dict[str, Any]", value)


def parse_json(
    text: str, *, what: str | None = None, max_depth: int = MAX_DEPTH, max_members: int = MAX_MEMBERS
) -> Any:
    """The JSON value in `text`.

    Args:
        what: the parameter that it is; None: the body, or a part of it.

    Raises:
        ApiError: it is no JSON that is read.
    """
    try:
        return strict_json.parse_json(text, max_depth=max_depth, max_members=max_members)
    except DuplicateKey as error:
        name = printable(error.name if what is None else f"{what}.{error.name}")
        raise ApiError(f"duplicate key: {name}", param=name, code="duplicate_parameter") from error
    except InvalidJson as error:
        if what is not None:
            raise ApiError(f"{what} {error}", param=what, code="invalid_value") from error
        raise _invalid(f"the request body {error}") from error


def _decoded(body: bytes) -> str:
    if body.startswith(BOM_UTF8):
        raise _invalid("the request body begins with a byte order mark; send UTF-8 without one")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise _invalid(
            f"the request body is not valid UTF-8: byte 0x{body[error.start]:02x} at {error.start}"
        ) from error


def _too_large(max_bytes: int, got: str) -> BodyTooLarge:
    return BodyTooLarge(f"the request body may have at most {max_bytes} bytes, got {got}")


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_body")


def _json_type(value: object) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
