"""What benchmarks of devices and of a service have in common: lengths of clips, prompts and their texts, and checks."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rushes_core.captures import MAX_TEXT_CAPACITY
from rushes_core.clip import Clip
from rushes_core.fields import MAX_SEED

from rushes_cli.main import UsageError

_WORDS = "waves roll against the lighthouse at dusk while a gull calls over the harbour "

T = TypeVar("T")


def add_length_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0], help="clip lengths (default 5)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000], help="prompt lengths (default 1000)")
    parser.add_argument("--size", default="1344x768", help="canvas (default 1344x768)")


def check_lengths(arguments: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: no clip or prompt has such a length, or no clip such a seed.
    """
    for tokens in arguments.tokens:
        if not 1 <= tokens <= MAX_TEXT_CAPACITY:
            raise UsageError(f"--tokens must be in 1..{MAX_TEXT_CAPACITY}, got {tokens}")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise UsageError(f"--seed must be in 0..{MAX_SEED}, got {arguments.seed}")
    try:
        for seconds in arguments.seconds:
            Clip.for_seconds(seconds)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def check_folder(path: Path | None, option: str) -> None:
    """
    Raises:
        UsageError: the file that is to be written would have no folder to lie in.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}")


def prompt_text(length: int) -> str:
    """`length` characters of English words, of which the tiny checkpoint makes as many tokens."""
    return (_WORDS * (length // len(_WORDS) + 1))[:length]


def mixed(shapes: Sequence[T], count: int, order: random.Random) -> list[T]:
    """`count` of them in random order, each as often as the others, or once more."""
    chosen = [shapes[index % len(shapes)] for index in range(count)]
    order.shuffle(chosen)
    return chosen
