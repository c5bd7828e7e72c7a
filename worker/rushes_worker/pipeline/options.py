"""What an operator may ask of the pipeline, as `NAME=VALUE` words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Options of `FastH3Pipeline`."""

    attention: str | None = None
    """Provider of sparse attention; None: the device decides."""
    synthetic_seed: int | None = None
    """Weights of the released sizes are drawn from this seed; None: those of the checkpoint."""

    @classmethod
    def parse(cls, options: Sequence[str]) -> Self:
        """
        Raises:
            ValueError: an option is unknown or has no such value.
        """
        attention = synthetic_seed = None
        for option in options:
            name, _, value = option.partition("=")
            if name == "attention":
                attention = value
            elif name == "weights":
                synthetic_seed = seed_of(value)
            else:
                raise ValueError(
                    f"this pipeline takes the options attention=PROVIDER and weights={SYNTHETIC}[:SEED], got {option}"
                )
        return cls(attention, synthetic_seed)


def revision_of(options: Sequence[str]) -> str | None:
    """What `options` serve instead of the checkpoint's weights, for people; None: those."""
    return next((word.removeprefix("weights=") for word in options if word.startswith(f"weights={SYNTHETIC}")), None)


def seed_of(weights: str) -> int:
    """The seed in `synthetic:SEED`; 0 in `synthetic`.

    Raises:
        ValueError: it is neither.
    """
    name, colon, seed = weights.partition(":")
    if name != SYNTHETIC or (colon and not (seed.isascii() and seed.isdigit() and int(seed) < 1 << 63)):
        raise ValueError(f"weights must be {SYNTHETIC} or {SYNTHETIC}:SEED, got {weights!r}")
    return int(seed or 0)
