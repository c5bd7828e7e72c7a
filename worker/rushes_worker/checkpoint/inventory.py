"""SHA-256 inventories of a checkpoint directory: written once where it is known good, compared everywhere else.

An inventory is a JSON object: `format` (`rushes-inventory-v1`), `revision` (the repository revision, or null),
`file_count`, `files` (a list of `path`, `size`, `sha256`, sorted by path) and `aggregate_sha256`, the SHA-256 of the
lines `<sha256>  <path>` in that order. It covers every file of the directory but itself and download caches.

The inventory that a FastH3 export ships, checkpoint_content.json, has `aggregate_sha256`, `file_count` and `files`
too, but covers what was trained (the transformer) and not the components taken over from the base model.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rushes_core.contract import CONTRACT_FILE, is_integer, refuse_directory
from rushes_core.errors import CheckpointError
from rushes_core.json_file import read_json_object

INVENTORY_FILE = "rushes_inventory.json"
CONTENT_FILE = "checkpoint_content.json"
INVENTORY_FORMAT = "rushes-inventory-v1"

_CHUNK_BYTES = 8 << 20
_CACHE_FOLDERS = (".cache", ".git")
# bookkeeping of the training run that its inventory lists and its export leaves out
_NOT_EXPORTED = (".complete", "metadata.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[str, int, int], None]
"""Called with the file being read, the bytes read of all files, and the bytes to read in total."""


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    sha256: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    source: Path
    entries: tuple[Entry, ...]
    covers_all: bool
    """Whether a file that is not listed is surplus."""
    revision: str | None = None


@dataclass(slots=True)
class Verification:
    """The outcome of comparing a directory with an inventory."""

    inventory: Path
    problems: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0
    uncovered: list[str] = field(default_factory=list)
    """Files that a partial inventory says nothing about."""
    not_exported: list[str] = field(default_factory=list)
    revision: str | None = None


def create_inventory(
    directory: Path, *, revision: str | None = None, skip: Path | None = None, progress: Progress | None = None
) -> dict[str, object]:
    """Hash every file of `directory` except `skip`.

    Raises:
        CheckpointError: the directory or one of its files cannot be read.
    """
    paths = {name: path for name, path in _files(directory).items() if skip is None or not _same(path, skip)}
    sizes = {name: _size(path) for name, path in paths.items()}
    total, done = sum(sizes.values()), 0
    files: list[dict[str, object]] = []
    for name, path in paths.items():
        sha256 = _digest(path, name, done, total, progress)
        files.append({"path": name, "size": sizes[name], "sha256": sha256})
        done += sizes[name]
    return {
        "format": INVENTORY_FORMAT,
        "revision": revision,
        "file_count": len(files),
        "aggregate_sha256": aggregate((str(file["path"]), str(file["sha256"])) for file in files),
        "files": files,
    }


def write_inventory(inventory: Mapping[str, object], path: Path) -> None:
    """Write `inventory` to `path`, which is never seen half written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(inventory, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def aggregate(entries: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    """SHA-256 over the lines `<sha256>  <path>`, sorted by path."""
    lines = "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(entries))
    return hashlib.sha256(lines.encode()).hexdigest()


def find_inventory(directory: Path) -> Path:
    """The inventory inside `directory`: one of ours, or the one that the export ships."""
    refusal = refuse_directory(directory)
    if refusal is not None:
        raise CheckpointError(refusal)
    for name in (INVENTORY_FILE, CONTENT_FILE):
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory}: no {INVENTORY_FILE} and no {CONTENT_FILE}: nothing to verify against")


def read_inventory(path: Path) -> Inventory:
    """Read an inventory of either format.

    Raises:
        CheckpointError: it is not one, lists a path outside the directory, or disagrees with its own count or sum.
    """
    value = read_json_object(path)
    ours = value.get("format") == INVENTORY_FORMAT
    if "format" in value and not ours:
        raise CheckpointError(f"{path}: format is {value['format']!r}, expected {INVENTORY_FORMAT!r}")
    entries = tuple(_entry(path, name, entry) for name, entry in _listed(path, value.get("files")))
    names = [entry.path for entry in entries]
    if len(set(names)) < len(names):
        raise CheckpointError(f"{path}: lists {next(name for name in names if names.count(name) > 1)!r} twice")
    if value.get("file_count", len(entries)) != len(entries):
        raise CheckpointError(f"{path}: file_count is {value['file_count']!r}, but {len(entries)} files are listed")
    total = aggregate([(entry.path, entry.sha256) for entry in entries])
    if ours and value.get("aggregate_sha256") != total:
        raise CheckpointError(f"{path}: aggregate_sha256 is {value.get('aggregate_sha256')!r}, expected {total}")
    revision = value.get("revision")
    return Inventory(path, entries, covers_all=ours, revision=revision if isinstance(revision, str) else None)


def _listed(path: Path, files: Any) -> list[tuple[Any, Any]]:
    """`files` as (path, entry) pairs; a list of objects or an object keyed by path."""
    if isinstance(files, dict) and files:
        return list(files.items())
    if isinstance(files, list) and files and all(isinstance(entry, dict) for entry in files):
        return [(entry.get("path", entry.get("name")), entry) for entry in files]
    raise CheckpointError(f"{path}: files is missing or empty, expected the listed files")


def _entry(source: Path, name: Any, entry: Any) -> Entry:
    if not isinstance(name, str) or not _is_inside(name):
        raise CheckpointError(f"{source}: lists {name!r:.200}, expected a path inside the directory")
    sha256 = entry.get("sha256") if isinstance(entry, dict) else entry
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256.lower()):
        raise CheckpointError(f"{source}: sha256 of {name!r} is {sha256!r:.100}, expected 64 hexadecimal digits")
    size = None
    if isinstance(entry, dict):
        size = next((entry[key] for key in ("size", "bytes", "size_bytes") if key in entry), None)
    if size is not None and (not is_integer(size) or size < 0):
        raise CheckpointError(f"{source}: size of {name!r} is {size!r:.100}, expected a number of bytes")
    return Entry(name, sha256.lower(), size)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\\" not in name and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def verify(
    directory: Path, inventory: Inventory, *, revision: str | None = None, progress: Progress | None = None
) -> Verification:
    """Compare every listed file of `directory` by size and SHA-256, and its revision with the pinned one."""
    result = Verification(inventory.source, revision=revision)
    present = _files(directory)
    listed = {entry.path for entry in inventory.entries}
    surplus = [name for name, path in present.items() if name not in listed and not _same(path, inventory.source)]
    if inventory.covers_all:
        result.problems += [f"{name}: surplus, the inventory does not list it" for name in surplus]
    else:
        result.uncovered = surplus
    to_read: list[tuple[Entry, Path, int]] = []
    for entry in sorted(inventory.entries, key=lambda entry: entry.path):
        path = present.get(entry.path)
        if path is None and not inventory.covers_all and entry.path in _NOT_EXPORTED:
            result.not_exported.append(entry.path)
        elif path is None:
            result.problems.append(f"{entry.path}: missing")
        elif entry.size is not None and (size := _size(path)) != entry.size:
            kind = "truncated" if size < entry.size else "too long"
            result.problems.append(f"{entry.path}: {kind}, {size} bytes, expected {entry.size}")
        else:
            to_read.append((entry, path, _size(path)))
    total = sum(size for _, _, size in to_read)
    for entry, path, size in to_read:
        sha256 = _digest(path, entry.path, result.num_bytes, total, progress)
        if sha256 != entry.sha256:
            result.problems.append(f"{entry.path}: changed, SHA-256 {sha256}, expected {entry.sha256}")
        result.num_files += 1
        result.num_bytes += size
    if revision is not None:
        result.problems += _check_revision(directory, inventory, revision)
    return result


def _check_revision(directory: Path, inventory: Inventory, revision: str) -> list[str]:
    own, base = _own_revisions(directory, inventory), _base_revisions(directory)
    stated = own or base
    if not stated:
        return [f"{directory}: says nowhere which revision it is, expected {revision}"]
    return [f"{source}: revision {found}, expected {revision}" for source, found in stated if found != revision]


def _own_revisions(directory: Path, inventory: Inventory) -> list[tuple[str, str]]:
    """What the directory says about its own revision."""
    found: list[tuple[str, str]] = []
    if inventory.revision is not None:
        found.append((str(inventory.source), inventory.revision))
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots":
        found.append((str(resolved), resolved.name))
    provenance = _optional_object(directory / "provenance.json").get("revision")
    if isinstance(provenance, str):
        found.append((str(directory / "provenance.json"), provenance))
    for path in sorted((directory / ".cache" / "huggingface" / "download").rglob("*.metadata")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            found.append((str(path), lines[0].strip()))
    return found


def _base_revisions(directory: Path) -> list[tuple[str, str]]:
    """The revision of the base model, `hf://repository@revision`, where the export names it."""
    found: list[tuple[str, str]] = []
    for name, key in (("provenance.json", "base_model"), (CONTRACT_FILE, "base_model_revision")):
        value = _optional_object(directory / name).get(key)
        if isinstance(value, str) and "@" in value:
            found.append((f"{directory / name} ({key})", value.rpartition("@")[2]))
    return found


def _optional_object(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _files(directory: Path) -> dict[str, Path]:
    """Every file below `directory` by its path in it, through symbolic links, in order."""
    refusal = refuse_directory(directory)
    if refusal is not None:
        raise CheckpointError(refusal)
    found: dict[str, Path] = {}
    _collect(directory, "", (), found)
    return dict(sorted(found.items()))


def _collect(folder: Path, prefix: str, above: tuple[tuple[int, int], ...], found: dict[str, Path]) -> None:
    try:
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise CheckpointError(f"{folder}: symbolic link to a folder that contains it")
        for path in sorted(folder.iterdir()):
            name = f"{prefix}{path.name}"
            if path.is_dir():
                if prefix or path.name not in _CACHE_FOLDERS:
                    _collect(path, f"{name}/", (*above, here), found)
            elif path.is_file():
                found[name] = path
            else:
                raise CheckpointError(f"{path}: neither a file nor a folder, or a link that leads nowhere")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {getattr(error, 'strerror', None) or error}") from error


def _same(path: Path, other: Path) -> bool:
    return other.exists() and path.samefile(other)


def _size(path: Path) -> int:
    return path.stat().st_size


def _digest(path: Path, name: str, done: int, total: int, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(name, done, total)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest()
