"""`rushes workers`: the replicas that render, as the API tells of them."""

import argparse
import time
from typing import Any

from rushes_cli.campaigns.client import from_environment
from rushes_cli.terminal import print_json, print_table

_PATIENCE_SECONDS = 10.0
_GIB = 1 << 30
_MINUTE = 60
_TITLES = ("NAME", "STATUS", "LAYOUT", "CHECKPOINT", "PRECISION", "STAGE", "JOB", "EPOCH", "RESTARTS", "MEMORY", "SEEN")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("workers", help="list the replicas, and what they do")
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    client = from_environment(patience=_PATIENCE_SECONDS, needs="the scope admin")
    try:
        workers = list(client.pages("/v1/workers", limit=100))
    finally:
        client.close()
    if arguments.json:
        for worker in workers:
            print_json(worker)
    else:
        now = time.time()
        print_table(_TITLES, [row(worker, now=now) for worker in workers])
    return 0


def row(worker: dict[str, Any], *, now: float) -> tuple[str, ...]:
    """What is shown of one of the API's workers at `now`, Unix seconds."""
    checkpoint = worker["checkpoint"] or {"model_id": worker["model"], "revision": None}
    revision = (checkpoint["revision"] or "").removeprefix("hf://")
    return (
        worker["name"],
        worker["status"],
        worker["layout"],
        checkpoint["model_id"] + (f"@{revision[:12]}" if revision else ""),
        _short(worker["precision"] or "-"),
        _stage(worker),
        worker["job_id"] or "-",
        str(worker["rank_groups"]),
        str(worker["restarts"]),
        _memory(worker["devices"]),
        _ago(worker, now),
    )


def _ago(worker: dict[str, Any], now: float) -> str:
    """When it was heard of last: by the database's clock once that is long ago."""
    # an API of the release before does not say
    silent_seconds = worker.get("silent_seconds")
    seconds = max(0, round(now - worker["last_seen_at"])) if silent_seconds is None else silent_seconds
    if seconds < _MINUTE:
        return f"{seconds} s ago"
    hours, minutes = divmod(seconds // _MINUTE, _MINUTE)
    return f"{hours} h {minutes} min ago" if hours else f"{minutes} min ago"


def _short(precision: str) -> str:
    """One word where all parts are the same."""
    words = {part.rpartition(" ")[2] for part in precision.split(", ")}
    return words.pop() if len(words) == 1 else precision


def _stage(worker: dict[str, Any]) -> str:
    """Of the job, or of the load with what is known of its progress; between two loads why the last one failed."""
    # an API of the release before says neither
    loading, trouble = worker.get("loading"), worker.get("trouble")
    if loading is None:
        return worker["stage"] or (trouble.partition("\n")[0] if trouble else "-")
    known = (
        ("percent", "{:d} %"),
        ("gb_per_second", "{:.1f} GB/s"),
        ("seconds_left", "{:.0f} s left"),
    )
    figures = [form.format(loading[name]) for name, form in known if loading[name] is not None]
    return ", ".join([loading["stage"], *figures])


def _memory(devices: list[dict[str, Any]]) -> str:
    """The fullest device: what is used of what there is."""
    if not devices:
        return "-"
    fullest = max(devices, key=lambda device: device["memory_used_bytes"] / device["memory_total_bytes"])
    return f"{fullest['memory_used_bytes'] / _GIB:.1f} of {fullest['memory_total_bytes'] / _GIB:.1f} GiB"
