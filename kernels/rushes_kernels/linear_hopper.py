"""`gated_linear` and `project_heads` in CUDA C++ for compute capability 9.0.

`linear.py` has the formulas and the PyTorch references; the source is `linear_hopper.cu`.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.nvrtc import Module, TensorMap, pointer

# as in the sources
BLOCK_ROWS, COLUMNS, PANEL_BYTES, STAGES, CLUSTER, GROUP, ROWS, LAG, HEAD = 128, 128, 128, 4, 2, 2, 64, 2, 64
TYPES = {torch.bfloat16: 0, torch.float16: 1}
SOURCES = Path(__file__).parent
_DEPTH = PANEL_BYTES // 2
_SLOTS = STAGES * (BLOCK_ROWS + 2 * COLUMNS) * PANEL_BYTES
_STAGING = GROUP * ROWS * COLUMNS * 2
_SHARED_MEMORY = _SLOTS + _STAGING + 8 * 2 * STAGES + 1024
_NO_ANGLES = 8
"""Of the module of kernels that turn nothing."""


class Shape(ctypes.Structure):
    """Of a launch, as in `hopper_product.cuh`."""

    _fields_ = [(name, ctypes.c_int) for name in ("rows", "width", "depth", "unit_columns", "second_half")]


def takes_gated(x_SC: Tensor, weight_2FC: Tensor, bias_2F: Tensor | None) -> bool:
    """Whether `gated_linear` was written for this device, these dtypes, widths and layouts."""
    operands = [x_SC, weight_2FC, *([] if bias_2F is None else [bias_2F])]
    return x_SC.ndim == 2 and _takes(operands) and len(weight_2FC) % (2 * COLUMNS) == 0


def takes_heads(
    x_BNC: Tensor, weight_MC: Tensor, bias_M: Tensor, head_dim: int, cos_NR: Tensor, sin_NR: Tensor
) -> bool:
    """Whether `project_heads` was written for this device, these dtypes, widths and layouts."""
    angles = cos_NR.shape[1]
    return (
        x_BNC.ndim == 3
        and _takes([x_BNC, weight_MC, bias_M])
        and len(weight_MC) % (2 * COLUMNS) == 0
        and head_dim == HEAD
        and angles % 8 == 0
        and 0 < 2 * angles <= HEAD
        and all(x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 8 == 0 for x in (cos_NR, sin_NR))
    )


def _takes(operands: Sequence[Tensor]) -> bool:
    rows, weight = operands[:2]
    depth = weight.shape[1]
    return (
        torch.cuda.get_device_capability(rows.device) == (9, 0)
        and rows.dtype in TYPES
        and all(x.dtype == rows.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in operands)
        and depth % _DEPTH == 0
        and depth >= LAG * _DEPTH
    )


def gated_linear(x_SC: Tensor, weight_2FC: Tensor, bias_2F: Tensor | None) -> Tensor:
    """`linear.gated_linear`, accumulated in fp32."""
    assert x_SC.shape[1] == weight_2FC.shape[1]
    assert bias_2F is None or len(bias_2F) == len(weight_2FC)
    width = len(weight_2FC) // 2
    out_SF = x_SC.new_empty(len(x_SC), width)
    shape = Shape(len(x_SC), width, x_SC.shape[1], COLUMNS, width)
    module = _module(x_SC.dtype, _NO_ANGLES, x_SC.device)
    launch(module, "gated_linear", x_SC, weight_2FC, out_SF, shape, [pointer(bias_2F)])
    return out_SF


def project_heads(
    x_BNC: Tensor, weight_MC: Tensor, bias_M: Tensor, num_normed: int, cos_NR: Tensor, sin_NR: Tensor, eps: float
) -> Tensor:
    """`linear.project_heads`, accumulated in fp32."""
    B, N, C = x_BNC.shape
    M = len(weight_MC)
    assert weight_MC.shape[1] == C
    assert len(bias_M) == M
    assert cos_NR.shape == sin_NR.shape
    assert len(cos_NR) == N
    assert 0 <= num_normed <= M // HEAD
    out_BNM = x_BNC.new_empty(B, N, M)
    vectors = [pointer(x) for x in (bias_M, cos_NR, sin_NR)]
    numbers = [ctypes.c_int(N), ctypes.c_int(num_normed), ctypes.c_float(eps)]
    shape = Shape(B * N, M, C, 2 * COLUMNS, COLUMNS)
    x_SC, out_SM = x_BNC.flatten(0, 1), out_BNM.flatten(0, 1)
    module = _module(x_SC.dtype, cos_NR.shape[1], x_SC.device)
    launch(module, "project_heads", x_SC, weight_MC, out_SM, shape, [*vectors, *numbers])
    return out_BNM.unflatten(-1, (-1, HEAD))


def launch(
    module: Module,
    name: str,
    x_SC: Tensor,
    weight_MC: Tensor,
    out_SF: Tensor,
    shape: Shape,
    arguments: Sequence[ctypes._SimpleCData],
) -> None:
    """Start a kernel behind `hopper_product.cuh`; `arguments` are those after its own."""
    if not shape.rows:
        return
    units = -(-shape.rows // (CLUSTER * BLOCK_ROWS)) * (shape.width // shape.unit_columns)
    clusters = torch.cuda.get_device_properties(x_SC.device).multi_processor_count // CLUSTER
    arrived = out_SF.new_zeros(1, dtype=torch.int32)
    module.launch(
        name,
        [
            TensorMap.of_rows(x_SC, BLOCK_ROWS),
            TensorMap.of_rows(weight_MC, COLUMNS),
            TensorMap.of_rows(out_SF, ROWS),
            shape,
            pointer(arrived),
            *arguments,
        ],
        blocks=CLUSTER * min(units, clusters),
        threads=128 * (1 + GROUP),
        shared_memory=_SHARED_MEMORY,
    )


@cache
def _module(dtype: torch.dtype, angles: int, device: torch.device) -> Module:
    return Module(
        SOURCES / "linear_hopper.cu",
        device,
        macros=[f"TYPE={TYPES[dtype]}", f"ANGLES={angles}"],
        preludes=[SOURCES / "hopper.cuh", SOURCES / "hopper_product.cuh"],
        one_generation=True,
    )
