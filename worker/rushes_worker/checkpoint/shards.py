"""The safetensors files of one component: what they hold, read from their headers alone.

A header is small and stands first in the file, so 148 GB are checked in the time it takes to read a few megabytes, and
nothing is loaded before everything is known to be there.
"""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Self

from rushes_core.contract import is_integer
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_core.json_file import parse_json_object, read_json_object
from rushes_core.read_fault import read_fault

from rushes_worker.checkpoint.manifest import Manifest

MAX_HEADER_BYTES = 100 << 20
"""The bound that the safetensors format itself sets."""
MAX_NAMED = 8
"""Tensors of one kind of fault that are named; the rest is counted."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.safetensors")
_INDEX_SUFFIX = ".safetensors.index.json"
_UNFINISHED = ".aria2"
"""What aria2 keeps beside a file that has its full size from the start, until it has all of its bytes."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """By which a file that was written to, or that another one took the place of, is told from what it was."""

    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it."""

    path: Path
    stamp: Stamp
    """Of the file, when its header was read."""
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    """In the file, of its first byte."""


@dataclass(slots=True)
class Shards:
    """What was found in a component's folder."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    """Tensors that the index places in a file that is missing or unreadable, by name, with the file's name."""
    partial: bool = False
    """Whether files were unreadable of which no index says what they held."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the header is not one, describes data outside the file, or leaves bytes of it undescribed.
        CheckpointUnreadable: the file system failed.
    """
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(file.fileno())
            size = stamp.num_bytes
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: cut short: {size} bytes, not even a header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: not a safetensors file: header of {length} bytes")
            if 8 + length > size:
                raise CheckpointError(f"{path}: cut short: header of {length} bytes in a file of {size}")
            header = file.read(length)
    except OSError as error:
        raise read_fault(path, error) from error
    entries = parse_json_object(header, f"{path} (header)")
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        begin, end = _add(tensors, path, stamp, name, entry, data_at=8 + length)
        spans.append((begin, end, name))
    _check_spans(path, sorted(spans), size - 8 - length)
    return tensors


def _add(
    tensors: dict[str, StoredTensor], path: Path, stamp: Stamp, name: str, entry: object, *, data_at: int
) -> tuple[int, int]:
    where = f"{path}: header of tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {entry!r:.100}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r:.50}")
    if not isinstance(shape, list) or not all(is_integer(extent) and 0 <= extent < 1 << 48 for extent in shape):
        raise CheckpointError(f"{where}: shape {shape!r:.100} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_integer, offsets)):
        raise CheckpointError(f"{where}: data_offsets {offsets!r:.100} is not a pair of positions")
    begin, end = offsets
    num_bytes = prod(shape) * DTYPE_BITS[dtype] // 8
    if begin < 0 or end - begin != num_bytes:
        raise CheckpointError(f"{where}: data_offsets {offsets} do not span the {num_bytes} bytes of {dtype} {shape}")
    tensors[name] = StoredTensor(path, stamp, dtype, tuple(shape), num_bytes, data_at + begin)
    return begin, end


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    missing = max((end for _, end, _ in spans), default=0) - available
    if missing > 0:
        name = next(name for _, end, name in spans if end > available)
        raise CheckpointError(f"{path}: cut short: {missing} bytes are missing, tensor {name!r} is not whole")
    position = 0
    for begin, end, name in spans:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else f"leaves {begin - position} bytes unused"
            raise CheckpointError(f"{path}: tensor {name!r} at byte {begin} {kind}")
        position = end
    if position != available:
        raise CheckpointError(f"{path}: {available - position} bytes after the last tensor")


def scan_shards(folder: Path) -> Shards:
    """Read the headers and the index of `folder` and compare one with the other.

    Raises:
        CheckpointUnreadable: the file system failed.
    """
    shards = Shards()
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        fault = read_fault(folder, error)
        if isinstance(fault, CheckpointUnreadable):
            raise fault from error
        shards.problems.append(str(fault))
        return shards
    files = {path.name: path for path in entries if path.name.endswith(".safetensors")}
    shards.files = list(files.values())
    indexes = [path for path in entries if path.name.endswith(_INDEX_SUFFIX)]
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, path in files.items():
        try:
            headers[name] = read_header(path)
        except CheckpointError as error:
            shards.problems.append(str(error))
    if len(indexes) > 1:
        shards.problems.append(f"{folder}: several indexes: {', '.join(path.name for path in indexes)}; expected one")
    if indexes:
        _apply_index(shards, indexes[0], files, headers)
    else:
        _apply_single(shards, folder, files, headers)
    for path in entries:
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf"):
            shards.problems.append(f"{path}: weights in another format beside safetensors; only safetensors are served")
        if path.suffix == _UNFINISHED and path.stem in files:
            shards.problems.append(f"{path}: the download of {path.stem} was not finished")
    return shards


def _apply_single(
    shards: Shards, folder: Path, files: Mapping[str, Path], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> None:
    shards.partial = not files or len(headers) < len(files)
    if not files:
        shards.problems.append(f"{folder}: no safetensors file")
    elif len(files) > 1 or any(map(_PART.fullmatch, files)):
        shards.problems.append(f"{folder}: several files without an index: {_named(list(files))}")
    for header in headers.values():
        shards.tensors |= header


def _apply_index(
    shards: Shards, index: Path, files: Mapping[str, Path], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> None:
    try:
        weight_map = _weight_map(index)
    except CheckpointError as error:
        shards.problems.append(str(error))
        for header in headers.values():
            shards.tensors |= header
        return
    placed: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        placed.setdefault(name, set()).add(tensor)
    _check_series(shards, index, placed)
    for name, names in sorted(placed.items()):
        if name not in headers:
            shards.lost |= dict.fromkeys(names, name)
            if name not in files:
                held = f"{len(names)} tensors, among them {min(names)!r}"
                shards.problems.append(f"{index.parent / name}: missing shard, named by {index.name} for {held}")
            continue
        absent = names - headers[name].keys()
        if absent:
            shards.lost |= dict.fromkeys(absent, name)
            shards.problems.append(f"{index.parent / name}: lacks {_named(absent)}, placed there by {index.name}")
        shards.tensors |= {tensor: headers[name][tensor] for tensor in names - absent}
    for name, header in headers.items():
        if name not in placed:
            shards.problems.append(
                f"{index.parent / name}: not named by {index.name}: a stale file or a second set of weights "
                f"({len(header)} tensors)"
            )
            continue
        extra = header.keys() - placed[name]
        elsewhere = {tensor for tensor in extra if tensor in weight_map}
        if elsewhere:
            other = weight_map[min(elsewhere)]
            shards.problems.append(
                f"{index.parent / name}: holds {_named(elsewhere)} a second time; {index.name} places it in {other}"
            )
        if extra - elsewhere:
            unnamed = _named(extra - elsewhere)
            shards.problems.append(f"{index.parent / name}: holds {unnamed}, which {index.name} does not name")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty, expected tensor names and their files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise CheckpointError(f"{index}: places {tensor!r} in {name!r:.100}, expected a safetensors file beside it")
    return weight_map


def _check_series(shards: Shards, index: Path, placed: Mapping[str, set[str]]) -> None:
    """Shards named part-of-count belong to one series that is complete."""
    parts = [match for name in placed if (match := _PART.fullmatch(name))]
    if not parts:
        return
    series = {(part["stem"], int(part["count"])) for part in parts}
    if len(series) > 1 or len(parts) != len(placed):
        shards.problems.append(f"{index}: mixes several sets of shards: {_named(placed)}")
        return
    ((stem, count),) = series
    unnamed = sorted(set(range(1, count + 1)) - {int(part["part"]) for part in parts})
    if unnamed or len(parts) > count:
        names = [f"{stem}-{part:05}-of-{count:05}.safetensors" for part in unnamed]
        shards.problems.append(f"{index}: names {len(parts)} of {count} shards; nothing is placed in {_named(names)}")


def compare(folder: Path, shards: Shards, manifest: Manifest) -> list[str]:
    """What differs between the tensors of a component and those that its configuration asks for."""
    problems: list[str] = []
    missing = manifest.keys() - shards.tensors.keys() - shards.lost.keys()
    if missing and not shards.partial:
        gates = [name for name in missing if name.endswith(".to_gate_compress.weight")]
        hint = ": a student's sparse-attention gates" if len(gates) == len(missing) else ""
        problems.append(f"{folder}: missing tensors: {_named(missing)}{hint}")
    for stored, names in _by_file(shards, shards.tensors.keys() - manifest.keys()).items():
        problems.append(f"{stored}: surplus tensors: {_named(names)}; the configuration asks for none of this name")
    wrong: list[str] = []
    for name, spec in manifest.items():
        stored = shards.tensors.get(name)
        if stored is not None and stored.shape != spec.shape:
            wrong.append(f"{stored.path}: {name} has shape {list(stored.shape)}, expected {list(spec.shape)}")
        elif stored is not None and stored.dtype != spec.dtype:
            wrong.append(f"{stored.path}: {name} is {stored.dtype}, expected {spec.dtype}")
    if len(wrong) > MAX_NAMED:
        wrong = [*wrong[:MAX_NAMED], f"{folder}: {len(wrong) - MAX_NAMED} more tensors of wrong shape or dtype"]
    return problems + wrong


def _by_file(shards: Shards, names: set[str]) -> dict[Path, list[str]]:
    grouped: dict[Path, list[str]] = {}
    for name in sorted(names):
        grouped.setdefault(shards.tensors[name].path, []).append(name)
    return grouped


def _named(names: "set[str] | list[str] | Mapping[str, object]") -> str:
    """Some of the names and the number of the others."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:MAX_NAMED])
    return shown if len(ordered) <= MAX_NAMED else f"{shown} and {len(ordered) - MAX_NAMED} more"
