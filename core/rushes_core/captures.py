"""What an operator says of the shapes that a worker keeps graphs for."""

from dataclasses import dataclass

from rushes_core.canvas import BY_SIZE
from rushes_core.clip import ADMISSIBLE_FRAMES

CAPACITY_STEP = 64
"""Rows of a whole tile of attention."""
MAX_TEXT_CAPACITY = 16_384
MAX_CAPACITIES = 16


@dataclass(frozen=True, slots=True)
class CaptureShape:
    """A shape whose graphs are to be there before the first job."""

    width: int
    height: int
    num_frames: int
    text_capacity: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.num_frames}x{self.text_capacity}"


def parse_capacities(text: str) -> tuple[int, ...]:
    """The numbers of text rows in `1024,4096`, ascending.

    Raises:
        ValueError: one is no multiple of 64 up to 16,384, comes twice, or there are too many or none.
    """
    capacities: list[int] = []
    for word in _words(text):
        if not (word.isascii() and word.isdigit()) or int(word) % CAPACITY_STEP:
            raise ValueError(f"text capacities must be multiples of {CAPACITY_STEP}, got {word!r}")
        if not CAPACITY_STEP <= int(word) <= MAX_TEXT_CAPACITY:
            raise ValueError(f"text capacities must be in {CAPACITY_STEP}..{MAX_TEXT_CAPACITY}, got {word}")
        if int(word) in capacities:
            raise ValueError(f"text capacity {word} is named twice")
        capacities.append(int(word))
    if not 1 <= len(capacities) <= MAX_CAPACITIES:
        raise ValueError(f"there must be 1..{MAX_CAPACITIES} text capacities, got {len(capacities)}")
    return tuple(sorted(capacities))


def parse_captures(text: str, capacities: tuple[int, ...]) -> tuple[CaptureShape, ...]:
    """The shapes in `1344x768x124,480x832x107x1024`: width, height, frames, and a text capacity or else all of them.

    Raises:
        ValueError: one is not written so, or is none that is served.
    """
    shapes: list[CaptureShape] = []
    for word in _words(text):
        numbers = word.split("x")
        if len(numbers) not in (3, 4) or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError(f"a shape is WIDTHxHEIGHTxFRAMES or WIDTHxHEIGHTxFRAMESxCAPACITY, got {word!r}")
        width, height, num_frames, *wanted = map(int, numbers)
        if f"{width}x{height}" not in BY_SIZE:
            raise ValueError(f"canvas {width}x{height} of {word} is not one of {', '.join(BY_SIZE)}")
        if num_frames not in ADMISSIBLE_FRAMES:
            raise ValueError(f"{num_frames} frames of {word} are not one of {', '.join(map(str, ADMISSIBLE_FRAMES))}")
        if not set(wanted) <= set(capacities):
            raise ValueError(f"text capacity {wanted[0]} of {word} is not one of {', '.join(map(str, capacities))}")
        shapes += [CaptureShape(width, height, num_frames, capacity) for capacity in wanted or capacities]
    return tuple(dict.fromkeys(shapes))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
