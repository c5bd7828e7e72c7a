"""The gated activation of the feed-forward layers: value * SiLU(gate), computed in fp32 and rounded once.

Shapes: S rows, F inner width.
"""

import torch.nn.functional as F
from torch import Tensor

from rushes_kernels.plain import may_run_kernel


def swiglu(x_S2F: Tensor) -> Tensor:
    """Gate the first half of the columns of `x_S2F` (..., S, 2F) by the SiLU of the second half.

    The checkpoint stores the rows of the value projection first and those of the gate projection second.

    Returns:
        (..., S, F), the dtype of `x_S2F`.
    """
    if may_run_kernel("swiglu", x_S2F):
        from rushes_kernels import row_kernels

        if row_kernels.takes_gated(x_S2F):
            return row_kernels.swiglu(x_S2F)
    return swiglu_ref(x_S2F)


def swiglu_ref(x_S2F: Tensor) -> Tensor:
    """`swiglu` in plain PyTorch."""
    value_SF, gate_SF = x_S2F.chunk(2, dim=-1)
    return (value_SF.float() * F.silu(gate_SF.float())).to(x_S2F.dtype)
