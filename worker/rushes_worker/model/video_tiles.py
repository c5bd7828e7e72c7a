"""Spatial tiles of the video VAE: where they lie on the canvas and how they are stitched.

Shapes: ... leading dimensions, H x W canvas, h x w one tile; all tiles of a canvas are equal. Positions are in pixels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE_PIXELS = 256
MIN_OVERLAP_PIXELS = 64


def tile_starts(length: int, step: int = 16) -> tuple[int, ...]:
    """Where the tiles of an axis of `length` pixels start, on multiples of `step`, the pixels of one latent.

    The fewest tiles of 256 pixels that overlap by 64 or more cover the axis exactly; what they have to spare widens the
    overlaps by `step` at a time, round robin from the first (FastH3 reference). An axis of 256 pixels or fewer is one
    tile of its own length.

    Raises:
        ValueError: `length` is no positive multiple of `step`.
    """
    if length <= 0 or length % step:
        raise ValueError(f"a canvas side of {length} pixels is no positive multiple of the latent's {step}")
    if length <= TILE_PIXELS:
        return (0,)
    stride = TILE_PIXELS - MIN_OVERLAP_PIXELS
    num_overlaps = -((length - TILE_PIXELS) // -stride)
    spare_steps = (TILE_PIXELS + num_overlaps * stride - length) // step
    starts = [0]
    for i in range(num_overlaps):
        widening = step * (spare_steps // num_overlaps + (i < spare_steps % num_overlaps))
        starts.append(starts[-1] + stride - widening)
    return tuple(starts)


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a canvas of `height` x `width` pixels, row-major, for latents of `step` x `step` pixels."""

    height: int
    width: int
    step: int

    @cached_property
    def tops(self) -> tuple[int, ...]:
        return tile_starts(self.height, self.step)

    @cached_property
    def lefts(self) -> tuple[int, ...]:
        return tile_starts(self.width, self.step)

    @property
    def tile_height(self) -> int:
        return min(self.height, TILE_PIXELS)

    @property
    def tile_width(self) -> int:
        return min(self.width, TILE_PIXELS)

    def cut(self, latents: Tensor) -> Tensor:
        """The latents of every tile: (..., H/step, W/step) to (tiles, ..., h/step, w/step)."""
        h, w = self.tile_height // self.step, self.tile_width // self.step
        corners = [(top // self.step, left // self.step) for top in self.tops for left in self.lefts]
        return torch.stack([latents[..., y : y + h, x : x + w] for y, x in corners])


def stitch(tiles: Iterable[Tensor], grid: TileGrid, canvas: Tensor | None = None) -> Tensor:
    """Blend decoded tiles into one canvas.

    Each tile fades in over the raw tile above, then over the raw tile to its left; what lies under a later tile is
    dropped. Tiles are taken one at a time, and no more than a row and one of them are held.

    Args:
        tiles: (..., h, w) each, row-major, as `grid` counts them.
        canvas: written instead of a new tensor.

    Returns:
        (..., H, W), the dtype of the tiles.
    """
    source = iter(tiles)
    row_above: list[Tensor] = []
    for i, (top, bottom) in enumerate(_kept(grid.tops, grid.height)):
        row: list[Tensor] = []
        for j, (left, right) in enumerate(_kept(grid.lefts, grid.width)):
            tile = next(source)
            if canvas is None:
                canvas = tile.new_empty(*tile.shape[:-2], grid.height, grid.width)
            kept = canvas[..., top:bottom, left:right]
            kept.copy_(tile[..., : bottom - top, : right - left])
            if i:
                fade_in_(kept, row_above[j][..., top - grid.tops[i - 1] :, : right - left], dim=-2)
            if j:
                fade_in_(kept, row[-1][..., : bottom - top, left - grid.lefts[j - 1] :], dim=-1)
            row.append(tile)
        row_above = row
    assert canvas is not None
    return canvas


def fade_in_(current: Tensor, previous: Tensor, dim: int) -> Tensor:
    """Fade from `previous` to the start of `current` along `dim`, in place.

    Element p of the n that `previous` has along `dim` becomes previous * (1 - p/n) + current * p/n. `current` may end
    before the ramp does; it then keeps the ramp's first part.

    Returns:
        `current`.
    """
    ramp_length = previous.shape[dim]
    num_faded = min(ramp_length, current.shape[dim])
    ramp = torch.arange(num_faded, device=current.device, dtype=current.dtype) / ramp_length
    ramp = ramp.view(-1, *[1] * (-dim - 1))
    faded = current.narrow(dim, 0, num_faded)
    torch.lerp(previous.narrow(dim, 0, num_faded), faded, ramp, out=faded)
    return current


def _kept(starts: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """The stretch of an axis that each tile owns: from its start to the next tile's."""
    return list(zip(starts, (*starts[1:], length), strict=True))
