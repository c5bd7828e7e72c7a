"""How clips are compressed."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

# the media process gets them ready made
if TYPE_CHECKING:
    from rushes_core.settings import Settings

PRESETS = {
    "libx264": ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow"),
    "h264_nvenc": ("p1", "p2", "p3", "p4", "p5", "p6", "p7"),
}
"""By encoder. Those of libx264 whose reference frames fit level 4.0 at every canvas."""

DEFAULT_PRESETS = {"libx264": "veryfast", "h264_nvenc": "p4"}

MAX_DEFAULT_ENCODERS = 8
"""Segments of a clip that are encoded at once unless more are asked for."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What the file of a clip is made with. The defaults are measured: docs/media.md has the tables."""

    encoder: str = "libx264"
    """FFmpeg's name of the H.264 encoder."""
    preset: str = ""
    """Empty: the encoder's entry of `DEFAULT_PRESETS`."""
    crf: int = 18
    """Constant rate factor; lower is better and larger. 0 would be lossless, which is not High profile."""
    keyframe_interval: int = 51
    """Frames between keyframes at most: how far a seek has to decode. Segments are as many temporal units as fit."""
    audio_bitrate: int = 144_000
    """Bits per second of the AAC track."""
    encoders: int = 1
    """Segments that are encoded at once. The file does not depend on it."""
    threads: int = 4
    """Of the encoder of one segment. Fixed, never the number of cores: the encoder's output depends on it."""
    refuse_flaws: bool = False
    """A clip that is blank, frozen or silent all along is no clip."""

    def __post_init__(self) -> None:
        if self.encoder not in PRESETS:
            raise ValueError(f"encoder={self.encoder!r} is not one of {', '.join(PRESETS)}")
        if not self.preset:
            object.__setattr__(self, "preset", DEFAULT_PRESETS[self.encoder])
        presets = PRESETS[self.encoder]
        if self.preset not in presets:
            raise ValueError(
                f"RUSHES_ENCODER_PRESET={self.preset!r} is not one of {self.encoder}'s: {', '.join(presets)}"
            )
        for field, low, high in (
            ("crf", 1, 51),
            ("keyframe_interval", 1, 240),
            ("audio_bitrate", 32_000, 320_000),
            ("encoders", 1, 64),
            ("threads", 1, 64),
        ):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{field} must be a whole number from {low} to {high}, got {value!r}")

    @classmethod
    def of(cls, settings: "Settings", *, replicas: int) -> Self:
        """Those of a deployment.

        Args:
            replicas: that share the cores of this machine.

        Raises:
            ValueError: names the setting, its value and what it may be.
        """
        return cls(
            encoder=settings.encoder,
            preset=settings.encoder_preset,
            crf=settings.encoder_crf,
            keyframe_interval=settings.keyframe_interval,
            audio_bitrate=settings.audio_bitrate,
            encoders=settings.encoders or default_encoders(replicas),
            refuse_flaws=settings.flawed_clips == "fail",
        )


def default_encoders(replicas: int = 1) -> int:
    """Segments to encode at once where `replicas` share the cores of this machine."""
    cores = len(os.sched_getaffinity(0)) // replicas
    return max(1, min(MAX_DEFAULT_ENCODERS, cores // 2))
