"""Triton kernels around block-sparse attention: into tiles with their means, the choice of tiles, and out of tiles.

Each is one pass over its tensors; sums and products are fp32 and rounded once. The formulas are those of
`video_sparse_attention`, whose PyTorch path is the truth that tests compare with.

Shapes: S packed rows, H heads, D head dimension; n tiles, P of them prefix, V = n - P, B places of a tile; k chosen.
"""

# triton comes with the CUDA builds of torch alone
# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST_COLUMNS = 1024
"""Fewer columns would be other kernels to compile and no faster ones."""
_CHOOSE_WARPS = 2


def pack_tiles(x_SHD: Tensor, rows_nB: Tensor, sizes_n: Tensor) -> tuple[Tensor, Tensor]:
    """Rows into the places of their tiles, and the means over the valid rows of each tile.

    Args:
        x_SHD: (S, H, D) any floating dtype, channels contiguous; D and B powers of two.
        rows_nB: (n, B) int64 rows in 0..S-1.
        sizes_n: (n,) integers in 1..B.

    Returns:
        (H, n, B, D) in the dtype of `x_SHD`, and (H, n, D) fp32.
    """
    H, D = x_SHD.shape[1:]
    n, B = rows_nB.shape
    assert x_SHD.stride(-1) == 1
    assert rows_nB.is_contiguous()
    packed_HnBD = x_SHD.new_empty(H, n, B, D)
    means_HnD = x_SHD.new_empty(H, n, D, dtype=torch.float32)
    with torch.cuda.device(x_SHD.device):
        _pack_kernel[(n, H)](
            x_SHD, packed_HnBD, means_HnD, rows_nB, sizes_n, n, x_SHD.stride(0), x_SHD.stride(1), B=B, D=D, num_warps=4
        )
    return packed_HnBD, means_HnD


def choose_tiles(scores_Hnn: Tensor, P: int, k: int) -> Tensor:
    """For every video tile the k video tiles of the largest scores; of equal scores the lower tile wins.

    No sort: a score that k others reach is found bit by bit, by counting.

    Args:
        scores_Hnn: (H, n, n) fp32, rows contiguous. NaN ranks with minus infinity.
        k: 1..V.

    Returns:
        (H, V, k) int32 tiles in P..n-1, ascending.
    """
    H, n, _ = scores_Hnn.shape
    V = n - P
    assert scores_Hnn.dtype == torch.float32
    assert scores_Hnn.stride(-1) == 1
    assert 1 <= k <= V
    lists_HVk = torch.empty(H, V, k, dtype=torch.int32, device=scores_Hnn.device)
    with torch.cuda.device(scores_Hnn.device):
        _choose_kernel[(V, H)](
            scores_Hnn, lists_HVk, scores_Hnn.stride(0), scores_Hnn.stride(1), P, V, k,
            COLUMNS=max(_LEAST_COLUMNS, triton.next_power_of_2(V)), num_warps=_CHOOSE_WARPS,
        )  # fmt: skip
    return lists_HVk


def unpack_tiles(
    fine_HnBD: Tensor, coarse_HnD: Tensor | None, gate_SHD: Tensor | None, rows_nB: Tensor, sizes_n: Tensor, S: int
) -> Tensor:
    """fine + coarse * gate in packed rows; fine alone without a gate.

    Args:
        fine_HnBD: (H, n, B, D) any floating dtype.
        coarse_HnD: (H, n, D) fp32.
        gate_SHD: (S, H, D), the dtype of `fine_HnBD`, channels contiguous.
        rows_nB, sizes_n: as in `pack_tiles`; every row lies in one valid place.

    Returns:
        (S, H, D), the dtype of `fine_HnBD`.
    """
    H, n, B, D = fine_HnBD.shape
    out_SHD = fine_HnBD.new_empty(S, H, D)
    gated = coarse_HnD is not None and gate_SHD is not None
    # without a gate, neither is read
    coarse = fine_HnBD if coarse_HnD is None else coarse_HnD
    gate = out_SHD if gate_SHD is None else gate_SHD
    assert fine_HnBD.is_contiguous()
    assert coarse.is_contiguous()
    assert gate.stride(-1) == 1
    with torch.cuda.device(fine_HnBD.device):
        _unpack_kernel[(n, H)](
            fine_HnBD, coarse, gate, out_SHD, rows_nB, sizes_n, n, H, gate.stride(0), gate.stride(1),
            GATED=gated, B=B, D=D, num_warps=4,
        )  # fmt: skip
    return out_SHD


@triton.jit(do_not_specialize=["n"])
def _pack_kernel(
    x_ptr, packed_ptr, means_ptr, rows_ptr, sizes_ptr, n, row_stride, head_stride, B: tl.constexpr, D: tl.constexpr
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, B)
    channel = tl.arange(0, D)
    rows = tl.load(rows_ptr + tile * B + place)
    size = tl.load(sizes_ptr + tile).to(tl.int32)
    x = tl.load(x_ptr + rows[:, None] * row_stride + head * head_stride + channel[None, :])  # (B, D)
    out = head * n + tile
    tl.store(packed_ptr + out * (B * D) + place[:, None] * D + channel[None, :], x)
    total = tl.sum(tl.where(place[:, None] < size, x.to(tl.float32), 0.0), 0)
    tl.store(means_ptr + out * D + channel, total / size.to(tl.float32))


@triton.jit(do_not_specialize=["head_stride", "row_stride", "P", "V", "k"])
def _choose_kernel(scores_ptr, lists_ptr, head_stride, row_stride, P, V, k, COLUMNS: tl.constexpr):
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < V
    row_ptr = scores_ptr + head * head_stride + (P + query).to(tl.int64) * row_stride + P
    score = tl.load(row_ptr + column, mask=inside, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    # zeros of both signs are equal
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # integers in the order of the floats; columns past the end get one below all of them
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    # the largest threshold that k keys reach, bit by bit; the first step leads from the lowest integer to 0
    threshold = tl.full((), -(2**31), tl.int32)
    step = tl.full((), -(2**31), tl.int32)
    reached = tl.full((), COLUMNS, tl.int32)
    while (step != 0) & (reached != k):
        candidate = threshold + step
        count = tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(count >= k, candidate, threshold)
        reached = tl.where(count >= k, count, reached)
        step = (step >> 1) & 0x7FFFFFFF
    above = key > threshold
    level = key == threshold
    vacant = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= vacant))
    position = tl.cumsum(chosen.to(tl.int32), 0) - 1
    list_ptr = lists_ptr + (head * V + query) * k
    tl.store(list_ptr + position, P + column, mask=chosen)


@triton.jit(do_not_specialize=["n", "H"])
def _unpack_kernel(
    fine_ptr, coarse_ptr, gate_ptr, out_ptr, rows_ptr, sizes_ptr, n, H, gate_row_stride, gate_head_stride,
    GATED: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, B)
    channel = tl.arange(0, D)
    rows = tl.load(rows_ptr + tile * B + place)
    valid = (place < tl.load(sizes_ptr + tile).to(tl.int32))[:, None]
    at = head * n + tile
    out = tl.load(fine_ptr + at * (B * D) + place[:, None] * D + channel[None, :]).to(tl.float32)  # (B, D)
    if GATED:
        coarse = tl.load(coarse_ptr + at * D + channel)
        gate_at = rows[:, None] * gate_row_stride + head * gate_head_stride + channel[None, :]
        out += coarse[None, :] * tl.load(gate_ptr + gate_at).to(tl.float32)
    target = out_ptr + (rows[:, None] * H + head) * D + channel[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=valid)
