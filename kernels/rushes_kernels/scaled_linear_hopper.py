"""`scaled_linear` and `scaled_gated_linear` in CUDA C++ for compute capability 9.0.

`scaled_linear.py` has the formulas and the PyTorch references; the source is `scaled_linear_hopper.cu`.
"""

from functools import cache

import torch
from torch import Tensor

from rushes_kernels.linear_hopper import COLUMNS, LAG, PANEL_BYTES, SOURCES, TYPES, Shape, launch
from rushes_kernels.nvrtc import Module, pointer
from rushes_kernels.scaled_linear import E4M3, Quantised


def takes(x: Quantised, weight: Quantised, dtype: torch.dtype, out_SM: Tensor | None = None) -> bool:
    """Whether the kernels were written for this device, these dtypes, widths and layouts."""
    tensors = [x.values_SC, weight.values_SC, *([] if out_SM is None else [out_SM])]
    depth = x.values_SC.shape[1]
    return (
        torch.cuda.get_device_capability(x.values_SC.device) == (9, 0)
        and dtype == torch.bfloat16
        and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in tensors)
        and all(one.scales_S.is_contiguous() and one.scales_S.data_ptr() % 8 == 0 for one in (x, weight))
        and depth % PANEL_BYTES == 0
        and depth >= LAG * PANEL_BYTES
        and len(weight) % (2 * COLUMNS) == 0
    )


def scaled_linear(x: Quantised, weight: Quantised, dtype: torch.dtype, out_SM: Tensor | None = None) -> Tensor:
    """`scaled_linear.scaled_linear`."""
    if out_SM is None:
        out_SM = x.scales_S.new_empty(len(x), len(weight), dtype=dtype)
    _launch("scaled_linear", x, weight, out_SM, unit_columns=2 * COLUMNS, second_half=COLUMNS)
    return out_SM


def scaled_gated_linear(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """`scaled_linear.scaled_gated_linear`."""
    width = len(weight) // 2
    out_SF = x.scales_S.new_empty(len(x), width, dtype=dtype)
    _launch("scaled_gated_linear", x, weight, out_SF, unit_columns=COLUMNS, second_half=width)
    return out_SF


def _launch(name: str, x: Quantised, weight: Quantised, out_SF: Tensor, *, unit_columns: int, second_half: int) -> None:
    S, C = x.values_SC.shape
    assert weight.values_SC.shape[1] == C
    assert x.values_SC.dtype == weight.values_SC.dtype == E4M3
    assert len(x.scales_S) == S
    assert len(weight.scales_S) == len(weight)
    assert len(out_SF) == S
    launch(
        _module(out_SF.device),
        name,
        x.values_SC,
        weight.values_SC,
        out_SF,
        Shape(S, out_SF.shape[1], C, unit_columns, second_half),
        [pointer(x.scales_S), pointer(weight.scales_S)],
    )


@cache
def _module(device: torch.device) -> Module:
    return Module(
        SOURCES / "scaled_linear_hopper.cu",
        device,
        macros=[f"TYPE={TYPES[torch.bfloat16]}", "SCALED=1"],
        preludes=[SOURCES / "hopper.cuh", SOURCES / "hopper_product.cuh"],
        one_generation=True,
    )
