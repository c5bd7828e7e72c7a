"""Form bodies: multipart as the openai SDK, curl and browsers send it, and URL-encoded. Fields become a nested dict."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from rushes_core.fields import printable, shown

INTEGERS = frozenset({("seed",), ("num_frames",), ("priority",), ("target", "short_edge"), ("retention", "seconds")})
"""Fields whose text is read as an integer: a form has no numbers."""
BOOLEANS = frozenset({("output", "thumbnail")})
"""Fields whose text is read as true or false."""
OBJECTS = frozenset({"metadata", "target", "retention", "output"})
"""Fields whose text is read as JSON when it is an object."""
LISTS = frozenset({"conditions", "webhook_events"})
"""Fields whose text is read as JSON when it is an array."""

_INTEGER_TEXT = re.compile(r"-?[0-9]{1,20}", re.ASCII)
# what the HTML standard, and the SDK with it, escapes in the names of a part and its file
_ESCAPED = re.compile(r"%(22|0[0-9A-F]|1[0-9A-F])")
_MAX_NAME = 1_024


class InvalidForm(ValueError):
    """A form that is malformed or ambiguous; `param` is the field's name where there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_body") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True, repr=False)
class UploadedFile:
    """A part with a file name."""

    filename: str
    content_type: str
    content: bytes

    def __repr__(self) -> str:
        return f"the file {self.filename!r}"


@dataclass(frozen=True, slots=True)
class JsonText:
    """The text of a part whose own Content-Type is JSON."""

    text: str


Value = str | UploadedFile | JsonText


def split_header(value: str) -> tuple[str, dict[str, str]]:
    """The media type of a Content-Type header in lower case, and its parameters."""
    media_type, parameters = parse_options_header(value)
    decoded = {name.decode("latin-1").lower(): text.decode("latin-1") for name, text in parameters.items()}
    return media_type.decode("latin-1"), decoded


def parse_urlencoded(text: str, *, max_fields: int) -> list[tuple[str, str]]:
    """The fields of an `application/x-www-form-urlencoded` body, in order.

    Raises:
        InvalidForm: it is malformed, has more than `max_fields` fields, or text that is not UTF-8.
    """
    if text.count("&") >= max_fields:
        raise _too_many_fields(max_fields)
    try:
        return parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidForm("a field of the form is not valid UTF-8") from error
    except ValueError as error:
        raise InvalidForm(f"the form is malformed: {printable(str(error))}") from error


def parse_multipart(body: bytes, *, boundary: str, max_parts: int) -> list[tuple[str, Value]]:
    """The parts of a `multipart/form-data` body, in order.

    Raises:
        InvalidForm: it is malformed, truncated, has more than `max_parts` parts, or text that is not UTF-8.
    """
    if not boundary:
        raise InvalidForm("Content-Type multipart/form-data lacks its boundary")
    collector = _Collector(max_parts)
    try:
        parser = MultipartParser(boundary.encode("latin-1"), collector.callbacks(), max_size=len(body) + 1)
        parser.write(body)
    except FormParserError as error:
        raise InvalidForm(f"the multipart body is malformed: {printable(str(error))}") from error
    if not collector.is_complete:
        raise InvalidForm("the multipart body is malformed: it ends before its last boundary")
    return [part.item() for part in collector.parts]


@dataclass(frozen=True, slots=True)
class PartHead:
    """What the headers of a part say."""

    name: str
    filename: str | None
    media_type: str
    charset: str

    def text(self, data: bytes) -> str | JsonText:
        """The value of a part that is no file.

        Raises:
            InvalidForm: it is not UTF-8, or says so.
        """
        if self.charset.lower() not in ("utf-8", "utf8", "us-ascii"):
            raise InvalidForm(f"{printable(self.name)}: charset {shown(self.charset)} is not supported; send UTF-8")
        text = _utf8(data, printable(self.name))
        return JsonText(text) if self.media_type == "application/json" else text


def part_head(headers: Mapping[str, str]) -> PartHead:
    """What `headers`, by their names in lower case, say of a part.

    Raises:
        InvalidForm
    """
    disposition, parameters = parse_options_header(headers.get("content-disposition", ""))
    if disposition != b"form-data" or b"name" not in parameters:
        raise InvalidForm("a part of the multipart body lacks `Content-Disposition: form-data; name=...`")
    name = _unescaped(_utf8(parameters[b"name"], "a field's name"))
    encoding = headers.get("content-transfer-encoding", "binary").strip().lower()
    if encoding not in ("7bit", "8bit", "binary"):
        raise InvalidForm(f"{printable(name)}: Content-Transfer-Encoding {shown(encoding)} is not supported")
    media_type, options = split_header(headers.get("content-type", ""))
    filename = parameters.get(b"filename")
    decoded = None if filename is None else _unescaped(filename.decode(errors="replace"))
    return PartHead(name, decoded, media_type, options.get("charset", "utf-8"))


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), name)


@dataclass(slots=True)
class _Part:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)

    def item(self) -> tuple[str, Value]:
        head = part_head(self.headers)
        if head.filename is not None:
            return head.name, UploadedFile(head.filename, head.media_type, bytes(self.data))
        return head.name, head.text(bytes(self.data))


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidForm(f"{what} is not valid UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from error


class HeaderCollector:
    """Puts the headers of a part together from the pieces that the parser reports."""

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}
        self._name = b""
        self._value = b""

    def header_callbacks(self) -> dict[str, Any]:
        return {
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
        }

    def _header_begin(self) -> None:
        self._name = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = self._value.decode("latin-1")


class _Collector(HeaderCollector):
    """Gathers what the parser reports."""

    def __init__(self, max_parts: int) -> None:
        super().__init__()
        self.parts: list[_Part] = []
        self.is_complete = False
        self._max_parts = max_parts

    def callbacks(self) -> Any:
        return {
            **self.header_callbacks(),
            "on_part_begin": self._part_begin,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        if len(self.parts) == self._max_parts:
            raise _too_many_fields(self._max_parts)
        part = _Part()
        self.parts.append(part)
        self._headers = part.headers

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += data[start:end]

    def _end(self) -> None:
        self.is_complete = True


def assemble(items: Sequence[tuple[str, Value]], *, parse_json: Callable[[str], Any], max_depth: int) -> dict[str, Any]:
    """A nested dict from fields named `metadata[key]` or `list[]`, as the openai SDK flattens them.

    Raises:
        InvalidForm: a field comes twice, or once as a value and once as a map.
    """
    members: dict[str, Any] = {}
    for name, value in items:
        path = split_name(name)
        if len(path) > max_depth:
            raise InvalidForm(
                f"{printable(name)} is nested more than {max_depth} levels deep", param=printable(path[0])
            )
        _insert(members, path, _typed(path, value, parse_json), printable(name))
    return members


def split_name(name: str) -> list[str]:
    """The keys in `a[b][c]`; an empty one is a list's next place. A name without that form is one key."""
    if len(name) > _MAX_NAME:
        raise InvalidForm(f"a field's name of {len(name)} characters is longer than the {_MAX_NAME} that are read")
    opening = name.find("[")
    if opening <= 0:
        return [name]
    path = [name[:opening]]
    depth, start = 0, opening
    for position in range(opening, len(name)):
        character = name[position]
        if character == "[":
            start = position + 1 if depth == 0 else start
            depth += 1
        elif character == "]":
            depth -= 1
            if depth == 0:
                path.append(name[start:position])
        if depth < 0 or (depth == 0 and character != "]"):
            return [name]
    return path if depth == 0 else [name]


def _typed(path: list[str], value: Value, parse_json: Callable[[str], Any]) -> Any:
    if isinstance(value, JsonText):
        return parse_json(value.text)
    if isinstance(value, UploadedFile):
        return value
    kind = tuple(path)
    if kind in INTEGERS and _INTEGER_TEXT.fullmatch(value):
        return int(value)
    if kind in BOOLEANS and value in ("true", "false"):
        return value == "true"
    opening = "{" if path[0] in OBJECTS else "[" if path[0] in LISTS else None
    if len(path) == 1 and opening is not None and value.lstrip().startswith(opening):
        return parse_json(value)
    return value


def _insert(members: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    node: Any = members
    for key, following in zip(path, [*path[1:], None], strict=True):
        fresh: Any = value if following is None else ([] if following == "" else {})
        if isinstance(node, list):
            places = cast("list[Any]", node)
            if key != "":
                raise _ambiguous(name)
            places.append(fresh)
            node = fresh
        elif isinstance(node, dict):
            children = cast("dict[str, Any]", node)
            if key == "" and children is not members:
                raise _ambiguous(name)
            if key not in children:
                children[key] = fresh
            elif following is None:
                raise InvalidForm(f"duplicate field: {name}", param=name, code="duplicate_parameter")
            node = children[key]
        else:
            raise _ambiguous(name)


def _ambiguous(name: str) -> InvalidForm:
    return InvalidForm(f"{name} is given both as a value and as a map or list", param=name)


def _too_many_fields(max_fields: int) -> InvalidForm:
    return InvalidForm(f"the form has more than the {max_fields} fields that are read")
