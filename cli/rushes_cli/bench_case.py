"""What benchmarks render: clips by size, length and prompt, and the options that name them."""

import argparse
from dataclasses import dataclass

from rushes_core.clip import Clip
from rushes_worker.layout import SERVED_DEGREES
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pipeline.options import ATTENTION, PipelineOptions

from rushes_cli.bench_lengths import add_length_options, check_lengths, prompt_text
from rushes_cli.main import UsageError

SYNTHETIC = "synthetic"
CANVAS_STEP, MAX_CANVAS_SIDE = 32, 4_096
"""Pixels of a side: what one token of the transformer stands for, and more than any served canvas has."""


@dataclass(frozen=True, slots=True)
class Case:
    """A clip to time."""

    width: int
    height: int
    seconds: float
    tokens: int

    @property
    def title(self) -> str:
        return f"{self.seconds:g} s, {self.tokens:,} tokens, {self.width}x{self.height}"

    def request(self, seed: int) -> RenderRequest:
        prompt = prompt_text(self.tokens - 1) + "."
        frames = Clip.for_seconds(self.seconds).num_frames
        return RenderRequest("bench", 1, prompt, seed, self.width, self.height, frames)


def add_clip_options(parser: argparse.ArgumentParser, *, warm_up: int, repeat: int) -> None:
    parser.add_argument(
        "--weights",
        required=True,
        metavar="DIR",
        help=f"a checkpoint, or `{SYNTHETIC}`: the released sizes with random weights, drawn on the GPU",
    )
    add_length_options(parser)
    parser.add_argument(
        "--repeat", type=int, default=repeat, help=f"clips that count, after --warm-up (default {repeat})"
    )
    parser.add_argument("--warm-up", type=int, default=warm_up, help=f"clips before them (default {warm_up})")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the noise (default 0)")
    parser.add_argument(
        "--attention", choices=ATTENTION, help="provider of sparse attention (default: the device decides)"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the pipeline, such as precision=fp8"
    )


def options_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What the pipeline is asked for.

    Raises:
        UsageError: it takes no such option.
    """
    attention = [] if arguments.attention is None else [f"attention={arguments.attention}"]
    options = (*attention, *arguments.option)
    try:
        PipelineOptions.parse(options)
    except ValueError as error:
        raise UsageError(f"--option: {error}") from None
    return options


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """
    Raises:
        UsageError: a size, a length or a count cannot be.
    """
    width, height = canvas_of(arguments.size, "--size")
    for name, count, least in (("--repeat", arguments.repeat, 1), ("--warm-up", arguments.warm_up, 0)):
        if count < least:
            raise UsageError(f"{name} must be at least {least}, got {count}")
    check_lengths(arguments)
    return [Case(width, height, seconds, tokens) for seconds in arguments.seconds for tokens in arguments.tokens]


def canvas_of(size: str, option: str) -> tuple[int, int]:
    """Width and height.

    Raises:
        UsageError: `size` is not of the form WIDTHxHEIGHT, or no canvas can have it.
    """
    try:
        width, height = map(int, size.split("x"))
    except ValueError:
        raise UsageError(f"{option} must be WIDTHxHEIGHT, got {size}") from None
    if any(not CANVAS_STEP <= side <= MAX_CANVAS_SIDE or side % CANVAS_STEP for side in (width, height)):
        raise UsageError(
            f"{option}: width and height must be multiples of {CANVAS_STEP} up to {MAX_CANVAS_SIDE}, got {size}"
        )
    return width, height


def check_degree(sp: int) -> None:
    """
    Raises:
        UsageError: no replica has so many ranks.
    """
    if sp not in SERVED_DEGREES:
        raise UsageError(f"--sp must be one of {', '.join(map(str, SERVED_DEGREES))}, got {sp}")
