"""The packed sequence: text rows, then audio rows, then video rows, with their positions, tags and tiles.

Shapes: S = L + 2A + T*h*w packed rows; L text tokens, A audio latents per channel, T latent frames of Hl x Wl latents
that patches of p x p turn into h x w rows; C latent channels, R rotary angles per row.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, cycle, islice
from math import sqrt

import numpy as np
import torch
from einops import rearrange
from rushes_kernels.video_sparse_attention import TileMap, tile_map
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.rope import rotary_table

AUDIO_CHANNELS = 2

_TIME_PER_FRAME = 5.0 / 3.0
"""Time units of one 24 fps frame; one audio latent (1/40 s) is the unit."""
_FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
_SPATIAL_SCALE = 32


class Modality(IntEnum):
    """Tag of a row; it indexes the modulation table, so the numbers belong to the weights."""

    VIDEO = 0
    TEXT = 1
    AUDIO = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of packed rows of one modality."""

    modality: Modality
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one modality inside a range of packed rows."""

    modality: Modality
    rows: slice
    """Counted from the start of the range."""
    source: slice
    """Counted from the modality's first row."""


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """Everything about one clip's sequence that is the same in every step and every block.

    With a text capacity it serves prompts of every length up to that, one after the other: the text segment has so many
    rows, and those past the prompt's are spare.
    """

    segments: tuple[Segment, ...]
    """In packed order, without gaps."""
    positions_S3: Tensor
    """(S, 3) float64 on the CPU: time, height, width, of the prompt it was built for."""
    cos_SR: Tensor
    """(S, R) fp32."""
    sin_SR: Tensor
    """(S, R) fp32."""
    tags_S: Tensor
    """(S,) uint8: the modality of each row."""
    tiles: TileMap
    unshifted_S3: Tensor | None
    """(S, 3) float64 on the device, with a text capacity: where rows would be after a prompt of no tokens."""

    @classmethod
    def build(
        cls,
        config: TransformerConfig,
        *,
        text_length: int,
        audio_latents: int,
        latent_frames: int,
        latent_height: int,
        latent_width: int,
        text_capacity: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "PackedSequence":
        """Lay out L text tokens, two channels of A audio latents and T latent frames of Hl x Wl latents.

        Args:
            text_capacity: rows of the text, a multiple of a tile's; None: as many as there are tokens.

        Raises:
            ValueError: a length is below one, or the latents do not divide into patches.
        """
        lengths = {
            "text_length": text_length,
            "audio_latents": audio_latents,
            "latent_frames": latent_frames,
            "latent_height": latent_height,
            "latent_width": latent_width,
        }
        for name, length in lengths.items():
            if length < 1:
                raise ValueError(f"{name} must be at least 1, got {length}")
        _, patch_height, patch_width = _spatial_patch(config.patch_size)
        if latent_height % patch_height or latent_width % patch_width:
            raise ValueError(
                f"latents of {latent_height} x {latent_width} do not divide into patches of "
                f"{patch_height} x {patch_width}"
            )
        grid = (latent_frames, latent_height // patch_height, latent_width // patch_width)

        text_rows = text_length if text_capacity is None else text_capacity
        if text_length > text_rows:
            raise ValueError(f"a text capacity of {text_rows} rows does not hold {text_length} tokens")
        row_counts = (text_rows, AUDIO_CHANNELS * audio_latents, grid[0] * grid[1] * grid[2])
        ends = list(accumulate(row_counts))
        segments = tuple(
            Segment(modality, end - count, end)
            for modality, count, end in zip(
                (Modality.TEXT, Modality.AUDIO, Modality.VIDEO), row_counts, ends, strict=True
            )
        )
        height_axis = _spatial_axis(latent_height, grid[1], sqrt(latent_height * latent_width))
        width_axis = _spatial_axis(latent_width, grid[2], sqrt(latent_height * latent_width))
        unshifted_S3 = torch.from_numpy(
            np.concatenate(
                [
                    _text_positions(text_rows),
                    _audio_positions(audio_latents, width_axis),
                    _video_positions(latent_frames, height_axis, width_axis),
                ]
            )
        )
        positions_S3 = _shifted(unshifted_S3, text_rows, text_length)
        cos_SR, sin_SR = rotary_table(positions_S3.to(device), config.rope_freq_dim, config.rope_theta)
        tiles = tile_map([segment.num_rows for segment in segments[:-1]], grid)
        if text_capacity is not None:
            tiles = tiles.with_spare_rows(text_rows)
            tiles.shorten_(torch.tensor(text_length))
        tags = [torch.full((segment.num_rows,), segment.modality, dtype=torch.uint8) for segment in segments]
        return cls(
            segments,
            positions_S3,
            cos_SR,
            sin_SR,
            torch.cat(tags).to(device),
            tiles.to(device),
            None if text_capacity is None else unshifted_S3.to(device),
        )

    def shorten_text_(self, length: Tensor, config: TransformerConfig) -> None:
        """From now on the prompt has `length` tokens, int64 (1,) on the device, at most the text capacity."""
        assert self.unshifted_S3 is not None
        positions_S3 = _shifted(self.unshifted_S3, self.segments[0].num_rows, length)
        cos_SR, sin_SR = rotary_table(positions_S3, config.rope_freq_dim, config.rope_theta)
        self.cos_SR.copy_(cos_SR)
        self.sin_SR.copy_(sin_SR)
        self.tiles.shorten_(length)

    @property
    def num_rows(self) -> int:
        return self.segments[-1].stop

    def rows_of(self, modality: Modality) -> slice:
        """The packed rows of a modality."""
        segment = next(segment for segment in self.segments if segment.modality is modality)
        return slice(segment.start, segment.stop)

    def runs(self, rows: slice) -> list[Run]:
        """The packed rows `rows`, cut where the modality changes."""
        runs = []
        for segment in self.segments:
            start, stop = max(segment.start, rows.start), min(segment.stop, rows.stop)
            if start < stop:
                source = slice(start - segment.start, stop - segment.start)
                runs.append(Run(segment.modality, slice(start - rows.start, stop - rows.start), source))
        return runs


def patches(latents_CTHW: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """A view of contiguous video latents (C, T, Hl, Wl) in the order of transformer rows and their features:
    (T, h, w, C, 1, p, p)."""
    pt, ph, pw = _spatial_patch(patch_size)
    return rearrange(latents_CTHW, "c (t pt) (h ph) (w pw) -> t h w c pt ph pw", pt=pt, ph=ph, pw=pw)


def audio_latents(rows: Tensor) -> Tensor:
    """Audio rows (2A, 32), all of the left channel first, as the latents (2, 32, A) that the audio VAE decodes."""
    return rearrange(rows, "(c a) d -> c d a", c=AUDIO_CHANNELS)


def _spatial_patch(patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
    if patch_size[0] != 1:
        raise ValueError(f"patches that span frames are not supported: patch_size is {patch_size}")
    return patch_size


def _spatial_axis(latents: int, rows: int, root_area: float) -> np.ndarray:
    """(rows,) float64: coordinates centred on 16 whose span is the share of this axis in a square of equal area."""
    extent = latents / root_area
    low = (1.0 - extent) / 2.0
    return np.linspace(low, low + extent, rows, endpoint=False) * _SPATIAL_SCALE


def _text_positions(text_length: int) -> np.ndarray:
    positions = np.zeros((text_length, 3))
    positions[:, 0] = np.arange(text_length)
    return positions


def _shifted(unshifted_S3: Tensor, text_rows: int, text_length: int | Tensor) -> Tensor:
    """Sound and picture begin where the prompt ends."""
    positions_S3 = unshifted_S3.clone()
    positions_S3[text_rows:, 0] += text_length
    return positions_S3


def _audio_positions(latents: int, width_axis: np.ndarray) -> np.ndarray:
    """The channels sit at the left and the right edge of the picture."""
    positions = np.zeros((AUDIO_CHANNELS, latents, 3))
    positions[:, :, 0] = np.arange(latents, dtype=np.float64)
    positions[:, :, 2] = width_axis[[0, -1], None]
    return positions.reshape(-1, 3)


def _video_positions(frames: int, height_axis: np.ndarray, width_axis: np.ndarray) -> np.ndarray:
    spans = [_TIME_PER_FRAME * count for count in islice(cycle(_FRAMES_PER_LATENT), frames - 1)]
    starts = np.concatenate([[0.0], np.cumsum(spans)])
    positions = np.empty((frames, len(height_axis), len(width_axis), 3))
    positions[..., 0] = starts[:, None, None]
    positions[..., 1] = height_axis[None, :, None]
    positions[..., 2] = width_axis[None, None, :]
    return positions.reshape(-1, 3)
