"""The passes around block-sparse attention in CUDA C++: into tiles with their means, the choice of tiles, out of tiles.

Each is one pass over its tensors; sums and products are fp32 and rounded once. The formulas are those of
`video_sparse_attention`, whose PyTorch path is the truth that tests compare with.

Shapes: S packed rows, H heads, D head dimension; n tiles, P of them prefix, V = n - P, B places of a tile; k chosen.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.norm import HeadNorm
from rushes_kernels.nvrtc import Module, pointer

# as in the sources
THREADS, WARPS = 256, 8
WORD_BYTES = 16
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
COLUMNS = (1024, 2048, 4096)
HEADS = 7
"""That a block of `pack_heads` takes one after the other: they share the angles of a row."""

_SOURCES = Path(__file__).parent


def pack_tiles(x_SHD: Tensor, rows_nB: Tensor, sizes_n: Tensor) -> tuple[Tensor, Tensor]:
    """Rows into the places of their tiles, and the means over the valid rows of each tile.

    Args:
        x_SHD: (S, H, D) bf16, fp16 or fp32; rows and heads may lie apart. D is a power of two from 16 to 128.
        rows_nB: (n, B) int64 rows in 0..S-1.
        sizes_n: (n,) int64 in 0..B; the means of an empty tile are 0.

    Returns:
        (H, n, B, D) in the dtype of `x_SHD`, and (H, n, D) fp32.
    """
    H, D = x_SHD.shape[1:]
    n, B = rows_nB.shape
    x_SHD = _in_words(x_SHD)
    _check_map(rows_nB, sizes_n)
    packed_HnBD = x_SHD.new_empty(H, n, B, D)
    means_HnD = x_SHD.new_empty(H, n, D, dtype=torch.float32)
    _passes(x_SHD.dtype, x_SHD.device).launch(
        "pack",
        [
            *(pointer(x) for x in (x_SHD, packed_HnBD, means_HnD, rows_nB, sizes_n)),
            ctypes.c_int(B),
            ctypes.c_int(D * x_SHD.element_size() // WORD_BYTES),
            *_strides(x_SHD),
        ],
        blocks=(n, H),
        threads=THREADS,
    )
    return packed_HnBD, means_HnD


def takes_heads(q_SHD: Tensor, num_angles: int) -> bool:
    """Whether `pack_heads` was written for heads of this dtype and width."""
    if q_SHD.dtype not in TYPES:
        return False
    per_word = WORD_BYTES // q_SHD.element_size()
    return q_SHD.shape[-1] in (16, 32, 64, 128) and num_angles % per_word == 0


def pack_heads(
    q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, norm: HeadNorm, rows_nB: Tensor, sizes_n: Tensor
) -> tuple[tuple[Tensor, Tensor], ...]:
    """`pack_tiles` of q, k and v, the former two normalised and rotated on the way.

    Args:
        q_SHD, k_SHD, v_SHD: (S, H, D) as projected, one dtype; the places of a tile are a multiple of 32.
        norm: weights of the dtype of q, angles whose number fills whole words of 16 bytes.

    Returns:
        As `pack_tiles` for each of the three, but that places past a tile's size are 0; the means are those of the
        rows as rounded.
    """
    S, H, D = q_SHD.shape
    n, B = rows_nB.shape
    _check_map(rows_nB, sizes_n)
    sources = [_in_words(x) for x in (q_SHD, k_SHD, v_SHD)]
    if len({x.stride() for x in sources}) > 1:
        sources = [x.contiguous() for x in sources]
    weights = [norm.q_weight_D.contiguous(), norm.k_weight_D.contiguous()]
    assert B % 32 == 0
    assert all(x.dtype == q_SHD.dtype for x in (*sources, *weights))
    assert all(x.dtype == torch.float32 and x.is_contiguous() and len(x) == S for x in (norm.cos_SR, norm.sin_SR))
    packed = [q_SHD.new_empty(H, n, B, D) for _ in sources]
    means = [q_SHD.new_empty(H, n, D, dtype=torch.float32) for _ in sources]
    per_word = WORD_BYTES // q_SHD.element_size()
    row_stride, head_stride = (stride // per_word for stride in sources[0].stride()[:2])
    _head_passes(q_SHD.dtype, D // per_word, norm.cos_SR.shape[-1] // per_word, B, q_SHD.device).launch(
        "pack_heads",
        [
            *(pointer(x) for x in (*sources, *packed, *means, *weights, norm.cos_SR, norm.sin_SR, rows_nB, sizes_n)),
            ctypes.c_int(H),
            ctypes.c_longlong(row_stride),
            ctypes.c_int(head_stride),
            ctypes.c_float(norm.eps),
        ],
        blocks=(n, -(-H // HEADS), len(sources)),
        threads=THREADS,
    )
    return tuple(zip(packed, means, strict=True))


def unpack_tiles(
    fine_HnBD: Tensor,
    coarse_HnD: Tensor | None,
    gate_SHD: Tensor | None,
    rows_nB: Tensor,
    sizes_n: Tensor,
    S: int,
    *,
    out_NHD: Tensor | None = None,
    places_S: Tensor | None = None,
) -> Tensor:
    """fine + coarse * gate in packed rows, or in the places that they are given; fine alone without a gate.

    Args:
        fine_HnBD: (H, n, B, D) bf16, fp16 or fp32, contiguous. D is a power of two from 16 to 128.
        coarse_HnD: (H, n, D) fp32, contiguous.
        gate_SHD: (S, H, D), the dtype of `fine_HnBD`; rows and heads may lie apart.
        rows_nB, sizes_n: as in `pack_tiles`. A row that lies in no valid place, but in one past a size, becomes 0.
        out_NHD: written instead of a new tensor, contiguous, the dtype of `fine_HnBD`; rows that get none stay.
        places_S: (S,) int64, the row of the result that each packed row goes to.

    Returns:
        (S, H, D), the dtype of `fine_HnBD`, or `out_NHD`.
    """
    H, n, B, D = fine_HnBD.shape
    assert fine_HnBD.is_contiguous()
    assert (coarse_HnD is None) == (gate_SHD is None)
    _check_map(rows_nB, sizes_n)
    strides = (ctypes.c_longlong(0), ctypes.c_longlong(0))
    if coarse_HnD is not None and gate_SHD is not None:
        assert coarse_HnD.is_contiguous()
        assert gate_SHD.dtype == fine_HnBD.dtype
        gate_SHD = _in_words(gate_SHD)
        strides = _strides(gate_SHD)
    if out_NHD is None:
        out_NHD = fine_HnBD.new_empty(S, H, D)
    assert out_NHD.is_contiguous()
    assert out_NHD.data_ptr() % WORD_BYTES == 0
    assert (out_NHD.dtype, out_NHD.shape[1:]) == (fine_HnBD.dtype, (H, D))
    assert len(out_NHD) >= S
    assert places_S is None or (places_S.dtype == torch.int64 and places_S.is_contiguous() and len(places_S) == S)
    _passes(fine_HnBD.dtype, fine_HnBD.device).launch(
        "unpack",
        [
            *(pointer(x) for x in (fine_HnBD, coarse_HnD, gate_SHD, out_NHD, places_S, rows_nB, sizes_n)),
            ctypes.c_int(B),
            ctypes.c_int(D * fine_HnBD.element_size() // WORD_BYTES),
            *strides,
        ],
        blocks=(n, H),
        threads=THREADS,
    )
    return out_NHD


def choose_tiles(scores_Hnn: Tensor, P: int, k: int) -> Tensor:
    """For every video tile the k video tiles of the largest scores; of equal scores the lower tile wins.

    No sort: a score that k others reach is found bit by bit, by counting.

    Args:
        scores_Hnn: (H, n, n) fp32, rows contiguous. NaN ranks with minus infinity.
        k: 1..V.

    Returns:
        (H, V, k) int32 tiles in P..n-1, ascending.

    Raises:
        ValueError: there are more than 4,096 video tiles.
    """
    H, n, _ = scores_Hnn.shape
    V = n - P
    if COLUMNS[-1] < V:
        raise ValueError(f"the choice of tiles takes up to {COLUMNS[-1]} video tiles, got {V}")
    assert scores_Hnn.dtype == torch.float32
    assert scores_Hnn.stride(-1) == 1
    assert 1 <= k <= V
    lists_HVk = torch.empty(H, V, k, dtype=torch.int32, device=scores_Hnn.device)
    _choice(scores_Hnn.device).launch(
        f"choose_{next(columns for columns in COLUMNS if columns >= V)}",
        [
            pointer(scores_Hnn),
            pointer(lists_HVk),
            ctypes.c_longlong(scores_Hnn.stride(0)),
            ctypes.c_longlong(scores_Hnn.stride(1)),
            ctypes.c_int(P),
            ctypes.c_int(V),
            ctypes.c_int(k),
        ],
        blocks=(-(-V // WARPS), H),
        threads=THREADS,
    )
    return lists_HVk


def _in_words(x_SHD: Tensor) -> Tensor:
    """`x_SHD`, copied if its rows of one head are not whole words in a row."""
    per_word = WORD_BYTES // x_SHD.element_size()
    whole = x_SHD.stride(2) == 1 and x_SHD.stride(0) % per_word == 0 and x_SHD.stride(1) % per_word == 0
    return x_SHD if whole and x_SHD.data_ptr() % WORD_BYTES == 0 else x_SHD.contiguous().clone()


def _strides(x_SHD: Tensor) -> tuple[ctypes.c_longlong, ctypes.c_longlong]:
    """Of rows and heads, in words."""
    per_word = WORD_BYTES // x_SHD.element_size()
    return ctypes.c_longlong(x_SHD.stride(0) // per_word), ctypes.c_longlong(x_SHD.stride(1) // per_word)


def _check_map(rows_nB: Tensor, sizes_n: Tensor) -> None:
    assert rows_nB.dtype == sizes_n.dtype == torch.int64
    assert rows_nB.is_contiguous()
    assert sizes_n.is_contiguous()


@cache
def _passes(dtype: torch.dtype, device: torch.device) -> Module:
    return Module(
        _SOURCES / "tile_passes.cu", device, macros=[f"TYPE={TYPES[dtype]}"], preludes=[_SOURCES / "words.cuh"]
    )


@cache
def _head_passes(dtype: torch.dtype, lanes: int, rotary: int, places: int, device: torch.device) -> Module:
    macros = [f"TYPE={TYPES[dtype]}", f"LANES={lanes}", f"ROTARY={rotary}", f"HEADS={HEADS}", f"PLACES={places}"]
    return Module(_SOURCES / "tile_passes.cu", device, macros=macros, preludes=[_SOURCES / "words.cuh"])


@cache
def _choice(device: torch.device) -> Module:
    return Module(_SOURCES / "choose_tiles.cu", device)
