"""Linear layers with what follows them in a block.

    gated_linear    value * SiLU(gate) of the products, the first half of which are values and the second gates
    project_heads   products in heads, the first of which are normed and rotated as by `norm_rotate_heads_`

Where a kernel runs, products are rounded once, behind what follows; elsewhere before it, too. It runs only where what
follows may run as a kernel as well (`plain.py`).

Shapes: S rows, C channels in, F inner width, M channels out; B batches of N positions, H heads, R rotary angles.
"""

import torch.nn.functional as F
from torch import Tensor

from rushes_kernels.norm import norm_rotate_heads_, norm_rotate_heads_ref_
from rushes_kernels.plain import may_run_kernel
from rushes_kernels.swiglu import swiglu, swiglu_ref


def gated_linear(x_SC: Tensor, weight_2FC: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """Project rows to values and gates, and gate.

    Args:
        x_SC: (S, C) bf16, fp16 or fp32.
        weight_2FC, bias_2F: (2F, C), (2F,) of the same dtype.

    Returns:
        (S, F), the dtype of `x_SC`.
    """
    if may_run_kernel("gated_linear", x_SC) and may_run_kernel("swiglu", x_SC):
        from rushes_kernels import linear_hopper

        if linear_hopper.takes_gated(x_SC, weight_2FC, bias_2F):
            return linear_hopper.gated_linear(x_SC, weight_2FC, bias_2F)
    return swiglu(F.linear(x_SC, weight_2FC, bias_2F))


def gated_linear_ref(x_SC: Tensor, weight_2FC: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """`gated_linear` in plain PyTorch."""
    return swiglu_ref(F.linear(x_SC, weight_2FC, bias_2F))


def project_heads(
    x_BNC: Tensor,
    weight_MC: Tensor,
    bias_M: Tensor,
    head_dim: int,
    num_normed: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    eps: float,
) -> Tensor:
    """Project every position to heads, and norm and rotate the first `num_normed` of them.

    Args:
        x_BNC: (B, N, C) contiguous, bf16, fp16 or fp32; every batch has the same N positions.
        weight_MC, bias_M: (M, C), (M,) of the same dtype, M = H * `head_dim`.
        cos_NR, sin_NR: (N, R) fp32, 2R <= `head_dim`.

    Returns:
        (B, N, H, `head_dim`), the dtype of `x_BNC`.
    """
    if may_run_kernel("project_heads", x_BNC) and may_run_kernel("norm_rotate_heads", x_BNC):
        from rushes_kernels import linear_hopper

        if linear_hopper.takes_heads(x_BNC, weight_MC, bias_M, head_dim, cos_NR, sin_NR):
            return linear_hopper.project_heads(x_BNC, weight_MC, bias_M, num_normed, cos_NR, sin_NR, eps)
    heads_BNHD = F.linear(x_BNC, weight_MC, bias_M).unflatten(-1, (-1, head_dim))
    return norm_rotate_heads_(heads_BNHD, num_normed, cos_NR, sin_NR, eps)


def project_heads_ref(
    x_BNC: Tensor,
    weight_MC: Tensor,
    bias_M: Tensor,
    head_dim: int,
    num_normed: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    eps: float,
) -> Tensor:
    """`project_heads` in plain PyTorch."""
    heads_BNHD = F.linear(x_BNC, weight_MC, bias_M).unflatten(-1, (-1, head_dim))
    return norm_rotate_heads_ref_(heads_BNHD, num_normed, cos_NR, sin_NR, eps)
