"""What an operator may ask of the pipeline, as `NAME=VALUE` words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from rushes_core.captures import CaptureShape, parse_capacities, parse_captures
from rushes_core.setting_rules import listed

from rushes_worker.pixels import PixelFormat

# ranks get the words ready made
if TYPE_CHECKING:
    from rushes_core.settings import Settings

    from rushes_worker.devices import Devices

TEXT_CAPACITIES, CAPTURE, GRAPH_BYTES = "text-capacities", "capture", "graph-bytes"
"""Options that settings of their own stand for."""
SYNTHETIC = "synthetic"
ATTENTION = ("hopper", "triton", "torch")
"""Providers of sparse attention. Whether one can serve is for the rank to say, which has the device."""
GPU_ATTENTION = ("hopper", "triton")
"""Those that no CPU serves."""
HOPPER_CAPABILITY = (9, 0)
"""Compute capability of the devices that `hopper` is for, and the least for `fp8`."""
PRECISIONS = ("bf16", "fp8")
"""Of the transformer; on the CPU `bf16` stands for fp32. `fp8`: weights and inputs of the feed-forward layers are e4m3,
all else is as with `bf16`."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Options of `FastH3Pipeline`."""

    attention: str | None = None
    """Provider of sparse attention; None: the device decides."""
    precision: str = "bf16"
    synthetic_seed: int | None = None
    """Weights of the released sizes are drawn from this seed; None: those of the checkpoint."""
    text_capacities: tuple[int, ...] = (1_024, 4_096, 10_240)
    captures: tuple[CaptureShape, ...] = ()
    """Shapes to be captured at start."""
    graph_bytes: int = 4 << 30
    pixels: PixelFormat | None = None
    """What frames are handed over as; None: the device decides."""

    @classmethod
    def parse(cls, options: Sequence[str]) -> Self:
        """
        Raises:
            ValueError: an option is unknown or has no such value.
        """
        chosen = cls()
        captures = ""
        for option in options:
            name, _, value = option.partition("=")
            if name == "attention":
                if value not in ATTENTION:
                    raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {value!r}")
                chosen = replace(chosen, attention=value)
            elif name == "precision":
                if value not in PRECISIONS:
                    raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {value!r}")
                chosen = replace(chosen, precision=value)
            elif name == "weights":
                chosen = replace(chosen, synthetic_seed=seed_of(value))
            elif name == TEXT_CAPACITIES:
                chosen = replace(chosen, text_capacities=parse_capacities(value))
            elif name == CAPTURE:
                captures = value
            elif name == GRAPH_BYTES:
                if not (value.isascii() and value.isdigit()):
                    raise ValueError(f"{GRAPH_BYTES} must be a whole number, got {value!r}")
                chosen = replace(chosen, graph_bytes=int(value))
            elif name == "pixels":
                if value not in tuple(PixelFormat):
                    raise ValueError(f"pixels must be one of {', '.join(PixelFormat)}, got {value!r}")
                chosen = replace(chosen, pixels=PixelFormat(value))
            else:
                raise ValueError(
                    f"this pipeline takes the options attention=PROVIDER, precision={'|'.join(PRECISIONS)}, "
                    f"weights={SYNTHETIC}[:SEED], pixels=FORMAT, {TEXT_CAPACITIES}=ROWS, {CAPTURE}=SHAPES and "
                    f"{GRAPH_BYTES}=BYTES, got {option}"
                )
        return replace(chosen, captures=parse_captures(captures, chosen.text_capacities))


def options_of(settings: "Settings") -> tuple[str, ...]:
    """The words that ranks of a deployment are given: those of settings of their own, and the operator's."""
    return (
        f"{TEXT_CAPACITIES}={settings.text_capacities}",
        f"{CAPTURE}={settings.capture}",
        f"{GRAPH_BYTES}={settings.graph_bytes}",
        *listed(settings.pipeline_options),
    )


def check_options(settings: "Settings") -> tuple[str, ...] | None:
    """The words that ranks are given; None for another pipeline than this repository's, which has options of its own.

    Raises:
        ValueError: it takes no such option.
    """
    if settings.pipeline != type(settings).model_fields["pipeline"].default:
        return None
    options = options_of(settings)
    try:
        PipelineOptions.parse(options)
    except ValueError as error:
        raise ValueError(f"RUSHES_PIPELINE_OPTIONS={settings.pipeline_options}: {error}") from error
    return options


def check_devices_serve(options: Sequence[str] | None, devices: "Devices") -> None:
    """Raise `ValueError` when these devices cannot do what the pipeline is asked for.

    Args:
        options: as `check_options` returns them.
    """
    if options is None:
        return
    chosen = PipelineOptions.parse(options)
    words = dict(option.split("=", 1) for option in options)
    on_gpus = devices.kind == "cuda"
    if chosen.synthetic_seed is not None and not on_gpus:
        asked = f"RUSHES_PIPELINE_OPTIONS=weights={words['weights']}"
        raise ValueError(f"{asked} draws weights of the released sizes on a GPU, found none")
    asked = f"RUSHES_PIPELINE_OPTIONS=attention={chosen.attention}: attention={chosen.attention}"
    if chosen.attention in GPU_ATTENTION and not on_gpus:
        raise ValueError(f"{asked} needs a GPU, and this worker runs on the CPU")
    needed = ".".join(map(str, HOPPER_CAPABILITY))
    for entry, capability in zip(devices.visible, devices.capabilities, strict=True) if on_gpus else ():
        found = f"device {entry} has {capability[0]}.{capability[1]}"
        if chosen.attention == "hopper" and capability != HOPPER_CAPABILITY:
            raise ValueError(f"{asked} needs compute capability {needed}, {found}")
        if chosen.precision == "fp8" and capability < HOPPER_CAPABILITY:
            asked = "RUSHES_PIPELINE_OPTIONS=precision=fp8: precision=fp8"
            raise ValueError(f"{asked} needs compute capability {needed} or more, {found}")
    if chosen.captures and not on_gpus:
        raise ValueError(
            f"RUSHES_CAPTURE={words[CAPTURE]} captures graphs of a GPU, and this worker runs on the CPU; leave it empty"
        )


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
