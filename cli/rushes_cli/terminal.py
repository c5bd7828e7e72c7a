"""What the commands tell a person: lines, tables, and a job's progress."""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

BAR_WIDTH = 24


def say(text: str) -> None:
    """Print a line. A terminal that is gone is no reason to leave servers running, so that is not an error."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it replaces stdout until the end


def print_json(value: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps(value))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class ProgressLine:
    """Shows Video objects as the API returns them: one line, rewritten on a terminal, or one line per change."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = time.monotonic()
        self._last = ""

    def show(self, video: dict[str, Any]) -> None:
        """Show the state of `video` if it differs from what was shown last."""
        line = describe(video)
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            text = f"{line}  {time.monotonic() - self._began:5.1f} s"[: columns - 1]
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
        elif line != self._last:
            print(f"{time.monotonic() - self._began:6.1f} s  {line}", file=self._stream, flush=True)
        self._last = line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()


def describe(video: dict[str, Any]) -> str:
    """Bar, percentage, phase and step of a Video object."""
    percent = int(video["progress"])
    filled = BAR_WIDTH * percent // 100
    bar = "#" * filled + "-" * (BAR_WIDTH - filled)
    step = ""
    detail = video.get("progress_detail") or {}
    if video.get("phase") == "denoising" and detail.get("total_steps"):
        step = f" step {detail['completed_steps']}/{detail['total_steps']}"
    return f"[{bar}] {percent:3d} %  {video.get('phase') or video['status']}{step}"
