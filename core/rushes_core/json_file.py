"""Reading the small JSON files of a checkpoint, strictly: each is one object."""

from pathlib import Path
from typing import cast

from rushes_core.errors import CheckpointError
from rushes_core.read_fault import read_fault
from rushes_core.strict_json import InvalidJson, parse_json

MAX_JSON_BYTES = 64 << 20
"""The largest file that is read: the tokenizer and the indexes of the released checkpoint stay below 16 MiB."""
MAX_DEPTH = 64


def read_json_object(path: Path) -> dict[str, object]:
    """The object that `path` holds.

    Raises:
        CheckpointError: the file is missing, unreadable or too large, or it is not one JSON object with unique keys
            and finite numbers.
        CheckpointUnreadable: its file system failed.
    """
    return parse_json_object(read_small_file(path), path)


def read_small_file(path: Path) -> bytes:
    """The bytes of `path`, a regular file of at most `MAX_JSON_BYTES`."""
    try:
        if not path.is_file():
            absent = "a link that leads nowhere" if path.is_symlink() else "missing"
            raise CheckpointError(f"{path}: {'not a file' if path.exists() else absent}")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} expected of such a file")
        return path.read_bytes()
    except OSError as error:
        raise read_fault(path, error) from error


def parse_json_object(data: bytes, source: Path | str) -> dict[str, object]:
    """As `read_json_object`, from bytes; `source` names them in errors."""
    try:
        value: object = parse_json(data, max_depth=MAX_DEPTH)
    except InvalidJson as error:
        raise CheckpointError(f"{source}: not readable JSON: it {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, found {type(value).__name__}")
    return cast("dict[str, object]", value)
