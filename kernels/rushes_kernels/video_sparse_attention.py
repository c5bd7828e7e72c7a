"""Video sparse attention (VSA-H3): softmax over selected tiles plus a gated, pooled coarse branch.

The packed sequence is cut into tiles of at most B rows. With pooled(X)_i the mean of the valid rows of tile i,

    score_ij = <pooled(q)_i, pooled(k)_j> / sqrt(D)                     fp32, per head
    fine_r   = softmax attention of row r over the rows of its tile's selected tiles
    c_i      = sum_j softmax_j(score_ij) pooled(v)_j                    over all n tiles
    out_r    = fine_r + c_i * gate_r                                    i is the tile of row r

A prefix tile (text, conditions, audio) selects every tile. A video tile selects every prefix tile and the k video
tiles with the largest score; of equal scores the lower tile index wins.

Shapes: S packed rows, p of them prefix, H heads, D head dimension; n = P + V tiles (prefix, video), B rows of a whole
tile, k selected video tiles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from rushes_kernels.block_sparse_attention import block_sparse_attention
from rushes_kernels.coarse import coarse_means, score_tiles
from rushes_kernels.norm import HeadNorm, rms_norm_rotate
from rushes_kernels.nvrtc import KernelError
from rushes_kernels.plain import may_run_kernel
from rushes_kernels.providers import Provider, can_build_triton, choose_provider

VIDEO_BOX = (4, 4, 4)
"""Frames, rows and columns of a video tile that the released students were trained with (64 rows)."""

_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Bound on the keys and values gathered at a time; on the CPU a chunk should stay near the caches."""


@dataclass(frozen=True, eq=False)
class TileMap:
    """Which packed rows form which tile. Tile order: the prefix segments one after the other, then the video boxes.

    A map with spare rows lets its first segment be shorter from one use to the next, without another map.
    """

    rows_nB: Tensor
    """(n, B) int64: the packed row in each place of a tile; places past the tile's size repeat its last row."""
    sizes_n: Tensor
    """(n,) int64: valid rows per tile, 1..B, or 0 where they are spare."""
    places_S: Tensor
    """(S,) int64: the place, counted through all tiles (tile * B + place in it), that each packed row sits in."""
    num_prefix_tiles: int
    num_prefix_rows: int
    absence_o: Tensor | None = None
    """(o,) fp32, if the first o tiles, all of them prefix, may be shorter than their rows or empty: what a score of the
    tile has added to it, 0 or minus infinity. `shorten_` says which rows count."""

    @property
    def num_tiles(self) -> int:
        return self.rows_nB.shape[0]

    @property
    def num_video_tiles(self) -> int:
        return self.num_tiles - self.num_prefix_tiles

    @property
    def num_rows(self) -> int:
        return self.places_S.shape[0]

    @property
    def tile_rows(self) -> int:
        """Rows of a whole tile."""
        return self.rows_nB.shape[1]

    @property
    def valid_nB(self) -> Tensor:
        """(n, B) bool: places that hold a row of their own."""
        return torch.arange(self.tile_rows, device=self.sizes_n.device) < self.sizes_n[:, None]

    @property
    def tiles_S(self) -> Tensor:
        """(S,) int64: the tile of each packed row."""
        return self.places_S // self.tile_rows

    @property
    def counted_S(self) -> Tensor:
        """(S,) bool: packed rows that count."""
        return self.valid_nB.flatten()[self.places_S]

    def to(self, device: torch.device | str) -> Self:
        return replace(
            self,
            rows_nB=self.rows_nB.to(device),
            sizes_n=self.sizes_n.to(device),
            places_S=self.places_S.to(device),
            absence_o=None if self.absence_o is None else self.absence_o.to(device),
        )

    def with_spare_rows(self, num_rows: int) -> Self:
        """The map, with its first `num_rows` rows, whole tiles of one segment, for `shorten_` to leave some out.

        What attention gives rows that are left out means nothing, but is finite if they are.

        Raises:
            ValueError: the rows are no whole tiles of the prefix.
        """
        num_spare, rest = divmod(num_rows, self.tile_rows)
        if rest or num_rows > self.num_prefix_rows:
            raise ValueError(
                f"spare rows must be whole tiles of {self.tile_rows} among the {self.num_prefix_rows} of the prefix, "
                f"got {num_rows}"
            )
        return replace(self, absence_o=torch.zeros(num_spare, device=self.sizes_n.device))

    def shorten_(self, length: Tensor) -> None:
        """From now on only the first `length` (one int64, at least 1) of the spare rows count. Waits for nothing."""
        assert self.absence_o is not None
        num_spare = len(self.absence_o)
        starts_o = torch.arange(0, num_spare * self.tile_rows, self.tile_rows, device=length.device)
        sizes_o = (length - starts_o).clamp(0, self.tile_rows)
        self.sizes_n[:num_spare] = sizes_o
        self.absence_o.zero_().masked_fill_(sizes_o == 0, -torch.inf)


def tile_map(
    prefix_lengths: Sequence[int], grid: tuple[int, int, int], *, box: tuple[int, int, int] = VIDEO_BOX
) -> TileMap:
    """Cut a packed sequence of prefix segments followed by a (frames, rows, columns) video raster into tiles.

    Every prefix segment is cut by itself into pieces of prod(box) rows, the last one possibly short; an empty segment
    has no tile. The video raster is cut into boxes, time first, then rows, then columns; boxes at the far edges are
    smaller. Rows inside a box keep raster order.

    Raises:
        ValueError: a length or an extent of the grid is out of range.
    """
    if any(length < 0 for length in prefix_lengths):
        raise ValueError(f"prefix lengths must not be negative, got {list(prefix_lengths)}")
    if min(grid) < 1:
        raise ValueError(f"the video grid must have at least one row on every axis, got {grid}")
    B = math.prod(box)
    num_prefix_rows = sum(prefix_lengths)
    num_rows = num_prefix_rows + math.prod(grid)
    rows_S = torch.arange(num_rows)

    tiles = [piece for segment in rows_S[:num_prefix_rows].split(list(prefix_lengths)) for piece in segment.split(B)]
    tiles = [tile for tile in tiles if len(tile)]
    num_prefix_tiles = len(tiles)
    raster = rows_S[num_prefix_rows:].view(grid)
    starts = (range(0, extent, step) for extent, step in zip(grid, box, strict=True))
    for t, y, x in product(*starts):
        tiles.append(raster[t : t + box[0], y : y + box[1], x : x + box[2]].flatten())

    places_B = torch.arange(B)
    rows_nB = torch.stack([tile[places_B.clamp(max=len(tile) - 1)] for tile in tiles])
    sizes_n = torch.tensor([len(tile) for tile in tiles])
    valid_nB = places_B < sizes_n[:, None]
    places_S = torch.empty(num_rows, dtype=torch.int64)
    places_S[rows_nB[valid_nB]] = valid_nB.flatten().nonzero().squeeze(1)
    return TileMap(rows_nB, sizes_n, places_S, num_prefix_tiles, num_prefix_rows)


def num_selected_tiles(sparsity: float, num_video_tiles: int) -> int:
    """Video tiles that each video tile attends to: ceil((1 - sparsity) * V), at least one, at most all.

    Raises:
        ValueError: `sparsity` is outside [0, 1).
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
    return max(1, min(math.ceil((1 - sparsity) * num_video_tiles), num_video_tiles))


def video_sparse_attention_ref(
    q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, gate_SHD: Tensor | None, tiles: TileMap, *, sparsity: float
) -> Tensor:
    """The formula with dense (H, S, S) masks, all in fp32: the truth for small S. Arguments as in the public op."""
    q_HSD, k_HSD, v_HSD = (x.float().transpose(0, 1) for x in (q_SHD, k_SHD, v_SHD))
    scale = q_SHD.shape[-1] ** -0.5
    P, V = tiles.num_prefix_tiles, tiles.num_video_tiles

    member_nS = (tiles.tiles_S == torch.arange(tiles.num_tiles, device=q_SHD.device)[:, None]) & tiles.counted_S
    pool_nS = member_nS.float() / member_nS.sum(1, keepdim=True).clamp(min=1)
    scores_Hnn = (pool_nS @ q_HSD) @ (pool_nS @ k_HSD).transpose(1, 2) * scale
    scores_Hnn = scores_Hnn.masked_fill(~member_nS.any(1), -torch.inf)

    selected_Hnn = torch.ones_like(scores_Hnn, dtype=torch.bool)
    ranking = scores_Hnn[:, P:, P:].argsort(dim=-1, descending=True, stable=True)
    selected_Hnn[:, P:, P:] = ranking.argsort(dim=-1) < num_selected_tiles(sparsity, V)
    selected_HSS = selected_Hnn[:, tiles.tiles_S][:, :, tiles.tiles_S] & tiles.counted_S

    logits_HSS = (q_HSD @ k_HSD.transpose(1, 2) * scale).masked_fill(~selected_HSS, -torch.inf)
    out_HSD = logits_HSS.softmax(-1) @ v_HSD
    if gate_SHD is not None:
        coarse_HnD = scores_Hnn.softmax(-1) @ (pool_nS @ v_HSD)
        out_HSD = out_HSD + coarse_HnD[:, tiles.tiles_S] * gate_SHD.float().transpose(0, 1)
    return out_HSD.transpose(0, 1).to(q_SHD.dtype)


def video_sparse_attention(
    q_SHD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    gate_SHD: Tensor | None,
    tiles: TileMap,
    *,
    sparsity: float,
    norm: HeadNorm | None = None,
    provider: Provider | None = None,
    out_NHD: Tensor | None = None,
    places_S: Tensor | None = None,
) -> Tensor:
    """VSA-H3 over one packed sequence, in bounded memory: neither scores of rows nor all gathered keys are ever held.

    Args:
        q_SHD, k_SHD: (S, H, D) bf16, fp16 or fp32, rows in packed order; normalised and rotated unless `norm` is given.
        v_SHD: (S, H, D), the same dtype.
        gate_SHD: (S, H, D), the same dtype, factor of the coarse branch as projected. None leaves that branch out,
            which equals a gate of zeros.
        tiles: the map of these S rows, on their device.
        sparsity: share of video tiles that a video tile does not attend to, in [0, 1).
        norm: norm and rotation of q and k that are still due; rounded before anything else sees them.
        provider: what computes the fine branch; None takes what `choose_provider` says of these inputs.
        out_NHD: written instead of a new tensor: contiguous, N >= S, the dtype of `q_SHD`; rows that get none stay.
        places_S: (S,) int64, the row of `out_NHD` that each packed row goes to; by default they keep their order.

    Returns:
        (S, H, D), the dtype of `q_SHD`, or `out_NHD`. Pooling, scores and the coarse branch are fp32; fine and coarse
        are added in fp32 and rounded once.

    Raises:
        ValueError: shapes, or the map and the rows, do not fit together.
    """
    gates = () if gate_SHD is None else (gate_SHD,)
    if any(x.shape != q_SHD.shape or x.dtype != q_SHD.dtype for x in (k_SHD, v_SHD, *gates)):
        described = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q_SHD, k_SHD, v_SHD, *gates))
        raise ValueError(f"q, k, v and gate must agree in shape and dtype, got {described}")
    if q_SHD.shape[0] != tiles.num_rows:
        raise ValueError(f"the tile map is for {tiles.num_rows} rows, got {q_SHD.shape[0]}")
    _check_target(q_SHD, out_NHD, places_S)

    if provider is None:
        provider = choose_provider(q_SHD.device, dtype=q_SHD.dtype, head_dim=q_SHD.shape[-1], tile_rows=tiles.tile_rows)

    k = num_selected_tiles(sparsity, tiles.num_video_tiles)
    if provider is not Provider.TORCH:
        return _by_kernels(q_SHD, k_SHD, v_SHD, gate_SHD, tiles, k, norm, provider, out_NHD, places_S)
    if norm is not None:
        q_SHD, k_SHD = _normed(q_SHD, k_SHD, norm)

    q_HSD, k_HSD, v_HSD = (x.transpose(0, 1).contiguous() for x in (q_SHD, k_SHD, v_SHD))
    q_HnBD, k_HnBD, v_HnBD = (x[:, tiles.rows_nB] for x in (q_HSD, k_HSD, v_HSD))
    scores_Hnn = _pool(q_HnBD, tiles) @ _pool(k_HnBD, tiles).transpose(1, 2) * q_SHD.shape[-1] ** -0.5
    _leave_out_absent(scores_Hnn, tiles)

    P, p = tiles.num_prefix_tiles, tiles.num_prefix_rows
    selected_HVk = select_tiles(scores_Hnn[:, P:, P:], k)
    video_HVBD = _attend_selected(q_HnBD[:, P:], k_HnBD, v_HnBD, selected_HVk, tiles)
    out_HSD = video_HVBD.flatten(1, 2)[:, tiles.places_S[p:] - P * tiles.tile_rows]
    if p:
        mask_1S = None if tiles.absence_o is None else tiles.counted_S[None]
        prefix_HpD = F.scaled_dot_product_attention(q_HSD[None, :, :p], k_HSD[None], v_HSD[None], attn_mask=mask_1S)[0]
        out_HSD = torch.cat([prefix_HpD, out_HSD], dim=1)

    if gate_SHD is not None:
        coarse_HnD = scores_Hnn.softmax(-1) @ _pool(v_HnBD, tiles)
        gated_HSD = coarse_HnD[:, tiles.tiles_S].mul_(gate_SHD.transpose(0, 1))
        out_HSD = gated_HSD.add_(out_HSD).to(q_SHD.dtype)
    if out_NHD is None:
        return out_HSD.transpose(0, 1).contiguous()
    out_NHD[slice(len(q_SHD)) if places_S is None else places_S] = out_HSD.transpose(0, 1)
    return out_NHD


def prepare_video_sparse_attention(
    provider: Provider, device: torch.device | str, *, dtype: torch.dtype, head_dim: int
) -> None:
    """Compile what `provider` needs, so that no clip waits for it. Kernels that a cache on disk holds are loaded.

    Raises:
        KernelError: a kernel does not compile.
    """
    if provider is Provider.TORCH:
        return
    tiles = tile_map([1], (1, 1, 8)).to(device)
    x_SHD = torch.zeros(tiles.num_rows, 1, head_dim, dtype=dtype, device=device)
    try:
        video_sparse_attention(x_SHD, x_SHD, x_SHD, x_SHD, tiles, sparsity=0.5, provider=provider)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        # Triton raises whatever came of what is missing, and needs none of it where its cache has everything
        if provider is Provider.TRITON and not can_build_triton():
            raise KernelError(
                f"Triton needs a C compiler, Python's headers and a cache that it may write to: {error}"
            ) from error
        raise
    torch.cuda.synchronize(device)


def plan_video_sparse_attention(
    tiles: TileMap, provider: Provider, *, heads: int, sparsity: float, device: torch.device | str
) -> None:
    """Make what `provider` keeps for this shape, which the op would make when it is first called."""
    if provider is Provider.HOPPER:
        from rushes_kernels.block_sparse_hopper import schedule

        k = num_selected_tiles(sparsity, tiles.num_video_tiles)
        schedule(heads, tiles.num_tiles, tiles.num_prefix_tiles, k, torch.device(device))


def _by_kernels(
    q_SHD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    gate_SHD: Tensor | None,
    tiles: TileMap,
    k: int,
    norm: HeadNorm | None,
    provider: Provider,
    out_NHD: Tensor | None,
    places_S: Tensor | None,
) -> Tensor:
    """The public op where block-sparse attention has a kernel."""
    from rushes_kernels.tile_kernels import choose_tiles, pack_heads, pack_tiles, takes_heads, unpack_tiles

    if norm is not None and may_run_kernel("pack_heads", q_SHD) and takes_heads(q_SHD, norm.cos_SR.shape[-1]):
        packed = pack_heads(q_SHD, k_SHD, v_SHD, norm, tiles.rows_nB, tiles.sizes_n)
    else:
        if norm is not None:
            q_SHD, k_SHD = _normed(q_SHD, k_SHD, norm)
        packed = tuple(pack_tiles(x, tiles.rows_nB, tiles.sizes_n) for x in (q_SHD, k_SHD, v_SHD))
    (q_HnBD, q_HnD), (k_HnBD, k_HnD), (v_HnBD, v_HnD) = packed
    scores_Hnn = score_tiles(q_HnD, k_HnD, q_SHD.shape[-1] ** -0.5)
    _leave_out_absent(scores_Hnn, tiles)
    lists_HVk = choose_tiles(scores_Hnn, tiles.num_prefix_tiles, k)
    fine_HnBD = block_sparse_attention(
        q_HnBD,
        k_HnBD,
        v_HnBD,
        lists_HVk,
        torch.full_like(lists_HVk[..., 0], k),
        tiles.sizes_n.int(),
        num_prefix_tiles=tiles.num_prefix_tiles,
        provider=provider,
    )
    coarse_HnD = None if gate_SHD is None else coarse_means(scores_Hnn, v_HnD)
    return unpack_tiles(
        fine_HnBD,
        coarse_HnD,
        gate_SHD,
        tiles.rows_nB,
        tiles.sizes_n,
        tiles.num_rows,
        out_NHD=out_NHD,
        places_S=places_S,
    )


def _check_target(q_SHD: Tensor, out_NHD: Tensor | None, places_S: Tensor | None) -> None:
    if out_NHD is None:
        if places_S is not None:
            raise ValueError("places of rows are given, but nothing that they are in")
        return
    S, *heads = q_SHD.shape
    if list(out_NHD.shape[1:]) != heads or len(out_NHD) < S or out_NHD.dtype != q_SHD.dtype:
        raise ValueError(
            f"the result {tuple(out_NHD.shape)} {out_NHD.dtype} has no room for {(S, *heads)} {q_SHD.dtype}"
        )
    if not out_NHD.is_contiguous():
        raise ValueError(f"the result must be contiguous, its strides are {out_NHD.stride()}")
    if places_S is not None and (places_S.shape, places_S.dtype) != ((S,), torch.int64):
        raise ValueError(f"places must be ({S},) int64, got {tuple(places_S.shape)} {places_S.dtype}")


def _normed(q_SHD: Tensor, k_SHD: Tensor, norm: HeadNorm) -> tuple[Tensor, Tensor]:
    return (
        rms_norm_rotate(q_SHD, norm.q_weight_D, norm.cos_SR, norm.sin_SR, norm.eps),
        rms_norm_rotate(k_SHD, norm.k_weight_D, norm.cos_SR, norm.sin_SR, norm.eps),
    )


def select_tiles(scores: Tensor, k: int) -> Tensor:
    """The columns of the `k` largest scores of every row, in ascending order; of equal scores the lower column wins.

    Args:
        scores: (..., columns) fp32. NaN ranks below everything, so exactly `k` columns are found in any case.

    Returns:
        (..., k) int64.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    threshold = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > threshold
    level = scores == threshold
    vacant = k - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= vacant))
    return chosen.nonzero()[:, -1].view(*scores.shape[:-1], k)


def _pool(x_HnBD: Tensor, tiles: TileMap) -> Tensor:
    """Means over the valid rows of each tile: (H, n, D) fp32."""
    valid_n1B = tiles.valid_nB[:, None].float()
    return (valid_n1B @ x_HnBD.float()).squeeze(2) / tiles.sizes_n.clamp(min=1)[:, None]


def _leave_out_absent(scores_Hnn: Tensor, tiles: TileMap) -> None:
    """No tile scores one without rows, in place."""
    if tiles.absence_o is not None:
        scores_Hnn[..., : len(tiles.absence_o)] += tiles.absence_o


def _attend_selected(q_HVBD: Tensor, k_HnBD: Tensor, v_HnBD: Tensor, selected_HVk: Tensor, tiles: TileMap) -> Tensor:
    """Attention of each video tile over all prefix tiles and its selected video tiles: (H, V, B, D)."""
    H, V, B, D = q_HVBD.shape
    P = tiles.num_prefix_tiles
    prefix = repeat(torch.arange(P, device=q_HVBD.device), "p -> h v p", h=H, v=V)
    keys_qK = rearrange(torch.cat([prefix, P + selected_HVk], dim=-1), "h v k -> (h v) k")
    heads_q = torch.arange(H, device=q_HVBD.device).repeat_interleave(V)
    q_qBD = rearrange(q_HVBD, "h v b d -> (h v) b d")
    k_tBD, v_tBD = k_HnBD.flatten(0, 1), v_HnBD.flatten(0, 1)
    valid_nB = tiles.valid_nB

    out_qBD = torch.empty_like(q_qBD)
    bytes_per_tile = 2 * keys_qK.shape[1] * B * D * q_HVBD.element_size()
    chunk = max(1, _CHUNK_BYTES[q_HVBD.device.type] // bytes_per_tile)
    for start in range(0, H * V, chunk):
        part = slice(start, min(start + chunk, H * V))
        keys_cK = keys_qK[part]
        gather = (keys_cK + heads_q[part, None] * tiles.num_tiles).flatten()
        k_c1LD, v_c1LD = (x.index_select(0, gather).view(len(keys_cK), 1, -1, D) for x in (k_tBD, v_tBD))
        mask_c11L = valid_nB[keys_cK].view(len(keys_cK), 1, 1, -1)
        attended = F.scaled_dot_product_attention(q_qBD[part, None], k_c1LD, v_c1LD, attn_mask=mask_c11L)
        out_qBD[part] = attended[:, 0]
    return rearrange(out_qBD, "(h v) b d -> h v b d", h=H)
