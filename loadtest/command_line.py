"""What the command lines of the load tests share: arguments that are checked, and an end without a traceback."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rushes_cli.bench_case import canvas_of
from rushes_cli.main import UsageError, status_of
from rushes_core.clip import Clip


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a program to its end. What is wrong with its arguments, or refused, is one line, with the status of it that
    `rushes` has."""
    sys.exit(status_of(Path(sys.argv[0]).name, lambda: main() or 0))


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
        return int(text)

    return parse


def amount(text: str) -> float:
    """The type of a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def clip_seconds(text: str) -> float:
    """The type of a clip's length."""
    seconds = amount(text)
    try:
        Clip.for_seconds(seconds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return seconds


def clip_frames(text: str) -> int:
    """The type of a clip's number of frames."""
    frames = at_least(1)(text)
    try:
        Clip(frames)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return frames


def canvas(text: str) -> tuple[int, int]:
    """The type of a canvas: width and height of `WxH`."""
    try:
        return canvas_of(text, "a size")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
