"""`rushes checkpoint`: make a tiny checkpoint, say what a directory holds, compare it with an inventory."""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rushes_worker.checkpoint.directory import COMPONENTS, MAX_LISTED, Examination, examine
from rushes_worker.checkpoint.family import recognise
from rushes_worker.checkpoint.inventory import (
    create_inventory,
    find_inventory,
    read_inventory,
    verify,
    write_inventory,
)
from rushes_worker.checkpoint.tiny import PROFILES, write_tiny_checkpoint

from rushes_cli.main import UsageError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `checkpoint` with its actions; each sets `run`, which takes the arguments and returns the exit code."""
    parser = subparsers.add_parser("checkpoint", help="make, inspect and verify checkpoint directories")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    tiny = actions.add_parser("tiny", help="write a tiny random checkpoint in the published layout")
    tiny.add_argument("directory", type=Path, metavar="DIR")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    tiny.add_argument("--profile", choices=list(PROFILES), default="demo", help="sizes (default demo)")
    tiny.add_argument("--force", action="store_true", help="replace what DIR holds")
    tiny.set_defaults(run=_tiny)

    inspect = actions.add_parser("inspect", help="say what a directory holds and whether it would serve")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)

    check = actions.add_parser("verify", help="compare every file with a SHA-256 inventory")
    check.add_argument("directory", type=Path, metavar="DIR")
    source = check.add_mutually_exclusive_group()
    source.add_argument("--inventory", type=Path, metavar="FILE", help="default: the inventory in DIR")
    source.add_argument("--write", type=Path, metavar="FILE", help="write an inventory of DIR instead of verifying")
    check.add_argument("--revision", metavar="REV", help="the revision that DIR must be, or that --write records")
    check.set_defaults(run=_verify)


def _tiny(arguments: argparse.Namespace) -> int:
    try:
        write_tiny_checkpoint(
            arguments.directory, seed=arguments.seed, profile=arguments.profile, force=arguments.force
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    size = sum(path.stat().st_size for path in arguments.directory.rglob("*") if path.is_file())
    print(f"{arguments.directory}: tiny checkpoint, profile {arguments.profile}, {_bytes(size)}")
    return 0


@dataclass(frozen=True, slots=True)
class ComponentReport:
    """What one component's files hold."""

    files: int
    tensors: int
    parameters: int
    bytes: int
    used_bytes: int
    dtypes: dict[str, int]
    """Stored tensors by dtype."""


def _inspect(arguments: argparse.Namespace) -> int:
    found = examine(arguments.directory)
    kind = recognise(arguments.directory)
    components = {name: _component(found, name) for name in COMPONENTS if name in found.shards}
    print(_json(found, kind, components) if arguments.json else _text(found, kind, components))
    return 1 if found.problems else 0


def _component(found: Examination, name: str) -> ComponentReport:
    shards, manifest = found.shards[name], found.manifests.get(name, {})
    dtypes: dict[str, int] = {}
    for tensor in shards.tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    used = (tensor.num_bytes for key, tensor in shards.tensors.items() if key in manifest and manifest[key].used)
    return ComponentReport(
        files=len(shards.files),
        tensors=len(shards.tensors),
        parameters=sum(math.prod(tensor.shape) for tensor in shards.tensors.values()),
        bytes=sum(tensor.num_bytes for tensor in shards.tensors.values()),
        used_bytes=sum(used),
        dtypes=dict(sorted(dtypes.items())),
    )


def _json(found: Examination, kind: str, components: dict[str, ComponentReport]) -> str:
    report = {
        "path": str(found.path),
        "kind": kind,
        "serves": not found.problems,
        "contract": asdict(found.contract) if found.contract else None,
        "components": {name: asdict(component) for name, component in components.items()},
        "bytes": sum(component.bytes for component in components.values()),
        "used_bytes": sum(component.used_bytes for component in components.values()),
        "problems": found.problems,
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def _text(found: Examination, kind: str, components: dict[str, ComponentReport]) -> str:
    lines = [f"{found.path}: {kind}"]
    contract = found.contract
    if contract is not None:
        video, audio = contract.video_scheduler_shift, contract.audio_scheduler_shift
        lines += [
            f"  model      {contract.model_id}",
            f"  schedule   {' '.join(map(str, contract.dmd_denoising_steps))} ({contract.num_forwards} forwards)",
            f"  shifts     video {video:g}, audio {audio:g}",
            f"  attention  sparsity {contract.vsa_sparsity:g}, tiles of {contract.vsa_tile_size}",
        ]
    if components:
        header = ("component", "files", "tensors", "parameters", "bytes", "used", "dtypes")
        rows = [header, *(_row(name, component) for name, component in components.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), ""]
        total = sum(component.bytes for component in components.values())
        used = sum(component.used_bytes for component in components.values())
        lines.append(f"  text-to-video reads {_bytes(used)} of {_bytes(total)}")
    lines.append(f"  serves: {'no' if found.problems else 'yes'}")
    lines += [f"  - {problem}" for problem in found.problems[:MAX_LISTED]]
    if len(found.problems) > MAX_LISTED:
        lines.append(f"  and {len(found.problems) - MAX_LISTED} more")
    return "\n".join(lines)


def _row(name: str, component: ComponentReport) -> tuple[str, ...]:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in component.dtypes.items())
    return (
        name,
        str(component.files),
        str(component.tensors),
        f"{component.parameters:,}",
        _bytes(component.bytes),
        _bytes(component.used_bytes),
        dtypes,
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _verify(arguments: argparse.Namespace) -> int:
    progress = _Progress()
    if arguments.write is not None:
        inventory = create_inventory(
            arguments.directory, revision=arguments.revision, skip=arguments.write, progress=progress
        )
        progress.end()
        write_inventory(inventory, arguments.write)
        print(f"{arguments.write}: {inventory['file_count']} files, aggregate {inventory['aggregate_sha256']}")
        return 0
    source = arguments.inventory or find_inventory(arguments.directory)
    result = verify(arguments.directory, read_inventory(source), revision=arguments.revision, progress=progress)
    progress.end()
    print(f"{arguments.directory}: {result.num_files} files, {_bytes(result.num_bytes)} read, against {source}")
    if result.not_exported:
        print(f"  not part of the export: {', '.join(result.not_exported)}")
    if result.uncovered:
        print(f"  not covered by this inventory: {len(result.uncovered)} files")
    for problem in result.problems:
        print(f"  - {problem}")
    print("  differs" if result.problems else "  as listed")
    return 1 if result.problems else 0


class _Progress:
    """Bytes read so far, on stderr: one line a second, rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1
        self._end = "\r" if sys.stderr.isatty() else "\n"
        self._shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            share = 100 * done // total if total else 100
            line = f"{share:3d} %  {_bytes(done)} of {_bytes(total)}  {name}"
            print(f"{line:<100}", end=self._end, file=sys.stderr, flush=True)
            self._next = time.monotonic() + 1
            self._shown = True

    def end(self) -> None:
        if self._shown and self._end == "\r":
            print(file=sys.stderr)
