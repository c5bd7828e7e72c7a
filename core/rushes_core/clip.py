"""Clip arithmetic: from seconds to the frames, latents and samples that FastH3 makes of them.

The video VAE works in temporal units of 17 frames with a 5-frame tail, so a clip has 17k + 5 frames; a request is
rounded up to the next such count (FastH3 reference; durations 4 to 15 seconds as requested, before rounding up).
"""

from dataclasses import dataclass

FPS = 24
AUDIO_SAMPLE_RATE = 32_000
AUDIO_LATENTS_PER_SECOND = 40
MIN_SECONDS = 4
MAX_SECONDS = 15

UNIT_FRAMES = 17
"""Of a temporal unit; the last one of a clip has the tail too."""
_TAIL_FRAMES = 5
_UNIT_LATENTS = 5
_TAIL_LATENTS = 2


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip of an admissible length."""

    num_frames: int

    def __post_init__(self) -> None:
        if self.num_frames not in ADMISSIBLE_FRAMES:
            raise ValueError(f"num_frames={self.num_frames} is not one of {', '.join(map(str, ADMISSIBLE_FRAMES))}")

    @classmethod
    def for_seconds(cls, seconds: float) -> "Clip":
        """The clip that serves a request of `seconds`: `round(seconds * 24)` frames, up to the next 17k + 5.

        Raises:
            ValueError: `seconds` is outside 4..15.
        """
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise ValueError(f"seconds must be between {MIN_SECONDS} and {MAX_SECONDS}, got {seconds:g}")
        return cls(frames_for(round(seconds * FPS)))

    @classmethod
    def for_frames(cls, num_frames: int) -> "Clip":
        """The clip that serves a request of `num_frames`, up to the next 17k + 5.

        Raises:
            ValueError: the clip would be shorter or longer than any that is served.
        """
        low, high = MIN_SECONDS * FPS, ADMISSIBLE_FRAMES[-1]
        if not low <= num_frames <= high:
            raise ValueError(f"num_frames must be between {low} and {high}, got {num_frames}")
        return cls(frames_for(num_frames))

    @property
    def num_units(self) -> int:
        """Temporal units of the video VAE."""
        return (self.num_frames - _TAIL_FRAMES) // UNIT_FRAMES

    @property
    def num_latent_frames(self) -> int:
        return _UNIT_LATENTS * self.num_units + _TAIL_LATENTS

    @property
    def num_audio_latents(self) -> int:
        """Audio latents per channel."""
        return round(self.num_frames * AUDIO_LATENTS_PER_SECOND / FPS)

    @property
    def num_audio_samples(self) -> int:
        """Samples per channel of the soundtrack that lasts as long as the picture."""
        return round(self.num_frames * AUDIO_SAMPLE_RATE / FPS)

    @property
    def duration_seconds(self) -> float:
        return self.num_frames / FPS


def frames_for(requested: int) -> int:
    """`requested` frames rounded up to the next 17k + 5 with k >= 1."""
    units = max(1, -(-(requested - _TAIL_FRAMES) // UNIT_FRAMES))
    return UNIT_FRAMES * units + _TAIL_FRAMES


def units_of(num_frames: int) -> list[range]:
    """Frames of each temporal unit of `num_frames`, whatever their count: the last one has the tail."""
    starts = range(0, max(1, num_frames - _TAIL_FRAMES - UNIT_FRAMES + 1), UNIT_FRAMES)
    return [range(start, num_frames if start == starts[-1] else start + UNIT_FRAMES) for start in starts]


ADMISSIBLE_FRAMES: tuple[int, ...] = tuple(
    range(frames_for(MIN_SECONDS * FPS), frames_for(MAX_SECONDS * FPS) + 1, UNIT_FRAMES)
)
