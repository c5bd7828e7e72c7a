"""Dense attention for heads of 64 channels in CUDA C++ for compute capability 9.0.

`heads_attention.py` has the formula and the PyTorch reference; the source is `heads_hopper.cu`.
"""

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.nvrtc import Module, TensorMap, pointer

# as in the source
DIM, ROWS, GROUP, STAGES, TILE_ROWS = 64, 64, 3, 6, 128
TYPES = {torch.bfloat16: 0, torch.float16: 1}
_SHARED_MEMORY = (STAGES * 2 * TILE_ROWS + GROUP * ROWS) * DIM * 2 + 8 * (2 * STAGES + 2) + 1024
_SOURCES = Path(__file__).parent


class _Shape(ctypes.Structure):
    _fields_ = [("tokens", ctypes.c_int), ("heads", ctypes.c_int), ("units", ctypes.c_int)]


def takes(qkv_BNHD: Tensor) -> bool:
    """Whether `attend_heads` was written for this device, dtype and width."""
    return (
        qkv_BNHD.dtype in TYPES
        and qkv_BNHD.shape[-1] == DIM
        and torch.cuda.get_device_capability(qkv_BNHD.device) == (9, 0)
    )


def attend_heads(qkv_BNHD: Tensor) -> Tensor:
    """`heads_attention.attend_heads`; weights of the softmax are rounded to the dtype of v."""
    B, N, heads, D = qkv_BNHD.shape
    H = heads // 3
    assert qkv_BNHD.is_contiguous()
    assert qkv_BNHD.data_ptr() % 16 == 0
    assert heads == 3 * H
    out_BNHD = qkv_BNHD.new_empty(B, N, H, D)
    units = B * H * -(-N // (GROUP * ROWS))
    if not units:
        return out_BNHD
    _module(qkv_BNHD.dtype, qkv_BNHD.device).launch(
        "attend_heads",
        [
            TensorMap.of_heads(qkv_BNHD, TILE_ROWS),
            TensorMap.of_heads(qkv_BNHD, GROUP * ROWS),
            pointer(out_BNHD),
            _Shape(N, H, units),
            ctypes.c_float(D**-0.5 * math.log2(math.e)),
        ],
        blocks=min(units, torch.cuda.get_device_properties(qkv_BNHD.device).multi_processor_count),
        threads=128 * (1 + GROUP),
        shared_memory=_SHARED_MEMORY,
    )
    return out_BNHD


@cache
def _module(dtype: torch.dtype, device: torch.device) -> Module:
    return Module(
        _SOURCES / "heads_hopper.cu",
        device,
        macros=[f"DIM={DIM}", f"TYPE={TYPES[dtype]}", f"TILE_ROWS={TILE_ROWS}"],
        preludes=[_SOURCES / "hopper.cuh", _SOURCES / "hopper_attention.cuh"],
        one_generation=True,
    )
