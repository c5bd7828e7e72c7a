"""The matrix products between tiles: scores, and the means that the coarse branch takes.

    scores_ij = scale <q_i, k_j>          coarse_i = sum_j softmax_j(scores_ij) v_j

Both are as exact as fp32. On CUDA they run on the tensor cores: each factor is a sum of bf16 parts, x = a + b + c with
|b| <= 2^-9 |x| and |c| <= 2^-18 |x|, and products of parts stand side by side in one product of bf16 with fp32 sums.

    scores: aa + ab + ba + ac + bb + ca      leaves out terms below 2^-26
    coarse: aa + ba + ab                     leaves out terms below 2^-17; what it is added to is rounded at 2^-9

Shapes: H heads, n tiles, D channels of a head.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.nvrtc import Module, pointer
from rushes_kernels.plain import may_run_kernel

# as in the source
THREADS, WARPS, MAX_COPIES = 256, 8, 6
_MULTIPLE = 8
"""Rows of scores are padded to as many: tensor cores take them in words of 16 bytes."""
_QUERY_PARTS, _KEY_PARTS, _VALUE_PARTS = (0, 0, 1, 0, 1, 2), (0, 1, 0, 2, 1, 0), (0, 0, 1)


def score_tiles(q_HnD: Tensor, k_HnD: Tensor, scale: float) -> Tensor:
    """Scores of all tiles for all tiles.

    Args:
        q_HnD, k_HnD: (H, n, D) fp32.

    Returns:
        (H, n, n) fp32, rows contiguous; they may lie apart.
    """
    H, n, D = q_HnD.shape
    if not _takes(q_HnD):
        return score_tiles_ref(q_HnD, k_HnD, scale)
    padded = _padded(n)
    q_parts = q_HnD.new_empty(H, n, len(_QUERY_PARTS) * D, dtype=torch.bfloat16)
    k_parts = q_HnD.new_empty(H, padded, len(_KEY_PARTS) * D, dtype=torch.bfloat16)
    for x, parts, out, factor in ((q_HnD, _QUERY_PARTS, q_parts, scale), (k_HnD, _KEY_PARTS, k_parts, 1.0)):
        _split(x, parts, out, out.shape[1], factor, copy_stride=D, row_stride=out.stride(1))
    return torch.bmm(q_parts, k_parts.transpose(1, 2), out_dtype=torch.float32)[..., :n]


def score_tiles_ref(q_HnD: Tensor, k_HnD: Tensor, scale: float) -> Tensor:
    """`score_tiles` in plain PyTorch."""
    return torch.baddbmm(q_HnD.new_empty(1, 1, 1), q_HnD, k_HnD.transpose(1, 2), beta=0, alpha=scale)


def coarse_means(scores_Hnn: Tensor, v_HnD: Tensor) -> Tensor:
    """Means of the tiles' values, weighted by the softmax of their scores.

    Args:
        scores_Hnn: as `score_tiles` returns them.
        v_HnD: (H, n, D) fp32.

    Returns:
        (H, n, D) fp32, contiguous.
    """
    H, n, D = v_HnD.shape
    padded = _padded(n)
    if not _takes(v_HnD) or scores_Hnn.stride() != (n * padded, padded, 1):
        return coarse_means_ref(scores_Hnn, v_HnD)
    weights_HnK = v_HnD.new_empty(H, n, len(_VALUE_PARTS) * padded, dtype=torch.bfloat16)
    v_parts = v_HnD.new_empty(H, len(_VALUE_PARTS) * padded, D, dtype=torch.bfloat16)
    _split(v_HnD, _VALUE_PARTS, v_parts, padded, 1.0, copy_stride=padded * D, row_stride=D)
    if H * n:
        _module(v_HnD.device).launch(
            "weigh",
            [
                *(pointer(x) for x in (scores_Hnn, weights_HnK)),
                ctypes.c_longlong(H * n),
                ctypes.c_int(n),
                ctypes.c_int(padded),
            ],
            blocks=-(-H * n // WARPS),
            threads=THREADS,
        )
    return torch.bmm(weights_HnK, v_parts, out_dtype=torch.float32)


def coarse_means_ref(scores_Hnn: Tensor, v_HnD: Tensor) -> Tensor:
    """`coarse_means` in plain PyTorch."""
    return scores_Hnn.softmax(-1) @ v_HnD


class _Copies(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int),
        ("parts", ctypes.c_int * MAX_COPIES),
        ("stride", ctypes.c_longlong),
        ("row_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
    ]


def _split(
    x_HnD: Tensor,
    parts: tuple[int, ...],
    out: Tensor,
    padded_rows: int,
    scale: float,
    *,
    copy_stride: int,
    row_stride: int,
) -> None:
    H, n, D = x_HnD.shape
    x_HnD = x_HnD.contiguous()
    if not H * n:
        return
    _module(x_HnD.device).launch(
        "split",
        [
            *(pointer(x) for x in (x_HnD, out)),
            *(ctypes.c_int(size) for size in (n, padded_rows, D)),
            ctypes.c_float(scale),
            _Copies(len(parts), (ctypes.c_int * MAX_COPIES)(*parts), copy_stride, row_stride, out.stride(0)),
        ],
        blocks=(-(-padded_rows * D // (4 * THREADS)), H),
        threads=THREADS,
    )


def _takes(x_HnD: Tensor) -> bool:
    """Whether the parts fill whole words and the device multiplies them."""
    return (
        may_run_kernel("score_tiles", x_HnD)
        and x_HnD.dtype == torch.float32
        and x_HnD.shape[-1] % _MULTIPLE == 0
        and torch.cuda.get_device_capability(x_HnD.device) >= (8, 0)
    )


def _padded(n: int) -> int:
    return -(-n // _MULTIPLE) * _MULTIPLE


@cache
def _module(device: torch.device) -> Module:
    return Module(Path(__file__).with_name("coarse_passes.cu"), device)
