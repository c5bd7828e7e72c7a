"""What follows the last layer of the video decoder: patches of overlapping tiles become a canvas, frames become pixels.

    canvas at a pixel = the tile that owns it, faded in over the raw tile above, then over the raw tile to its left
    colour = clamp(scale_c x + shift_c, 0, 1)
    pixel = round(255 colour)
    luma = 0.2126 red + 0.7152 green + 0.0722 blue,  Y = round(16 + 219 luma)
    U = round(128 + 112 (blue - luma) / 0.9278),  V = round(128 + 112 (red - luma) / 0.7874), of every 2 x 2 pixels

A tile owns what lies from its start to the start of the next; of the n pixels that the tile before reaches over it,
pixel p is before (1 - p/n) + own p/n. Shapes: B tiles, row-major; N tokens of a tile, the first of them t y x patches
in the order (t, y, x); P = (C, d, s, s) values of a patch, C colours of d frames of s x s pixels; f = t d frames; H x W
canvas, h x w one tile; R = 3 H / 2 rows of bytes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rushes_kernels.plain import may_run_kernel
from rushes_kernels.providers import can_build_triton

LUMA = (0.2126, 0.7152, 0.0722)
"""Shares of red, green and blue in the luma of BT.709."""
CHROMA_ROWS = (1.0, 3.0, 3.0, 1.0)
"""What rows 2i - 1 to 2i + 2 of pixels weigh in row i of U and V."""


def stitch_patches(
    patches_BNP: Tensor, tops: Sequence[int], lefts: Sequence[int], tile: tuple[int, int], step: int, out_CfHW: Tensor
) -> Tensor:
    """Write the canvas that the patches of all tiles make.

    Args:
        patches_BNP: (B, N, P) of any floating dtype, contiguous.
        tops, lefts: where tiles start, in pixels, ascending multiples of `step`; B pairs of them.
        tile: (h, w), multiples of `step`.
        step: s.
        out_CfHW: (C, f, H, W) fp32, contiguous; the last tiles end where it does.

    Returns:
        `out_CfHW`.
    """
    if may_run_kernel("stitch_patches", patches_BNP):
        from rushes_kernels import picture_kernels

        if picture_kernels.takes_patches(patches_BNP, tops, lefts, step):
            return picture_kernels.stitch_patches(patches_BNP, tops, lefts, tile, step, out_CfHW)
    return stitch_patches_ref(patches_BNP, tops, lefts, tile, step, out_CfHW)


def stitch_patches_ref(
    patches_BNP: Tensor, tops: Sequence[int], lefts: Sequence[int], tile: tuple[int, int], step: int, out_CfHW: Tensor
) -> Tensor:
    """`stitch_patches` in plain PyTorch."""
    C, f, H, W = out_CfHW.shape
    (h, w), d = tile, patches_BNP.shape[-1] // (C * step**2)
    grid = (f // d, h // step, w // step)
    patches = patches_BNP[:, : grid[0] * grid[1] * grid[2]].float().view(-1, *grid, C, d, step, step)
    tiles = patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tops), len(lefts), C, f, h, w)
    for i, (top, bottom) in enumerate(pairwise((*tops, H))):
        for j, (left, right) in enumerate(pairwise((*lefts, W))):
            own = out_CfHW[..., top:bottom, left:right]
            own.copy_(tiles[i, j, ..., : bottom - top, : right - left])
            if i:
                _fade_in_(own, tiles[i - 1, j, ..., top - tops[i - 1] :, : right - left], -2)
            if j:
                _fade_in_(own, tiles[i, j - 1, ..., : bottom - top, left - lefts[j - 1] :], -1)
    return out_CfHW


def to_pixels(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fHWC: Tensor) -> Tensor:
    """Frames as bytes.

    Args:
        frames_CfHW: (3, f, H, W) fp32; each colour contiguous, H W a multiple of 4 for the kernel.
        scale, shift: of each colour.
        out_fHWC: (f, H, W, 3) uint8, contiguous.

    Returns:
        `out_fHWC`.
    """
    if may_run_kernel("to_pixels", frames_CfHW):
        from rushes_kernels import picture_kernels

        if picture_kernels.takes_frames(frames_CfHW, out_fHWC):
            return picture_kernels.to_pixels(frames_CfHW, scale, shift, out_fHWC)
    return to_pixels_ref(frames_CfHW, scale, shift, out_fHWC)


def to_pixels_ref(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fHWC: Tensor) -> Tensor:
    """`to_pixels` in plain PyTorch."""
    for colour, (factor, offset) in enumerate(zip(scale, shift, strict=True)):
        values = frames_CfHW[colour].mul(factor).add_(offset).clamp_(0.0, 1.0).mul_(255.0).round_()
        out_fHWC[..., colour] = values
    return out_fHWC


def to_yuv420(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fRW: Tensor) -> Tensor:
    """Frames as bytes of BT.709 in limited range, planar 4:2:0 (I420): what an H.264 encoder takes.

    Half a step rounds up. A sample of U and V lies in the middle of its 2 x 2 pixels.

    Args:
        frames_CfHW: (3, f, H, W) fp32, each colour contiguous; H and W even.
        scale, shift: of each colour.
        out_fRW: (f, R, W) uint8, contiguous: H rows of Y, then all of U and all of V, H/2 x W/2 each.

    Returns:
        `out_fRW`.
    """
    if may_run_kernel("to_yuv420", frames_CfHW) and can_build_triton():
        from rushes_kernels import picture_triton

        return picture_triton.to_yuv420(frames_CfHW, scale, shift, out_fRW)
    return to_yuv420_ref(frames_CfHW, scale, shift, out_fRW)


def to_yuv420_ref(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fRW: Tensor) -> Tensor:
    """`to_yuv420` in plain PyTorch."""
    _, f, H, W = frames_CfHW.shape
    red, green, blue = (
        plane.mul(factor).add_(offset).clamp_(0.0, 1.0)
        for plane, factor, offset in zip(frames_CfHW, scale, shift, strict=True)
    )
    luma = red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]
    # bytes are cut off, not rounded
    out_fRW[:, :H] = luma * 219.0 + 16.5
    chroma = out_fRW[:, H:].view(f, 2, H // 2, W // 2)
    for plane, (colour, share) in enumerate(((blue, LUMA[2]), (red, LUMA[0]))):
        chroma[:, plane] = _halved(colour - luma) * chroma_gain(share) + 128.5
    return out_fRW


def chroma_gain(share: float) -> float:
    """What turns a weighted sum of 4 x 2 differences from luma into steps of U or V, whose colour has this `share`."""
    return 112.0 / (1.0 - share) / (2.0 * sum(CHROMA_ROWS))


def _halved(x_fHW: Tensor) -> Tensor:
    """Weighted sums of what a sample of U or V stands for: (f, H/2, W/2).

    The weights are those of swscale's `bilinear`, which converts where no GPU does, so that a clip has the same colours
    either way: two columns evenly, and a triangle over four rows, of which those past the edge repeat it. Samples then
    lie in the middle of their pixels in both directions; players of a stream without a tag take them for half a pixel
    further left, in either clip.
    """
    f, H, W = x_fHW.shape
    pairs = x_fHW.view(f, H, W // 2, 2).sum(-1)
    rows = torch.cat([pairs[:, :1], pairs, pairs[:, -1:]], dim=1)
    above, top, bottom, below = (rows[:, first : first + H : 2] * weight for first, weight in enumerate(CHROMA_ROWS))
    return above + top + bottom + below


def _fade_in_(own: Tensor, before: Tensor, dim: int) -> None:
    length = before.shape[dim]
    faded = min(length, own.shape[dim])
    weight = torch.arange(faded, device=own.device, dtype=own.dtype).div(length).view(-1, *[1] * (-dim - 1))
    start = own.narrow(dim, 0, faded)
    torch.lerp(before.narrow(dim, 0, faded), start, weight, out=start)
