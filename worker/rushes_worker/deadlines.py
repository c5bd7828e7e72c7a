"""How long each stage of a job may take before it counts as hanging."""

from dataclasses import dataclass
from typing import Self

from rushes_core.clip import ADMISSIBLE_FRAMES
from rushes_core.settings import Settings
from rushes_core.states import Phase

_FRAMES = 124
REFERENCE_PIXELS = _FRAMES * 1344 * 768
"""Frames times pixels of the largest clip that the settings' seconds are meant for as they stand."""
MAX_SCALE = ADMISSIBLE_FRAMES[-1] / _FRAMES
"""By which the largest clip that is served exceeds it."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds without progress, by stage, for a clip of `REFERENCE_PIXELS` or less."""

    encoding: float
    denoising: float
    """Of one step."""
    decoding: float
    """Of one temporal unit, or the soundtrack."""
    muxing: float
    uploading: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        base = settings.stage_timeout_seconds
        return cls(
            settings.encoding_timeout_seconds or base,
            settings.step_timeout_seconds or base,
            settings.decoding_timeout_seconds or base,
            settings.muxing_timeout_seconds or base,
            settings.upload_timeout_seconds,
        )

    def seconds(self, phase: Phase, *, num_frames: int, width: int, height: int) -> float:
        """What `phase` may take for a clip of this size: in proportion to it where its work is."""
        seconds: float = getattr(self, phase.value)
        if phase in (Phase.ENCODING, Phase.UPLOADING):
            return seconds
        return seconds * max(1.0, num_frames * width * height / REFERENCE_PIXELS)

    @property
    def longest(self) -> float:
        """Of what the ranks do, for any clip that is served."""
        return max(self.encoding, self.denoising, self.decoding) * MAX_SCALE
