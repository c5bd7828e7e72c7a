"""Block-sparse attention in CUDA C++ for compute capability 9.0; the kernels and their lists are in the .cu beside.

Shapes: H heads, n tiles, P of them prefix, V = n - P; L entries of a list. A unit is GROUP neighbouring query tiles of
one head; the prefix is cut into units by itself.
"""

import ctypes
import heapq
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.nvrtc import Module, TensorMap, pointer

# as in the source
ROWS, DIM, GROUP, STAGES, BARRIERS = 64, 128, 3, 6, 32
MAX_TILES = 4096
MACROS = (f"DIM={DIM}", "TYPE=0", f"TILE_ROWS={ROWS}")
MERGE_THREADS = 256
TERMINATORS = 2
_SHARED_MEMORY = STAGES * 2 * ROWS * DIM * 2 + 8 * (BARRIERS + STAGES) + 1024
_UNIT_OVERHEAD = 3
"""Start and end of a unit, in tiles."""


def attend(
    q_HnBD: Tensor, k_HnBD: Tensor, v_HnBD: Tensor, lists_HVL: Tensor, counts_HV: Tensor, sizes_n: Tensor, P: int
) -> Tensor:
    """As `block_sparse_attention`, which has checked shapes and layouts.

    Raises:
        ValueError: dtype, tile, head dimension or the number of tiles is not what the kernel was written for.
    """
    H, n, B, D = q_HnBD.shape
    if (q_HnBD.dtype, B, D) != (torch.bfloat16, ROWS, DIM) or n > MAX_TILES:
        raise ValueError(
            f"the Hopper kernel takes bf16, tiles of {ROWS} rows, head dimension {DIM} and up to {MAX_TILES} tiles, "
            f"got {q_HnBD.dtype}, {B}, {D} and {n}"
        )
    if any(x.data_ptr() % 16 for x in (q_HnBD, k_HnBD, v_HnBD)):
        raise ValueError("q, k and v must start at multiples of 16 bytes")
    device = q_HnBD.device
    L = lists_HVL.shape[-1]
    prefix_groups, video_groups = _num_groups(n, P)
    num_lists = 1 + H * video_groups
    longest = min(n, P + L)
    shared_stride = min(n, P + GROUP * L)
    # own tiles, and others touched at least every BARRIERS - STAGES entries and at the end
    own_stride = min(n, longest + shared_stride // (BARRIERS - STAGES) + 1) + TERMINATORS
    shared = torch.empty(n + num_lists * shared_stride, dtype=torch.int32, device=device)
    own = torch.empty(GROUP * (n + TERMINATORS + num_lists * own_stride), dtype=torch.int32, device=device)
    lengths = torch.empty(num_lists, 1 + GROUP, dtype=torch.int32, device=device)
    plan = _Plan(
        *(x.data_ptr() for x in (shared, own, lengths)), n, P, prefix_groups, video_groups, shared_stride, own_stride
    )
    module = _module(device)
    module.launch(
        "merge_lists",
        [pointer(lists_HVL), pointer(counts_HV), pointer(sizes_n), ctypes.c_int(L), plan],
        blocks=num_lists,
        threads=MERGE_THREADS,
        shared_memory=8 * n,
    )

    units = schedule(H, n, P, L, device)
    out_HnBD = torch.empty_like(q_HnBD)
    log2_scale = ctypes.c_float(DIM**-0.5 * math.log2(math.e))
    maps = [TensorMap.of(x) for x in (k_HnBD, v_HnBD)]
    module.launch(
        "attend",
        [
            *maps,
            *(pointer(x) for x in (q_HnBD, out_HnBD, sizes_n, units)),
            ctypes.c_int(units.shape[1]),
            log2_scale,
            plan,
        ],
        blocks=units.shape[0],
        threads=128 * (1 + GROUP),
        shared_memory=_SHARED_MEMORY,
    )
    return out_HnBD


class _Plan(ctypes.Structure):
    _fields_ = [
        ("shared", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int),
        ("num_prefix_tiles", ctypes.c_int),
        ("prefix_groups", ctypes.c_int),
        ("video_groups", ctypes.c_int),
        ("shared_stride", ctypes.c_int),
        ("own_stride", ctypes.c_int),
    ]


@cache
def _module(device: torch.device) -> Module:
    return Module(
        Path(__file__).with_suffix(".cu"),
        device,
        macros=MACROS,
        preludes=[Path(__file__).with_name(name) for name in ("hopper.cuh", "hopper_attention.cuh")],
        one_generation=True,
    )


def _num_groups(n: int, P: int) -> tuple[int, int]:
    """Units of a head: of prefix and of video tiles."""
    return math.ceil(P / GROUP), math.ceil((n - P) / GROUP)


@cache
def schedule(heads: int, n: int, P: int, L: int, device: torch.device) -> Tensor:
    """(blocks, units of a block) int32 for n tiles, P of them prefix, and lists of L: head * groups + group, -1 past
    the end.

    Long units first, then head by head, so that all blocks read the keys of one head at a time; each to the block that
    is free first.
    """
    prefix_groups, video_groups = _num_groups(n, P)
    prefix_cost, video_cost = n, min(n, P + L)
    groups = prefix_groups + video_groups
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    long = [(head * groups + group, prefix_cost) for head in range(heads) for group in range(prefix_groups)]
    short = [(head * groups + group, video_cost) for head in range(heads) for group in range(prefix_groups, groups)]
    free = [(0, block) for block in range(blocks)]
    assigned: list[list[int]] = [[] for _ in range(blocks)]
    for unit, cost in long + short:
        time, block = free[0]
        assigned[block].append(unit)
        heapq.heapreplace(free, (time + cost + _UNIT_OVERHEAD, block))
    most = max(map(len, assigned))
    rows = [units + [-1] * (most - len(units)) for units in assigned]
    return torch.tensor(rows, dtype=torch.int32, device=device)
