"""Norms, the gated activation and rows in 8 bits in CUDA C++: one pass over rows, sums in fp32, rounded once.

`norm.py`, `swiglu.py` and `scaled_linear.py` have the formulas and the PyTorch references; the sources are
`row_passes.cu`, `gated_passes.cu` and `quantise_passes.cu`.
"""

import ctypes
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rushes_kernels.norm import Update
from rushes_kernels.nvrtc import Module, pointer

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

# as in the sources
THREADS, HEAD_THREADS = 256, 128
_WIDEST_GROUPS = 8 * 256
_BLOCKS_PER_MULTIPROCESSOR = 32
_SWIGLU_ROWS_PER_THREAD = 4
_QUANTISED_GROUPS_PER_THREAD = 16
_QUANTISING_BLOCKS = 8
"""For each multiprocessor, which holds as many threads."""

_SOURCES = Path(__file__).parent
_WORDS = _SOURCES / "words.cuh"
_TUNED = _SOURCES / "tuned.json"


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How `norm_rows` is compiled and launched."""

    warps: int
    """Of a block, which takes one row at a time."""
    min_threads: int
    """Threads that a multiprocessor must be able to hold: bounds the registers."""
    blocks: int
    """For each multiprocessor."""


def row_config(columns: int, dtype: torch.dtype, device: torch.device) -> RowConfig:
    """The configuration that `kernels/benchmarks/tune.py` found for this architecture and shape, else a rule."""
    major, minor = torch.cuda.get_device_capability(device)
    found = _tuned().get(f"{major}.{minor}", {}).get(tuned_key(columns, dtype))
    if found is not None:
        return RowConfig(**found)
    warps = -(-columns // (_group(dtype) * 256))
    return RowConfig(warps, 32 * warps, 16)


def tuned_key(columns: int, dtype: torch.dtype) -> str:
    return f"norm_rows {columns} {str(dtype).removeprefix('torch.')}"


@cache
def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(_TUNED.read_text())


def takes_rows(x_SC: Tensor) -> bool:
    """Whether `norm_rows` was written for rows of this dtype and width."""
    return (
        x_SC.dtype in TYPES
        and x_SC.shape[-1] % _group(x_SC.dtype) == 0
        and x_SC.shape[-1] <= _WIDEST_GROUPS * _group(x_SC.dtype)
    )


def takes_heads(x_BNHD: Tensor, num_angles: int) -> bool:
    """Whether `norm_rotate_heads` was written for heads of this dtype and width."""
    if x_BNHD.dtype not in TYPES:
        return False
    groups, rest = divmod(x_BNHD.shape[-1], _group(x_BNHD.dtype))
    return rest == 0 and groups in (1, 2, 4, 8, 16, 32) and num_angles % _group(x_BNHD.dtype) == 0


def takes_gated(x_S2F: Tensor) -> bool:
    """Whether `swiglu` was written for rows of this dtype and width."""
    return x_S2F.dtype in TYPES and x_S2F.shape[-1] % (2 * _group(x_S2F.dtype)) == 0


def takes_quantised(x_SC: Tensor) -> bool:
    """Whether `quantise_rows` was written for rows of this dtype and width, on this device."""
    groups, rest = divmod(x_SC.shape[-1], _group(x_SC.dtype))
    return (
        x_SC.dtype in TYPES
        and rest == 0
        and 0 < groups <= THREADS * _QUANTISED_GROUPS_PER_THREAD
        and x_SC.is_contiguous()
        and x_SC.data_ptr() % 16 == 0
        # below it nothing converts to e4m3
        and torch.cuda.get_device_capability(x_SC.device) >= (8, 9)
    )


def norm_rows(
    x_SC: Tensor,
    weight_C: Tensor,
    eps: float,
    update: Update | None,
    scale_MC: Tensor | None,
    shift_MC: Tensor | None,
    tags_S: Tensor | None,
    centred: bool,
    dtype: torch.dtype,
    config: RowConfig | None = None,
) -> Tensor:
    """`norm.norm_rows_`; rows and vectors start at multiples of 16 bytes."""
    C = x_SC.shape[-1]
    rows, gate_MC = (update.rows_SC, update.gate_MC) if update else (None, None)
    tables = [x for x in (gate_MC, scale_MC, shift_MC) if x is not None]
    assert scale_MC is None or shift_MC is None or scale_MC.stride() == shift_MC.stride()
    assert all(x.dtype == weight_C.dtype and x.stride(-1) == 1 for x in (weight_C, *tables))
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (x_SC, rows) if x is not None)
    assert all(x.data_ptr() % 16 == 0 for x in (weight_C, *tables))
    assert rows is None or rows.shape == x_SC.shape
    assert tags_S is None or (tags_S.dtype == torch.uint8 and tags_S.is_contiguous())
    y_SC = torch.empty(x_SC.shape, dtype=dtype, device=x_SC.device)
    num_rows = x_SC.numel() // C
    if not num_rows:
        return y_SC
    chosen = config or _row_config(C, x_SC.dtype, x_SC.device)
    update_dtype = x_SC.dtype if rows is None else rows.dtype
    module = _norm_module(chosen, C, x_SC.dtype, update_dtype, weight_C.dtype, dtype, x_SC.device)
    module.launch(
        "norm_rows",
        [
            *(pointer(x) for x in (x_SC, rows, gate_MC, weight_C, scale_MC, shift_MC, tags_S, y_SC)),
            ctypes.c_int(num_rows),
            ctypes.c_longlong(0 if gate_MC is None else gate_MC.stride(0)),
            ctypes.c_longlong(next((x.stride(0) for x in (scale_MC, shift_MC) if x is not None), 0)),
            ctypes.c_float(eps),
            ctypes.c_int(centred),
        ],
        blocks=min(num_rows, _multiprocessors(x_SC.device) * chosen.blocks),
        threads=32 * chosen.warps,
    )
    return y_SC


def norm_rotate_heads(x_BNHD: Tensor, num_heads: int, cos_NR: Tensor, sin_NR: Tensor, eps: float) -> None:
    """`norm.norm_rotate_heads_`."""
    B, N, H, D = x_BNHD.shape
    group = _group(x_BNHD.dtype)
    assert x_BNHD.is_contiguous()
    assert x_BNHD.data_ptr() % 16 == 0
    assert 1 <= num_heads <= H
    assert all(x.dtype == torch.float32 and x.is_contiguous() and len(x) == N for x in (cos_NR, sin_NR))
    if not B * N:
        return
    _gated_module(x_BNHD.dtype, x_BNHD.device).launch(
        "norm_rotate_heads",
        [
            *(pointer(x) for x in (x_BNHD, cos_NR, sin_NR)),
            ctypes.c_longlong(B * N),
            ctypes.c_int(num_heads),
            ctypes.c_int(D // group),
            ctypes.c_longlong(H * D // group),
            ctypes.c_int(N),
            ctypes.c_int(cos_NR.shape[-1] // group),
            ctypes.c_float(eps),
        ],
        blocks=min(B * N, _multiprocessors(x_BNHD.device) * _BLOCKS_PER_MULTIPROCESSOR),
        threads=HEAD_THREADS,
    )


def swiglu(x_S2F: Tensor) -> Tensor:
    """`swiglu.swiglu`."""
    width = x_S2F.shape[-1] // 2
    x_S2F = x_S2F.contiguous()
    assert x_S2F.data_ptr() % 16 == 0
    out_SF = torch.empty(*x_S2F.shape[:-1], width, dtype=x_S2F.dtype, device=x_S2F.device)
    num_rows, groups = out_SF.numel() // width, width // _group(x_S2F.dtype)
    if num_rows:
        _gated_module(x_S2F.dtype, x_S2F.device).launch(
            "swiglu",
            [pointer(x_S2F), pointer(out_SF), ctypes.c_longlong(num_rows), ctypes.c_int(groups)],
            blocks=(-(-groups // THREADS), min(-(-num_rows // _SWIGLU_ROWS_PER_THREAD), 65_535)),
            threads=THREADS,
        )
    return out_SF


def quantise_rows(x_SC: Tensor) -> tuple[Tensor, Tensor]:
    """`scaled_linear.quantise_rows`: values and scales."""
    S, C = x_SC.shape
    values_SC = torch.empty(S, C, dtype=torch.float8_e4m3fn, device=x_SC.device)
    scales_S = torch.empty(S, dtype=torch.float32, device=x_SC.device)
    if S:
        _quantising_module(C, x_SC.dtype, x_SC.device).launch(
            "quantise_rows",
            [pointer(x_SC), pointer(values_SC), pointer(scales_S), ctypes.c_int(S)],
            blocks=min(S, _multiprocessors(x_SC.device) * _QUANTISING_BLOCKS),
            threads=THREADS,
        )
    return values_SC, scales_S


def _group(dtype: torch.dtype) -> int:
    """Elements that a thread takes at a time."""
    return 4 if dtype == torch.float32 else 8


_row_config = cache(row_config)


@cache
def _norm_module(
    config: RowConfig,
    columns: int,
    residual: torch.dtype,
    update: torch.dtype,
    vectors: torch.dtype,
    result: torch.dtype,
    device: torch.device,
) -> Module:
    types = zip("XUVY", (residual, update, vectors, result), strict=True)
    macros = [
        f"COLUMNS={columns}",
        f"WARPS={config.warps}",
        f"MIN_THREADS={config.min_threads}",
        *(f"{name}={TYPES[dtype]}" for name, dtype in types),
    ]
    return Module(_SOURCES / "row_passes.cu", device, macros=macros, preludes=[_WORDS])


@cache
def _gated_module(dtype: torch.dtype, device: torch.device) -> Module:
    return Module(_SOURCES / "gated_passes.cu", device, macros=[f"TYPE={TYPES[dtype]}"], preludes=[_WORDS])


@cache
def _quantising_module(columns: int, dtype: torch.dtype, device: torch.device) -> Module:
    macros = [f"COLUMNS={columns}", f"X={TYPES[dtype]}"]
    return Module(_SOURCES / "quantise_passes.cu", device, macros=macros, preludes=[_WORDS])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
