"""Files of campaigns in memory, and what a reader makes of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rushes_core.campaigns.lines import (
    BEGINNING,
    Content,
    Position,
    Reader,
    Record,
)
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from support.checkpoints import tiny_checkpoint

MAX_LINE = 1_000


PIECES = (1, 7, 262_144)
"""Sizes of the pieces in which the bytes come: no meaning may hang on them."""


def content_of(data: bytes, *, piece: int = 262_144, max_bytes: int = 2**31) -> Content:
    def read(start: int) -> Iterator[bytes]:
        return (data[i : i + piece] for i in range(start, len(data), piece))

    return Content(read, num_bytes=len(data), max_bytes=max_bytes)


def records(
    data: bytes, kind: str = "jsonl", *, piece: int = 262_144, start: Position = BEGINNING, max_line: int = MAX_LINE
) -> list[Record]:
    return list(Reader(content_of(data, piece=piece), kind=kind, start=start, max_line_bytes=max_line))


def values(found: list[Record]) -> dict[int, Any]:
    """What was read, by line: the members, or the error's code."""
    return {one.line: one.value if one.error is None else one.error.code for one in found}


def line(**members: Any) -> bytes:
    return json.dumps(members).encode() + b"\n"


def offline_model(folder: Path) -> ServedModel:
    """A tiny one, without servers."""
    return ServedModel.load(
        Settings(
            database_url="postgresql+psycopg://nobody@127.0.0.1:1/none",
            redis_url="redis://127.0.0.1:1/0",
            s3_bucket="none",
            checkpoint=tiny_checkpoint(folder),
        )
    )
