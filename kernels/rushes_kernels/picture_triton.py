"""Frames to BT.709 4:2:0 in Triton, for CUDA devices of any kind: one read of the frames, one write of the bytes.

`pictures.py` has the formula and the PyTorch reference, whose bits these are: every operation is rounded by itself and
in the same order.
"""

# triton has no wheels but for Linux, and its launch options are no parameters of a kernel
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from rushes_kernels.pictures import CHROMA_ROWS, LUMA, chroma_gain

_COLUMNS = 256
"""Columns of U and V that a program makes of one row."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of the compiler: a product and a sum must not become one operation."""
_RED, _GREEN, _BLUE = (tl.constexpr(share) for share in LUMA)
_OUTER, _INNER = (tl.constexpr(weight) for weight in CHROMA_ROWS[:2])


def to_yuv420(frames_CfHW: Tensor, scale: Sequence[float], shift: Sequence[float], out_fRW: Tensor) -> Tensor:
    """`pictures.to_yuv420`."""
    C, f, H, W = frames_CfHW.shape
    assert C == 3
    assert H % 2 == W % 2 == 0
    assert frames_CfHW.dtype == torch.float32
    assert frames_CfHW[0].is_contiguous()
    assert out_fRW.dtype == torch.uint8
    assert out_fRW.shape == (f, H // 2 * 3, W)
    assert out_fRW.is_contiguous()
    if out_fRW.numel():
        # Triton's interpreter takes tensors of the CPU
        with torch.cuda.device(frames_CfHW.device) if frames_CfHW.is_cuda else nullcontext():
            _to_yuv420_kernel[(triton.cdiv(W // 2, _COLUMNS), H // 2, f)](
                frames_CfHW,
                out_fRW,
                H,
                W,
                frames_CfHW.stride(0),
                *scale,
                *shift,
                chroma_gain(LUMA[2]),
                chroma_gain(LUMA[0]),
                COLUMNS=_COLUMNS,
                **OPTIONS,
            )
    return out_fRW


@triton.jit
def _colour(at, inside, scale, shift):
    x = tl.load(at, mask=inside, other=0.0) * scale + shift
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _to_yuv420_kernel(
    frames_ptr, out_ptr, H, W, colour_stride,
    scale_red, scale_green, scale_blue, shift_red, shift_green, shift_blue, gain_blue, gain_red,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1)
    frame = tl.program_id(2).to(tl.int64)
    # (COLUMNS, 2): the pixels of a row over which samples of U and V lie
    x = 2 * column[:, None] + tl.arange(0, 2)[None, :]
    inside = x < W
    out_ptr += frame * (H // 2 * 3) * W
    blues = tl.zeros((COLUMNS,), tl.float32)
    reds = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(4):
        y = tl.minimum(tl.maximum(2 * row - 1 + i, 0), H - 1)
        at = frames_ptr + (frame * H + y) * W + x
        red = _colour(at, inside, scale_red, shift_red)
        green = _colour(at + colour_stride, inside, scale_green, shift_green)
        blue = _colour(at + 2 * colour_stride, inside, scale_blue, shift_blue)
        luma = red * _RED + green * _GREEN + blue * _BLUE
        if i == 1 or i == 2:
            # bytes are cut off, not rounded
            tl.store(out_ptr + y * W + x, (luma * 219.0 + 16.5).to(tl.uint8), mask=inside)
            blues += tl.sum(blue - luma, 1) * _INNER
            reds += tl.sum(red - luma, 1) * _INNER
        else:
            blues += tl.sum(blue - luma, 1) * _OUTER
            reds += tl.sum(red - luma, 1) * _OUTER
    sample = out_ptr + H * W + row * (W // 2) + column
    inside = column < W // 2
    tl.store(sample, (blues * gain_blue + 128.5).to(tl.uint8), mask=inside)
    tl.store(sample + (H // 2) * (W // 2), (reds * gain_red + 128.5).to(tl.uint8), mask=inside)
