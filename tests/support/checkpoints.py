"""Tiny checkpoints for tests: written whole, copied, and damaged on purpose."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor


def tiny_checkpoint(tmp: Path, *, profile: str = "demo", seed: int = 0) -> Path:
    """A complete tiny checkpoint in a new folder below `tmp`, in a tenth of a second."""
    path = tmp / f"tiny-{profile}-{seed}"
    write_tiny_checkpoint(path, seed=seed, profile=profile)
    return path


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(source, target))


def make_unreadable(path: Path) -> None:
    """Have the system answer EIO to whoever reads the file `path`, from where it is moved away."""
    path.rename(path.with_name(f"{path.name}.kept"))
    # its first page is nobody's
    path.symlink_to("/proc/self/mem")


def make_readable(path: Path) -> None:
    """Undo `make_unreadable`."""
    path.with_name(f"{path.name}.kept").rename(path)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    value = json.loads(path.read_text(encoding="utf-8"))
    for key, change in changes.items():
        if change is None:
            value.pop(key, None)
        else:
            value[key] = change
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite one safetensors file after `change` was applied to its tensors; the index is left as it is."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a safetensors file and leave its data as they are."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
