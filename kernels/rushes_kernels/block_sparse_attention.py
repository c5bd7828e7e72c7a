"""Attention of every query tile over its own list of key tiles.

    out_ir = sum_{j in keys(h, i)} sum_{c < sizes_j} softmax(q_ir . k_jc / sqrt(D)) v_jc      fp32, per head h

A query tile i < P (prefix) attends to all n tiles. A query tile i >= P attends to the P prefix tiles and to the first
counts[h, i - P] entries of its list, in any order. An empty softmax (no prefix, count 0) is 0.

Shapes: H heads, n tiles, P of them prefix, V = n - P; B places of a tile, D head dimension; L entries of a list.
"""

import torch
from torch import Tensor

from rushes_kernels.providers import Provider


def block_sparse_attention_ref(
    q_HnBD: Tensor,
    k_HnBD: Tensor,
    v_HnBD: Tensor,
    lists_HVL: Tensor,
    counts_HV: Tensor,
    sizes_n: Tensor,
    *,
    num_prefix_tiles: int,
) -> Tensor:
    """The formula with dense masks, all in fp32: the truth for small shapes. Arguments as in the public op."""
    H, n, B, D = q_HnBD.shape
    P = num_prefix_tiles
    listed_L = torch.arange(lists_HVL.shape[-1], device=q_HnBD.device)
    counted_HVL = listed_L < counts_HV[..., None]
    times_HVn = torch.zeros(H, n - P, n, device=q_HnBD.device)
    times_HVn.scatter_add_(-1, lists_HVL.where(counted_HVL, 0).long(), counted_HVL.float())
    attended_Hnn = torch.ones(H, n, n, dtype=torch.bool, device=q_HnBD.device)
    attended_Hnn[:, P:, P:] = times_HVn[..., P:] > 0
    valid_nB = torch.arange(B, device=q_HnBD.device) < sizes_n[:, None]

    out_HnBD = torch.empty_like(q_HnBD)
    for h in range(H):
        q, k, v = (x[h].float().flatten(0, 1) for x in (q_HnBD, k_HnBD, v_HnBD))
        mask = (attended_Hnn[h].repeat_interleave(B, 0)[:, :, None] & valid_nB).flatten(1)
        weights = (q @ k.T * D**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0)
        out_HnBD[h] = (weights @ v).view(n, B, D)
    return out_HnBD


def block_sparse_attention(
    q_HnBD: Tensor,
    k_HnBD: Tensor,
    v_HnBD: Tensor,
    lists_HVL: Tensor,
    counts_HV: Tensor,
    sizes_n: Tensor,
    *,
    num_prefix_tiles: int,
    provider: Provider,
    check: bool = False,
) -> Tensor:
    """Attention over lists of key tiles, without ever holding scores or gathered keys.

    Args:
        q_HnBD, k_HnBD, v_HnBD: (H, n, B, D), contiguous, one dtype. What lies in the places of k and v past a tile's
            size does not count but must be finite; those of q give rows of the result that mean nothing.
        lists_HVL: (H, V, L) int32 key tiles in [P, n), none twice among the first `counts` of a list.
        counts_HV: (H, V) int32, 0..L.
        sizes_n: (n,) int32 valid rows of each tile, 1..B, or 0 for tiles of the prefix: no tile attends to those, and
            what they get means nothing.
        num_prefix_tiles: P.
        provider: HOPPER (bf16, B 64, D 128, n up to 4,096) or TRITON (any floating dtype; B and D 16, 32, 64 or 128).
        check: also read the lists, which costs a synchronisation. Unchecked, wrong entries cause wrong results but no
            access out of bounds: what is out of range is passed over.

    Returns:
        (H, n, B, D), the dtype of `q_HnBD`. Softmax and sums are fp32; its weights are rounded to the dtype of v.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit, the provider cannot compute it, or `check` finds an entry out
            of range or doubled.
    """
    H, n = q_HnBD.shape[:2]
    P = num_prefix_tiles
    for name, x in (("k", k_HnBD), ("v", v_HnBD)):
        if x.shape != q_HnBD.shape or x.dtype != q_HnBD.dtype:
            raise ValueError(
                f"{name} must be like q, {tuple(q_HnBD.shape)} {q_HnBD.dtype}, got {tuple(x.shape)} {x.dtype}"
            )
    if not 0 <= P <= n:
        raise ValueError(f"the number of prefix tiles must be in 0..{n}, got {P}")
    L = lists_HVL.shape[-1]
    expected = {"lists": (lists_HVL, (H, n - P, L)), "counts": (counts_HV, (H, n - P)), "sizes": (sizes_n, (n,))}
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape or x.dtype != torch.int32:
            raise ValueError(f"{name} must be {shape} int32, got {tuple(x.shape)} {x.dtype}")
    tensors = (q_HnBD, k_HnBD, v_HnBD, lists_HVL, counts_HV, sizes_n)
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError("all tensors must be contiguous")
    if len({x.device for x in tensors}) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(str(x.device) for x in tensors)}")
    if check:
        check_lists(lists_HVL, counts_HV, num_prefix_tiles=P, num_tiles=n)

    match provider:
        case Provider.HOPPER:
            from rushes_kernels.block_sparse_hopper import attend
        case Provider.TRITON:
            from rushes_kernels.block_sparse_triton import attend
        case Provider.TORCH:
            raise ValueError(f"block-sparse attention has no provider {provider}")
    if not H * n:
        return torch.empty_like(q_HnBD)
    return attend(q_HnBD, k_HnBD, v_HnBD, lists_HVL, counts_HV, sizes_n, P)


def check_lists(lists_HVL: Tensor, counts_HV: Tensor, *, num_prefix_tiles: int, num_tiles: int) -> None:
    """Refuse lists that `block_sparse_attention` would compute wrongly. Waits for the device.

    Raises:
        ValueError: a count, or an entry that counts, is out of range, or a list names a tile twice.
    """
    L = lists_HVL.shape[-1]
    if bool(((counts_HV < 0) | (counts_HV > L)).any()):
        raise ValueError(f"counts must be in 0..{L}, got {int(counts_HV.min())}..{int(counts_HV.max())}")
    counted = torch.arange(L, device=lists_HVL.device) < counts_HV[..., None]
    outside = counted & ((lists_HVL < num_prefix_tiles) | (lists_HVL >= num_tiles))
    if bool(outside.any()):
        raise ValueError(
            f"listed tiles must be in {num_prefix_tiles}..{num_tiles - 1}, got {int(lists_HVL[outside][0])}"
        )
    # entries that do not count get values of their own below every tile
    apart = torch.where(counted, lists_HVL, -1 - torch.arange(L, device=lists_HVL.device, dtype=torch.int32))
    ordered = apart.sort(-1).values
    doubled = ordered[..., 1:] == ordered[..., :-1]
    if bool(doubled.any()):
        raise ValueError(f"a list must not name a tile twice, got {int(ordered[..., 1:][doubled][0])} twice")
