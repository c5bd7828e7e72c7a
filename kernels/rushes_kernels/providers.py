"""Which implementation computes the fine branch of video sparse attention: decided by rule, never by what failed."""

import importlib.util
import os
import shutil
import sysconfig
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch


class Provider(StrEnum):
    HOPPER = "hopper"
    """CUDA C++ for compute capability 9.0, compiled at first use."""
    TRITON = "triton"
    """Triton, for any other CUDA device and for shapes that the former does not take."""
    TORCH = "torch"
    """Plain PyTorch, everywhere."""


def choose_provider(
    device: torch.device | str,
    *,
    dtype: torch.dtype,
    head_dim: int,
    tile_rows: int = 64,
    wanted: Provider | str | None = None,
) -> Provider:
    """The provider for these inputs: `wanted` if it is given and can serve, otherwise by a fixed rule.

    Rule: the CPU computes in PyTorch; a device of capability 9.0 takes HOPPER where dtype, head dimension and tile fit
    it; other CUDA inputs take TRITON where they fit that, and PyTorch where they do not.

    Raises:
        ValueError: `wanted` is no provider or cannot serve these inputs, or the rule asks for Triton and it is missing.
    """
    device = torch.device(device)
    hurdles = {
        Provider.HOPPER: _hopper_hurdle(device, dtype, head_dim, tile_rows),
        Provider.TRITON: _triton_hurdle(device, dtype, head_dim, tile_rows),
        Provider.TORCH: None,
    }
    if wanted is not None:
        try:
            wanted = Provider(wanted)
        except ValueError:
            raise ValueError(f"provider {wanted!r} is not one of {', '.join(Provider)}") from None
        if hurdle := hurdles[wanted] or (_missing_triton() if wanted is Provider.TRITON else None):
            raise ValueError(f"provider {wanted} cannot serve: {hurdle}")
        return wanted

    provider = next(provider for provider in Provider if hurdles[provider] is None)
    if provider is Provider.TRITON and (hurdle := _missing_triton()):
        raise ValueError(f"provider {provider} cannot serve: {hurdle}; install it or ask for {Provider.TORCH}")
    return provider


def _hopper_hurdle(device: torch.device, dtype: torch.dtype, head_dim: int, tile_rows: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs compute capability 9.0, got {capability[0]}.{capability[1]}"
    if (dtype, head_dim, tile_rows) != (torch.bfloat16, 128, 64):
        return f"it takes bf16, head dimension 128 and tiles of 64 rows, got {dtype}, {head_dim} and {tile_rows}"
    return None


def _triton_hurdle(device: torch.device, dtype: torch.dtype, head_dim: int, tile_rows: int) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bf16, fp16 and fp32, got {dtype}"
    if head_dim not in (16, 32, 64, 128) or tile_rows not in (16, 32, 64, 128):
        return f"head dimension and tile rows must be 16, 32, 64 or 128, got {head_dim} and {tile_rows}"
    return None


@cache
def can_build_triton() -> bool:
    """Whether Triton is here and what it builds its launchers with: a C compiler, Python's headers and a cache."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return _missing_triton() is None and compiler is not None and headers.exists() and os.access(there, os.W_OK)


def _missing_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"
