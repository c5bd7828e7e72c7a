"""Dense attention of heads as one projection leaves them: every token of a batch attends to all of them.

    out_bnh = sum_m softmax_m(q_bnh . k_bmh / sqrt(D)) v_bmh              softmax and sums in fp32

Shapes: B batches, N tokens, H heads, D head dimension; 3H heads of a token are those of q, of k and of v.
"""

import torch.nn.functional as F
from torch import Tensor

from rushes_kernels.plain import may_run_kernel


def attend_heads(qkv_BNHD: Tensor) -> Tensor:
    """Attention over the tokens of each batch.

    Args:
        qkv_BNHD: (B, N, 3H, D) contiguous, any floating dtype.

    Returns:
        (B, N, H, D), the same dtype.
    """
    if may_run_kernel("attend_heads", qkv_BNHD):
        from rushes_kernels import heads_hopper

        if heads_hopper.takes(qkv_BNHD):
            return heads_hopper.attend_heads(qkv_BNHD)
    return attend_heads_ref(qkv_BNHD)


def attend_heads_ref(qkv_BNHD: Tensor) -> Tensor:
    """`attend_heads` in plain PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in qkv_BNHD.chunk(3, dim=2))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
