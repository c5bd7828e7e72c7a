"""Linear layers in 8 bits: rows and weights in e4m3, each row of either with a factor of its own.

    quantise_rows         values = e4m3(x * 448 / most), scale = most / 448, most being the row's largest magnitude
    scaled_linear         y[s, m] = sum over c of x[s, c] w[m, c], times the scales of both rows
    scaled_gated_linear   value * SiLU(gate) of such products, the first half of which are values and the second gates

448 is the largest finite e4m3. Rows of x get their scales when they are computed, weights when they are loaded. Tensor
cores of compute capability 9.0 add products of e4m3 with some 14 bits: a sum of 5,376 is then off by up to half a per
cent, where the roundings to e4m3 make it off by three or four. The references add in fp32.

Shapes: S rows, C channels in, F inner width, M channels out.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rushes_kernels.plain import may_run_kernel
from rushes_kernels.swiglu import swiglu, swiglu_ref

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_MAGNITUDE = 1e-30
"""Of a row that has a factor of its own: rows of less become zeros, and none is divided by zero."""
MULTIPLE = 16
"""Of channels and of rows of a weight: what the products of any device ask for."""


@dataclass(frozen=True, eq=False)
class Quantised:
    """Rows that stand for `values * scales`."""

    values_SC: Tensor
    """(S, C) e4m3."""
    scales_S: Tensor
    """(S,) fp32."""

    def __len__(self) -> int:
        return len(self.values_SC)

    def dequantised(self) -> Tensor:
        """(S, C) fp32."""
        return self.values_SC.float() * self.scales_S[:, None]


def quantise_rows(x_SC: Tensor) -> Quantised:
    """
    Args:
        x_SC: (S, C) bf16, fp16 or fp32. All products of a row with an infinity or NaN are NaN.
    """
    if may_run_kernel("quantise_rows", x_SC):
        from rushes_kernels import row_kernels

        if row_kernels.takes_quantised(x_SC):
            return Quantised(*row_kernels.quantise_rows(x_SC))
    return quantise_rows_ref(x_SC)


def quantise_rows_ref(x_SC: Tensor) -> Quantised:
    """`quantise_rows` in plain PyTorch."""
    x_SC = x_SC.float()
    most_S = x_SC.abs().amax(dim=-1).clamp(min=LEAST_MAGNITUDE)
    # so that all devices round alike: torch divides by a number in one way or another
    return Quantised((x_SC * (most_S.reciprocal() * LARGEST)[:, None]).to(E4M3), most_S * (1 / LARGEST))


def scaled_linear(x: Quantised, weight: Quantised, dtype: torch.dtype, out_SM: Tensor | None = None) -> Tensor:
    """
    Args:
        weight: (M, C) with M scales.
        out_SM: contiguous, of `dtype`, to be written to.

    Returns:
        (S, M) of `dtype`.
    """
    if may_run_kernel("scaled_linear", x.values_SC):
        from rushes_kernels import scaled_linear_hopper

        if scaled_linear_hopper.takes(x, weight, dtype, out_SM):
            return scaled_linear_hopper.scaled_linear(x, weight, dtype, out_SM)
    by_library = may_run_kernel("scaled_linear", x.values_SC) and _library_takes(x, weight, dtype)
    product_SM = (scaled_mm if by_library else scaled_linear_ref)(x, weight, dtype)
    return product_SM if out_SM is None else out_SM.copy_(product_SM)


def scaled_linear_ref(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """`scaled_linear` in plain PyTorch."""
    sums_SM = F.linear(x.values_SC.float(), weight.values_SC.float())
    return (sums_SM * x.scales_S[:, None] * weight.scales_S).to(dtype)


def scaled_gated_linear(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """
    Args:
        weight: (2F, C) with 2F scales.

    Returns:
        (S, F) of `dtype`.
    """
    if may_run_kernel("scaled_linear", x.values_SC) and may_run_kernel("swiglu", x.values_SC):
        from rushes_kernels import scaled_linear_hopper

        if scaled_linear_hopper.takes(x, weight, dtype):
            return scaled_linear_hopper.scaled_gated_linear(x, weight, dtype)
    return swiglu(scaled_linear(x, weight, dtype))


def scaled_gated_linear_ref(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """`scaled_gated_linear` in plain PyTorch."""
    return swiglu_ref(scaled_linear_ref(x, weight, torch.float32)).to(dtype)


def _library_takes(x: Quantised, weight: Quantised, dtype: torch.dtype) -> bool:
    channels = x.values_SC.shape[1]
    return dtype == torch.bfloat16 and channels % MULTIPLE == 0 and len(weight) % MULTIPLE == 0 and len(x) > 0


def scaled_mm(x: Quantised, weight: Quantised, dtype: torch.dtype) -> Tensor:
    """`scaled_linear` by the library of the device: to bf16, multiples of `MULTIPLE`, at least one row."""
    rowwise = F.ScalingType.RowWise
    return F.scaled_mm(
        x.values_SC,
        weight.values_SC.T,
        x.scales_S[:, None],
        rowwise,
        weight.scales_S[None],
        rowwise,
        output_dtype=dtype,
        use_fast_accum=True,
    )
