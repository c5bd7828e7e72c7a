"""What a worker and its media process say to each other.

Every message carries the clip's number, so an answer about an abandoned clip is never taken for one about the next.
"""

from dataclasses import dataclass
from pathlib import Path

from rushes_worker.media.by_products import ByProduct, Missing
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.times import Span
from rushes_worker.media.validate import ClipFacts
from rushes_worker.pixels import PixelFormat


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """A clip to be made."""

    path: Path
    """The finished file; its directory must exist."""
    width: int
    height: int
    num_frames: int
    comment: str = ""
    """What the file says of itself; empty: nothing."""
    by_products: tuple[str, ...] = ()
    """Names of the variants to be made beside it."""


@dataclass(frozen=True, slots=True)
class StartClip:
    clip: int
    spec: ClipSpec
    settings: EncoderSettings


@dataclass(frozen=True, slots=True)
class AddUnit:
    """Raw frames of temporal unit `index`, one after another without a header."""

    clip: int
    index: int
    path: Path
    num_frames: int
    pixels: PixelFormat


@dataclass(frozen=True, slots=True)
class SetAudio:
    """A `.npy` file of float32 [2, N]."""

    clip: int
    path: Path


@dataclass(frozen=True, slots=True)
class FinishClip:
    clip: int


@dataclass(frozen=True, slots=True)
class AbortClip:
    clip: int


Command = StartClip | AddUnit | SetAudio | FinishClip | AbortClip


@dataclass(frozen=True, slots=True)
class MadeClip:
    """A finished clip and what lies beside it."""

    facts: ClipFacts
    by_products: tuple[ByProduct, ...] = ()
    missing: tuple[Missing, ...] = ()
    """What was asked for and could not be made."""
    spans: tuple[Span, ...] = ()
    """When what was at work on it."""


@dataclass(frozen=True, slots=True)
class Finished:
    clip: int
    made: MadeClip


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nothing of the clip is left on disk."""

    clip: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The clip cannot be made any more; everything of it is deleted."""

    clip: int
    kind: str
    """Class name of the error."""
    message: str


Reply = Finished | Aborted | Failed
