"""Reading a campaign's file: from bytes, as they come, to one record a request. Memory does not grow with the file.

A line is a physical one, counted from 1. What is wrong with one line is an error of that line; what makes the file as a
whole unreadable is a `FileUnreadable`.
"""

import csv
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

from rushes_core.errors import InvalidRequest, RushesError
from rushes_core.fields import Output, Retention, Target, is_storable, printable, shown
from rushes_core.request import VideoRequest
from rushes_core.strict_json import DuplicateKey, InvalidJson, parse_json

MAX_DEPTH = 16
MAX_MEMBERS = 256
"""Of one line: how deep its values may be nested, and how many members its objects may have together."""
MAX_RATIO = 250
"""How many times its size a file may decompress to, once that is more than `FREE_BYTES`."""
FREE_BYTES = 64 * 1024 * 1024

INVALID_LINE = "invalid_line"
LINE_TOO_LONG = "line_too_long"
CUSTOM_ID = "custom_id"
OF_CAMPAIGNS = {
    "not_before": "a campaign starts all its lines: its own not_before says when",
    "webhook_url": "a campaign's own webhook_url is told of its lines",
    "callback_url": "a campaign's own webhook_url is told of its lines",
    "webhook_events": "a campaign's own webhook_url is told of its lines",
}
"""Members of a request that no line may have, and why."""

_PIECE_BYTES = 256 * 1024
_HEAD_BYTES = 4_096
"""Enough to tell what kind of file it is."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_DELIMITERS = ",;\t"
_SEPARATOR_LINE = re.compile(rb'"?sep=([,;|\t])"?\r?', re.IGNORECASE)
"""A line before the header, by which Excel tells itself the delimiter."""
_CSV_NAMES = (".csv", ".tsv")
_JSONL_NAMES = (".jsonl", ".ndjson", ".json")
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_INTEGERS = frozenset({"seed", "num_frames", "priority", "target.short_edge", "retention.seconds"})
_BOOLEANS = {"true": True, "false": False}
_BOOLEAN_COLUMNS = frozenset({"output.thumbnail"})
_NESTED: dict[str, Sequence[str]] = {
    "target": list(Target.model_fields),
    "output": list(Output.model_fields),
    "retention": list(Retention.model_fields),
}
_METADATA = "metadata."

# the csv module has one limit for all its readers: here whole records are bounded
csv.field_size_limit(2**31 - 1)


class FileUnreadable(RushesError):
    """A campaign's file cannot be read as a whole: `line` is where, if anybody can tell."""

    code = "invalid_file"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, line: int | None = None):
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param
        self.line = line


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line could not become a job."""

    code: str
    param: str | None
    message: str

    @classmethod
    def of(cls, error: InvalidRequest) -> "LineError":
        return cls(error.code, error.param, str(error))


class Position(NamedTuple):
    """A place between two lines of a file, not compressed."""

    num_bytes: int
    num_lines: int


BEGINNING = Position(0, 0)


class Record(NamedTuple):
    """What stands in one line, or why that cannot be read. `value` has the members of a JSON object."""

    line: int
    end: Position
    """Where the next line begins."""
    value: dict[str, Any] | None
    error: LineError | None


class Survey(NamedTuple):
    """What a pass over the whole file found."""

    num_bytes: int
    """Not compressed."""
    num_lines: int


class Content:
    """A stored file's bytes, decompressed if they are gzip.

    Args:
        read: the bytes that are stored, from an offset on.
        num_bytes: how many are stored.
        max_bytes: how many there may be, decompressed.
    """

    def __init__(self, read: Callable[[int], Iterator[bytes]], *, num_bytes: int, max_bytes: int) -> None:
        self._read = read
        self._num_bytes = num_bytes
        self._max_bytes = max_bytes
        self._is_gzip: bool | None = None

    def pieces(self, start: int = 0) -> Iterator[bytes]:
        """From `start` on, in pieces of bounded size.

        Raises:
            FileUnreadable: it is damaged, or too large.
            StorageError
        """
        if self._is_gzip is None:
            self._is_gzip = _beginning(self._read(0)).startswith(_GZIP)
        if not self._is_gzip:
            if self._num_bytes > self._max_bytes:
                raise self._too_large()
            return self._read(start)
        return _without(start, self._decompressed())

    def head(self) -> bytes:
        """How it begins."""
        return _beginning(self.pieces())

    def _decompressed(self) -> Iterator[bytes]:
        """All members of the gzip file, after each other."""
        inflater = zlib.decompressobj(wbits=31)
        num_read = num_made = 0
        # what is added at the end: nothing more comes in, but something may still come out
        for stored in chain(self._read(0), [b""]):
            num_read += len(stored)
            data = stored
            while True:
                if inflater.eof:
                    # zeros fill the last block of a tape
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    inflater = zlib.decompressobj(wbits=31)
                try:
                    made = inflater.decompress(data, _PIECE_BYTES)
                except zlib.error as error:
                    raise _damaged(f"damaged after byte {num_read - len(data)}: {error}") from error
                data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
                num_made += len(made)
                if num_made > self._max_bytes:
                    raise self._too_large()
                if num_made > max(FREE_BYTES, MAX_RATIO * num_read):
                    raise FileUnreadable(
                        f"the file decompresses to more than {MAX_RATIO} times its size", code="file_too_large"
                    )
                if made:
                    yield made
                elif not data:
                    break
        if not inflater.eof:
            raise _damaged(f"cut off at byte {num_read}")

    def _too_large(self) -> FileUnreadable:
        return FileUnreadable(
            f"the file may have at most {self._max_bytes} bytes when it is not compressed, it has more",
            code="file_too_large",
        )


def _beginning(pieces: Iterator[bytes]) -> bytes:
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= _HEAD_BYTES:
            break
    return head


def _damaged(what: str) -> FileUnreadable:
    return FileUnreadable(f"the gzip file is {what}", code="invalid_gzip")


def _without(count: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """`pieces` without their first `count` bytes."""
    for piece in pieces:
        if count < len(piece):
            yield piece[count:] if count else piece
        count = max(0, count - len(piece))


def survey(content: Content, *, max_lines: int) -> Survey:
    """Read the file once, and keep nothing of it.

    Raises:
        FileUnreadable: it is damaged, too large, in another encoding, or has nothing in it.
        StorageError
    """
    check_encoding(content.head())
    num_bytes = num_lines = 0
    last = b"\n"
    has_text = False
    for piece in content.pieces():
        if not piece:
            continue
        num_bytes += len(piece)
        num_lines += piece.count(b"\n")
        last = piece[-1:]
        has_text = has_text or bool(piece.removeprefix(_BOM).strip())
        if num_lines > max_lines:
            break
    num_lines += last != b"\n"
    if num_lines > max_lines:
        raise FileUnreadable(f"the file may have at most {max_lines} lines, it has more", code="too_many_lines")
    if not has_text:
        raise no_requests()
    return Survey(num_bytes, num_lines)


def no_requests() -> FileUnreadable:
    return FileUnreadable("the file has no requests in it", code="no_requests")


def check_encoding(head: bytes) -> None:
    """
    Raises:
        FileUnreadable: what begins so is not UTF-8.
    """
    for mark, name in _OTHER_ENCODINGS:
        if head.startswith(mark):
            raise _not_utf8(name)
    # half of the bytes of Latin text are zero in UTF-16, and a text without a mark begins with one of the first two
    if head[:1] == b"\0" or head[1:2] == b"\0":
        raise _not_utf8("UTF-16 or UTF-32, as its zero bytes tell")


def _not_utf8(name: str) -> FileUnreadable:
    return FileUnreadable(f"the file is encoded in {name}; send UTF-8", code="unsupported_encoding")


def format_of(head: bytes, filename: str) -> str:
    """`jsonl` or `csv`, by how a file begins and what it is called."""
    if head.removeprefix(_BOM).lstrip()[:1] == b"{":
        return "jsonl"
    name = filename.lower().removesuffix(".gz")
    if name.endswith(_CSV_NAMES):
        return "csv"
    return "jsonl" if name.endswith(_JSONL_NAMES) or head.removeprefix(_BOM).lstrip()[:1] == b"[" else "csv"


class Reader:
    """The records of a file from a position on.

    Args:
        kind: `jsonl` or `csv`.
        start: where a record begins: one that an earlier reader of the same file was at.
        max_line_bytes: of one record.
    """

    def __init__(self, content: Content, *, kind: str, start: Position = BEGINNING, max_line_bytes: int) -> None:
        """
        Raises:
            FileUnreadable: its encoding or its header tells that no line can be read.
            StorageError
        """
        head = content.head()
        check_encoding(head)
        self.position = start
        """After the last line that was read, blank ones included; at first `start`."""
        self._max_line_bytes = max_line_bytes
        beginning = Position(len(_BOM), 0) if head.startswith(_BOM) else BEGINNING
        table = _Table.of(self._lines(content, beginning)) if kind == "csv" else None
        self.position = start
        if start == BEGINNING:
            start = beginning if table is None else table.begins
        lines = self._lines(content, start)
        self._records = (
            _json_records(lines, max_line_bytes) if table is None else table.records(_Tracker(lines, max_line_bytes))
        )

    def __iter__(self) -> Iterator[Record]:
        """
        Raises:
            FileUnreadable, StorageError
        """
        return self._records

    def _lines(self, content: Content, start: Position) -> "Iterator[_Line]":
        for line in _physical_lines(content.pieces(start.num_bytes), start, self._max_line_bytes):
            self.position = line.end
            yield line


class _Line(NamedTuple):
    end: Position
    data: bytes | None
    """With what ends it, but for the line feed of JSONL's; None: it is longer than any that is read."""


def _physical_lines(pieces: Iterator[bytes], start: Position, max_bytes: int) -> Iterator[_Line]:
    offset, number = start
    begun: list[bytes] = []
    num_begun = 0
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            offset += len(part) + 1
            number += 1
            if num_begun:
                data = None if num_begun + len(part) > max_bytes else b"".join([*begun, part])
                begun, num_begun = [], 0
            else:
                data = None if len(part) > max_bytes else part
            yield _Line(Position(offset, number), data)
        if rest:
            offset += len(rest)
            num_begun += len(rest)
            begun = [*begun, rest] if num_begun <= max_bytes else []
    if num_begun:
        yield _Line(Position(offset, number + 1), None if num_begun > max_bytes else b"".join(begun))


def _json_records(lines: Iterator[_Line], max_line_bytes: int) -> Iterator[Record]:
    too_long = LineError(LINE_TOO_LONG, None, f"the line is longer than the {max_line_bytes} bytes that are read")
    for end, data in lines:
        if data is None:
            yield Record(end.num_lines, end, None, too_long)
        elif data and not data.isspace():
            try:
                yield Record(end.num_lines, end, _members(data), None)
            except InvalidRequest as error:
                yield Record(end.num_lines, end, None, LineError.of(error))


def _members(data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data.decode(), max_depth=MAX_DEPTH, max_members=MAX_MEMBERS)
    except UnicodeDecodeError as error:
        raise _invalid(f"is not valid UTF-8: byte {data[error.start]:#04x} at {error.start}") from error
    except DuplicateKey as error:
        name = printable(error.name)
        raise InvalidRequest(f"duplicate key: {name}", param=name, code="duplicate_parameter") from error
    except InvalidJson as error:
        raise _invalid(str(error)) from error
    if not isinstance(value, dict):
        raise _invalid(f"must be a JSON object, got {shown(value)}")
    return cast("dict[str, Any]", value)


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the line {problem}", code=INVALID_LINE)


class _LongLine(Exception):
    """The record has a line that is longer than any that is read."""


class _Tracker:
    """Lines as the csv module takes them, which knows how far that has come."""

    def __init__(self, lines: Iterator[_Line], max_record_bytes: int) -> None:
        self._lines = lines
        self.max_record_bytes = max_record_bytes
        self._num_bytes = 0
        self.first = 0
        """Line in which the record begins, which the csv module is reading; 0: none has begun."""
        self.end = BEGINNING

    def begin(self) -> None:
        self.first, self._num_bytes = 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.end, data = next(self._lines)
        self.first = self.first or self.end.num_lines
        self._num_bytes += 0 if data is None else len(data) + 1
        if data is None or self._num_bytes > self.max_record_bytes:
            raise _LongLine
        # what is no UTF-8 is told of when the record is whole
        return data.decode(errors="surrogateescape") + "\n"


@dataclass(frozen=True, slots=True)
class _Table:
    """A CSV file's columns."""

    columns: Sequence[str]
    delimiter: str
    begins: Position
    """Where the first line after the header begins."""

    @classmethod
    def of(cls, lines: Iterator[_Line]) -> "_Table":
        """The table whose header is the first line that is not blank and is no `_SEPARATOR_LINE`.

        Raises:
            FileUnreadable
        """
        told: str | None = None
        for end, data in lines:
            if data is None:
                raise FileUnreadable("the header is longer than any line that is read", code="invalid_header", line=1)
            separator = _SEPARATOR_LINE.fullmatch(data) if told is None else None
            if separator is not None:
                told = separator[1].decode()
            elif data.strip():
                return cls._of_header(data, end, told)
        raise no_requests()

    @classmethod
    def _of_header(cls, data: bytes, end: Position, delimiter: str | None) -> "_Table":
        line = end.num_lines
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise FileUnreadable(
                f"the header is not valid UTF-8: byte {data[error.start]:#04x} at {error.start}",
                code="unsupported_encoding",
                line=line,
            ) from error
        candidates = [(names, mark) for mark in delimiter or _DELIMITERS if (names := _header(text, mark))]
        if not candidates:
            raise FileUnreadable("the header cannot be read: a quote is not closed", code="invalid_header", line=line)
        # one column has no delimiter, and a comma may stand in the name of one
        names, delimiter = max(candidates, key=lambda one: (sum(map(_is_column, one[0])), len(one[0])))
        # spreadsheets write columns that once had something in them
        for name in filter(None, names) if any(names) else names:
            if not _is_column(name):
                members = [one for one in VideoRequest.model_fields if _is_column(one) and one not in OF_CAMPAIGNS]
                known = [CUSTOM_ID, *members, f"{_METADATA}NAME"]
                known += [f"{parent}.{child}" for parent, children in _NESTED.items() for child in children]
                raise FileUnreadable(
                    f"the header names no column of requests: {shown(name)}; known: {', '.join(known)}",
                    code="unknown_parameter",
                    param=printable(name),
                    line=line,
                )
            if names.count(name) > 1:
                message = f"the header has the column {name} more than once"
                raise FileUnreadable(message, code="duplicate_parameter", param=name, line=line)
        return cls(names, delimiter, end)

    def records(self, lines: _Tracker) -> Iterator[Record]:
        rows = csv.reader(lines, delimiter=self.delimiter, strict=True)
        while True:
            lines.begin()
            cells: list[str] = []
            error = None
            try:
                cells = next(rows)
            except StopIteration:
                return
            except _LongLine:
                error = LineError(
                    LINE_TOO_LONG,
                    None,
                    f"the record is longer than the {lines.max_record_bytes} bytes that are read; what follows line "
                    f"{lines.end.num_lines} is taken for the next one",
                )
            except csv.Error as problem:
                message = f"the record is not valid CSV: {problem}"
                if lines.end.num_lines > lines.first:
                    message += f"; it took lines {lines.first} to {lines.end.num_lines}: a quote in it is not closed"
                error = LineError(INVALID_LINE, None, message)
            if error is None and any(cells):
                try:
                    yield Record(lines.first, lines.end, self._members(cells), None)
                except InvalidRequest as problem:
                    error = LineError.of(problem)
            if error is not None:
                yield Record(lines.first, lines.end, None, error)

    def _members(self, cells: list[str]) -> dict[str, Any]:
        if len(cells) != len(self.columns):
            raise InvalidRequest(
                f"the record has {len(cells)} cells, the header {len(self.columns)}", code=INVALID_LINE
            )
        members: dict[str, Any] = {}
        for number, (name, cell) in enumerate(zip(self.columns, cells, strict=True), start=1):
            if cell == "":
                continue
            if not name:
                raise InvalidRequest(f"column {number} has no name in the header", code=INVALID_LINE)
            if not cell.isascii() and not is_storable(cell):
                raise InvalidRequest(f"{name} is not valid UTF-8", param=name, code=INVALID_LINE)
            parent, dot, child = name.partition(".")
            if dot:
                members.setdefault(parent, {})[child] = _typed(name, cell)
            else:
                members[name] = _typed(name, cell)
        return members


def _header(text: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([text], delimiter=delimiter, strict=True))]
    except csv.Error:
        return []


def _is_column(name: str) -> bool:
    parent, _, child = name.partition(".")
    if name.startswith(_METADATA):
        return bool(child) and is_storable(child)
    if child:
        return child in _NESTED.get(parent, ())
    return name == CUSTOM_ID or (name in VideoRequest.model_fields and name not in (*_NESTED, "metadata", "conditions"))


def _typed(name: str, cell: str) -> Any:
    """A cell as the strict fields of a request take it: text, but for what no text can be."""
    if name in _INTEGERS and _INTEGER_TEXT.fullmatch(cell):
        return int(cell)
    if name in _BOOLEAN_COLUMNS:
        return _BOOLEANS.get(cell.lower(), cell)
    return cell
