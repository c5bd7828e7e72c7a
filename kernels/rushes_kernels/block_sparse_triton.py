"""Block-sparse attention in Triton, for CUDA devices of any kind.

Shapes: H heads, n tiles, P of them prefix, V = n - P; B places of a tile, D head dimension; L entries of a list.
"""

# triton has no wheels but for Linux, and its launch options are no parameters of a kernel
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


def attend(
    q_HnBD: Tensor, k_HnBD: Tensor, v_HnBD: Tensor, lists_HVL: Tensor, counts_HV: Tensor, sizes_n: Tensor, P: int
) -> Tensor:
    """As `block_sparse_attention`, which has checked shapes and layouts.

    Raises:
        ValueError: tile or head dimension is not what the kernel was written for.
    """
    H, n, B, D = q_HnBD.shape
    if B not in (16, 32, 64, 128) or D not in (16, 32, 64, 128):
        raise ValueError(f"tile rows and head dimension must be 16, 32, 64 or 128, got {B} and {D}")
    out_HnBD = torch.empty_like(q_HnBD)
    log2_scale = D**-0.5 * math.log2(math.e)
    wide = q_HnBD.dtype == torch.float32
    # Triton's interpreter takes tensors of the CPU
    with torch.cuda.device(q_HnBD.device) if q_HnBD.is_cuda else nullcontext():
        _attend_kernel[(n, H)](
            q_HnBD,
            k_HnBD,
            v_HnBD,
            out_HnBD,
            lists_HVL,
            counts_HV,
            sizes_n,
            n,
            P,
            lists_HVL.shape[-1],
            log2_scale,
            B=B,
            D=D,
            PRECISION="ieee" if wide else "tf32",
            num_warps=4,
            num_stages=1 if wide else 2,
        )
    return out_HnBD


@triton.jit(do_not_specialize=["n", "P", "L"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lists_ptr, counts_ptr, sizes_ptr, n, P, L, log2_scale,
    B: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, B)
    channel = tl.arange(0, D)
    within = row[:, None] * D + channel[None, :]
    tiles = head * n
    is_prefix = query < P
    # in a prefix tile, entry i is tile i
    listed = tl.where(is_prefix, n, P)
    video = tl.where(is_prefix, 0, query - P)
    list_ptr = lists_ptr + (head * (n - P) + video) * L
    count = tl.load(counts_ptr + head * (n - P) + video, mask=query >= P, other=0)
    length = listed + tl.minimum(tl.maximum(count, 0), L)

    q = tl.load(q_ptr + (tiles + query) * (B * D) + within)
    out = tl.zeros((B, D), tl.float32)
    # finite, so that a difference of two of them is 0 and not NaN
    reference = tl.full((B,), -1e30, tl.float32)
    total = tl.zeros((B,), tl.float32)
    for i in range(length):
        entry = tl.load(list_ptr + i - listed, mask=i >= listed, other=0)
        tile = tl.where(i < listed, i, entry)
        known = (tile >= 0) & (tile < n)
        tile = tl.where(known, tile, 0)
        size = tl.where(known, tl.load(sizes_ptr + tile), 0)
        base = (tiles + tile) * (B * D)
        k = tl.load(k_ptr + base + within)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        s = tl.where(row[None, :] < size, s, -1e30)
        moved = tl.maximum(reference, tl.max(s, 1))
        factor = tl.exp2(reference - moved)
        # a tile that is passed over leaves a row's reference at its start, and its weights at exp2(0)
        p = tl.where(row[None, :] < size, tl.exp2(s - moved[:, None]), 0.0)
        total = total * factor + tl.sum(p, 1)
        v = tl.load(v_ptr + base + within)
        out = out * factor[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        reference = moved
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(out_ptr + (tiles + query) * (B * D) + within, (out * inverse[:, None]).to(out_ptr.dtype.element_ty))
