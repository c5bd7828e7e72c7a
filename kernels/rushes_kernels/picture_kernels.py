"""The passes behind the video decoder in CUDA C++: one read of what they take, one write of what they make.

`pictures.py` has the formulas and the PyTorch references; the source is `picture_passes.cu`.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.nvrtc import Module, pointer
from rushes_kernels.row_kernels import TYPES

# as in the source
THREADS, MAX_STARTS, _GROUP = 256, 32, 8
_SOURCES = Path(__file__).parent


class _Tiles(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("tops", ctypes.c_int * MAX_STARTS),
        ("lefts", ctypes.c_int * MAX_STARTS),
        *((name, ctypes.c_int) for name in ("height", "width", "tokens", "colours", "depth", "step")),
    ]


class _Colours(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float * 3), ("shift", ctypes.c_float * 3)]


def takes_patches(patches_BNP: Tensor, tops: Sequence[int], lefts: Sequence[int], step: int) -> bool:
    """Whether `stitch_patches` was written for this dtype, width of patches and number of tiles."""
    return patches_BNP.dtype in TYPES and step % _GROUP == 0 and max(len(tops), len(lefts)) <= MAX_STARTS


def takes_frames(frames_CfHW: Tensor, out_fHWC: Tensor) -> bool:
    """Whether `to_pixels` was written for frames that lie like these."""
    return (
        frames_CfHW.dtype == torch.float32
        and frames_CfHW[0].is_contiguous()
        and frames_CfHW[0].numel() % 4 == 0
        and frames_CfHW.stride(0) % 4 == 0
        and frames_CfHW.data_ptr() % 16 == 0
        and out_fHWC.data_ptr() % 4 == 0
    )


def stitch_patches(
    patches_BNP: Tensor, tops: Sequence[int], lefts: Sequence[int], tile: tuple[int, int], step: int, out_CfHW: Tensor
) -> Tensor:
    """`pictures.stitch_patches`."""
    B, N, P = patches_BNP.shape
    C, f, H, W = out_CfHW.shape
    starts = ctypes.c_int * MAX_STARTS
    depth = P // (C * step**2)
    assert len(tops) * len(lefts) == B
    assert depth * C * step**2 == P
    assert f // depth * (tile[0] // step) * (tile[1] // step) <= N
    assert all(start % step == 0 for start in (*tops, *lefts, *tile, H, W))
    assert tops[-1] + tile[0] == H
    assert lefts[-1] + tile[1] == W
    assert out_CfHW.dtype == torch.float32
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (patches_BNP, out_CfHW))
    _module(patches_BNP.dtype, patches_BNP.device).launch(
        "stitch_patches",
        [
            pointer(patches_BNP),
            pointer(out_CfHW),
            _Tiles(len(tops), len(lefts), starts(*tops), starts(*lefts), *tile, N, C, depth, step),
            *(ctypes.c_int(extent) for extent in (f, H, W)),
        ],
        blocks=(H // step, f, C),
        threads=THREADS,
    )
    return out_CfHW


def to_pixels(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fHWC: Tensor) -> Tensor:
    """`pictures.to_pixels`."""
    C, f, H, W = frames_CfHW.shape
    assert C == 3
    assert out_fHWC.shape == (f, H, W, C)
    assert out_fHWC.dtype == torch.uint8
    assert out_fHWC.is_contiguous()
    count = f * H * W
    if count:
        _module(torch.float32, frames_CfHW.device).launch(
            "to_pixels",
            [
                pointer(frames_CfHW),
                pointer(out_fHWC),
                ctypes.c_longlong(count),
                ctypes.c_longlong(frames_CfHW.stride(0)),
                _Colours((ctypes.c_float * 3)(*scale), (ctypes.c_float * 3)(*shift)),
            ],
            blocks=-(-count // (4 * THREADS)),
            threads=THREADS,
        )
    return out_fHWC


@cache
def _module(dtype: torch.dtype, device: torch.device) -> Module:
    macros = [f"TYPE={TYPES[dtype]}"]
    return Module(_SOURCES / "picture_passes.cu", device, macros=macros, preludes=[_SOURCES / "words.cuh"])
