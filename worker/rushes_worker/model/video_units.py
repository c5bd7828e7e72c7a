"""Temporal units of the video VAE: which latents a unit decodes, and how decoded units become the clip's frames.

Shapes: C = 3 colours, f frames, H x W pixels. Units are independent up to the fade over the previous unit's tail, so
they can be decoded on different ranks and handed over one by one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from rushes_kernels import pictures
from torch import Tensor

from rushes_worker.checkpoint.configs import VideoVaeConfig
from rushes_worker.model.video_tiles import fade_in_

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class TemporalUnits:
    """How the latent frames of a clip are cut into units, and the frames of a unit into body and tail.

    The VAE encodes `clip_length` frames at a time, padded in front to whole latents, and drops the last `token_drop`
    latents of every chunk. Decoding therefore takes a chunk and the kept latents of the next one as a unit; the frames
    of the latter, the tail, overlap the start of the next unit.
    """

    clip_length: int
    token_drop: int
    temporal_compression: int

    @classmethod
    def from_config(cls, config: VideoVaeConfig) -> Self:
        return cls(config.clip_length, config.token_drop, config.temporal_compression)

    @property
    def front_padding(self) -> int:
        """Frames in front of each chunk that only fill its first latent."""
        return -self.clip_length % self.temporal_compression

    @property
    def latent_stride(self) -> int:
        """Latent frames from one unit to the next."""
        return (self.clip_length + self.front_padding) // self.temporal_compression

    @property
    def latent_overlap(self) -> int:
        return -self.token_drop % self.latent_stride

    @property
    def unit_latents(self) -> int:
        return self.latent_stride + self.latent_overlap

    @property
    def unit_frames(self) -> int:
        """Frames that one decoded unit has, padding included."""
        return self.unit_latents * self.temporal_compression

    @property
    def tail_frames(self) -> int:
        return max(self.latent_overlap * self.temporal_compression - self.front_padding, 0)

    def num_units(self, num_latent_frames: int) -> int:
        """How many units `num_latent_frames` make.

        Raises:
            ValueError: they are no whole number of units.
        """
        num_units, rest = divmod(num_latent_frames - self.latent_overlap, self.latent_stride)
        if num_units < 1 or rest:
            raise ValueError(
                f"{num_latent_frames} latent frames are not {self.latent_stride} k + {self.latent_overlap} for a k >= 1"
            )
        return num_units

    def num_frames(self, num_latent_frames: int) -> int:
        """Frames of the clip that `num_latent_frames` decode to."""
        return self.num_units(num_latent_frames) * self.clip_length + self.tail_frames

    def latent_frames(self, unit: int) -> slice:
        """The latent frames of unit `unit`."""
        return slice(unit * self.latent_stride, unit * self.latent_stride + self.unit_latents)

    def split(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Cut a decoded unit into its body and its tail, both views, without the padding.

        Args:
            frames: (C, unit_frames, H, W).

        Returns:
            (C, clip_length, H, W) and (C, tail_frames, H, W).
        """
        padded_chunk = self.latent_stride * self.temporal_compression
        return frames[:, self.front_padding : padded_chunk], frames[:, padded_chunk + self.front_padding :]

    def assemble(self, decoded: Iterable[Tensor]) -> Iterator[Tensor]:
        """The clip's final frames, one tensor per unit in order: the last one carries its tail as well.

        Args:
            decoded: (C, unit_frames, H, W) each, every unit of the clip in order.
        """
        previous: tuple[Tensor, Tensor] | None = None
        for frames in decoded:
            body, tail = self.split(frames)
            if previous is not None:
                yield previous[0]
                body = cross_fade(previous[1], body)
            previous = body, tail
        if previous is not None:
            yield torch.cat(previous, dim=1)


def cross_fade(tail_before: Tensor, body: Tensor) -> Tensor:
    """The body of a unit with its first frames faded in over the tail of the unit before.

    Frame j of the n in the tail becomes tail_j * (1 - j/n) + body_j * j/n, so frame 0 is the tail's.

    Args:
        tail_before: (C, n, H, W).
        body: (C, f, H, W), not changed.

    Returns:
        (C, f, H, W), the dtype of `body`.
    """
    return fade_in_(body.clone(), tail_before, dim=-3)


def to_uint8(frames: Tensor, pixels: Tensor | None = None) -> Tensor:
    """Pixels of decoded frames: the ImageNet normalisation undone, clamped to [0, 1], rounded to 255 steps.

    Args:
        frames: (3, f, H, W) fp32, ImageNet-normalised RGB.
        pixels: written instead of a new tensor.

    Returns:
        (f, H, W, 3) uint8 RGB, contiguous, on the device of `frames`.
    """
    _, f, height, width = frames.shape
    if pixels is None:
        pixels = torch.empty(f, height, width, 3, dtype=torch.uint8, device=frames.device)
    return pictures.to_pixels(frames, IMAGENET_STD, IMAGENET_MEAN, pixels)


def to_yuv420(frames: Tensor, yuv: Tensor | None = None) -> Tensor:
    """Decoded frames as what H.264 holds: as `to_uint8`, in BT.709, limited range, 4:2:0.

    Args:
        frames: (3, f, H, W) fp32, ImageNet-normalised RGB; H and W even.
        yuv: written instead of a new tensor.

    Returns:
        (f, 3 H / 2, W) uint8, contiguous, on the device of `frames`.
    """
    _, f, height, width = frames.shape
    if yuv is None:
        yuv = torch.empty(f, height * 3 // 2, width, dtype=torch.uint8, device=frames.device)
    return pictures.to_yuv420(frames, IMAGENET_STD, IMAGENET_MEAN, yuv)
