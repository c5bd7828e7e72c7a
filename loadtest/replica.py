"""Replicas from their start through queued jobs: what each stage of the start takes, how long a device waits between
two jobs, how many a worker renders, whether its memory grows, and what a killed rank costs.

    python loadtest/replica.py --checkpoint DIR --weights synthetic --sizes 1344x768 --frames 124 --jobs 3
    python loadtest/replica.py --checkpoint DIR --sizes 480x480 640x480 --frames 107 124 --warm-up 1 --jobs 50
    python loadtest/replica.py --checkpoint DIR --layout r2s1 --jobs 0 --kill-stages load encode step-3 decode mux

Starts `rushes worker` as an operator does, with jobs in the queue, and reads its log. Without `RUSHES_*` servers it has
embedded ones. Ends with status 1 when a job is not rendered.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
from command_line import amount, at_least, canvas, clip_frames, run
from replica_kills import STAGES, Kills
from rushes_cli.bench_lengths import mixed
from rushes_cli.main import UsageError
from rushes_core.contract import load_contract
from rushes_core.database import create_sync_engine
from rushes_core.errors import CheckpointError
from rushes_core.models import Replica
from rushes_worker.layout import Layout
from worker_run import Record, Shape, WorkerRun, all_shapes, gpu_used_bytes

POLL_SECONDS = 0.1
"""How often an idle replica looks for a job: no dispatcher runs here whose hint would wake it."""


class Batch:
    """Jobs that are queued together, and what the worker said of them."""

    def __init__(self, run: WorkerRun, shapes: Sequence[Shape]) -> None:
        self._run = run
        self._shapes = shapes
        self._since = len(run.records)
        self._ids = run.queue(shapes)

    def follow(self, *, began: float, seconds: float) -> int:
        """Report each job when it was rendered, and all when they have ended; how many did not complete."""
        reported: set[str] = set()

        def is_over() -> bool:
            for record in self._all("job_rendered"):
                if record["job_id"] not in reported:
                    reported.add(record["job_id"])
                    self._report_job(record, began)
            return self._num_ended() == len(self._ids)

        self._run.until(is_over, f"{len(self._ids)} jobs end", seconds=seconds)
        return len(self._ids) - len(self._all("job_completed"))

    def summary(self) -> dict[str, Any]:
        """Throughput from the first start to the last completion, every clip alike or by its pixels; and what the first
        rank of each replica allocated.
        """
        started, completed = self._all("job_started"), self._all("job_completed")
        if not completed:
            return {"completed": 0}
        done = {record["job_id"] for record in completed}
        pixels = sum(shape.pixels for job_id, shape in self._by_id().items() if job_id in done)
        wall = max(record["at"] for record in completed) - min(record["at"] for record in started)
        idle = self._idle_seconds()
        memory = self._all("render_memory")
        return {
            "completed": len(completed),
            "wall_seconds": wall,
            "jobs_per_second": len(completed) / wall,
            "megapixels_per_second": pixels / 1e6 / wall,
            "jobs_of_replica": self._jobs_of_replica(completed),
            "idle_before_seconds_p50": bench.percentile(idle, 50) if idle else None,
            "idle_before_seconds_max": max(idle, default=None),
            "told_ahead": sum(record["told_ahead"] for record in self._all("job_rendered")),
            "allocations": sum(record["allocations"] for record in memory),
            "segments": sum(record["segments"] for record in memory),
            "memory": self._memory_of_replicas(memory),
        }

    def _all(self, event: str) -> list[Record]:
        ids = set(self._ids)
        return [one for one in self._run.records[self._since :] if one["event"] == event and one.get("job_id") in ids]

    def _num_ended(self) -> int:
        if len(self._all("job_completed")) == len(self._ids):
            return len(self._ids)
        refused = len(self._all("job_failed"))
        # what else ends a job is rare, and not worth a question every few milliseconds
        return len(self._ids) - (self._run.num_open(self._ids) if refused else len(self._ids))

    def _by_id(self) -> dict[str, Shape]:
        return dict(zip(self._ids, self._shapes, strict=True))

    def _report_job(self, record: Record, began: float) -> None:
        bench.report(
            "job",
            at_seconds=record["at"] - began,
            shape=str(self._by_id()[record["job_id"]]),
            replica=_short_name(record["replica"]),
            idle_before_seconds=record["idle_before_seconds"],
            ahead=record["told_ahead"],
        )

    def _idle_seconds(self) -> list[float]:
        """Before each job but the first of each replica, which nothing was queued before."""
        seen: set[str] = set()
        found = []
        for record in self._all("job_rendered"):
            if record["replica"] in seen and record["idle_before_seconds"] is not None:
                found.append(record["idle_before_seconds"])
            seen.add(record["replica"])
        return found

    def _memory_of_replicas(self, memory: Sequence[Record]) -> dict[str, dict[str, list[int]]]:
        """Bytes at the first and the last clip of each."""
        replica = {record["job_id"]: record["replica"] for record in self._all("job_rendered")}
        found: dict[str, dict[str, list[int]]] = {}
        for record in memory:
            if record["job_id"] in replica:
                own = found.setdefault(_short_name(replica[record["job_id"]]), {})
                for name in ("reserved_bytes", "graph_bytes"):
                    first = own[name][0] if name in own else record[name]
                    own[name] = [first, record[name]]
        return dict(sorted(found.items()))

    def _jobs_of_replica(self, completed: Sequence[Record]) -> dict[str, int]:
        names = [_short_name(record["replica"]) for record in completed]
        return {name: names.count(name) for name in sorted(set(names))}


def _short_name(replica_id: str) -> str:
    """`r0` of `host-r0#12-ab`."""
    return replica_id.partition("#")[0].rpartition("-")[2]


def report_memory(run: WorkerRun, replicas: Sequence[Replica], after: str) -> dict[str, int]:
    """Bytes in use when nothing is rendered: resident on the host by role, on the devices as ranks saw them last."""
    resident = run.resident_bytes()
    devices = [device["memory_used_bytes"] for one in replicas for device in one.detail["devices"]]
    bench.report("memory", after=after, resident_bytes=resident, device_bytes=devices, gpu_bytes=gpu_used_bytes())
    return resident | {f"device_{index}": used for index, used in enumerate(devices)}


def report_start(run: WorkerRun, *, began: float, replicas: int, seconds: float) -> None:
    """When each replica was ready, and by which stages; and when the first job was accepted."""
    run.until(
        lambda: sum(record["event"] == "replica_ready" for record in run.records) >= replicas,
        f"{replicas} replicas are ready",
        seconds=seconds,
    )
    for record in run.records:
        if record["event"] == "replica_ready":
            bench.report(
                "start",
                replica=_short_name(record["replica"]),
                ready_seconds=record["at"] - began,
                devices=record["devices"],
                stages=record["seconds"],
            )
    first = run.until_found("job_started", seconds=seconds)
    bench.report("first job accepted", seconds=first["at"] - began)


def measure(run: WorkerRun, arguments: argparse.Namespace) -> int:
    """How many jobs did not complete."""
    layout: Layout = arguments.layout
    shapes = all_shapes(arguments.sizes, arguments.frames, arguments.tokens)
    # next to each other, so that replicas side by side have one of each
    warm = [shape for shape in shapes for _ in range(layout.replicas * arguments.warm_up)]
    wanted = mixed(shapes, arguments.jobs, random.Random(arguments.seed))
    jobs = Batch(run, shapes[:1] * layout.replicas if warm else wanted or shapes[:1])
    began = run.start()
    report_start(run, began=began, replicas=layout.replicas, seconds=arguments.limit)
    missing = jobs.follow(began=began, seconds=arguments.limit)
    if warm:
        run.until_idle(layout.replicas, seconds=arguments.limit)
        jobs = Batch(run, warm)
        missing += jobs.follow(began=began, seconds=arguments.limit)
    before = report_memory(run, run.until_idle(layout.replicas, seconds=arguments.limit), "the first jobs")
    if warm and wanted:
        jobs = Batch(run, wanted)
        missing += jobs.follow(began=began, seconds=arguments.limit)
        after = report_memory(run, run.until_idle(layout.replicas, seconds=arguments.limit), "all jobs")
        bench.report("growth", bytes={name: after[name] - before.get(name, 0) for name in after})
    bench.report("jobs", layout=str(layout), missing=missing, **jobs.summary(), load_average=os.getloadavg()[0])
    if arguments.kill_stages:
        kills = Kills(run, layout, shapes[0], seconds=arguments.limit)
        for turn in range(arguments.rounds):
            for stage in arguments.kill_stages:
                bench.report("kill", round=turn, **kills.kill_at(stage))
    return missing


def _layout(text: str) -> Layout:
    try:
        return Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--weights", help="as `rushes worker` takes it")
    parser.add_argument("--layout", type=_layout, default="r1s1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sizes", type=canvas, nargs="+", default=[(832, 480)], metavar="WxH")
    parser.add_argument("--frames", type=clip_frames, nargs="+", default=[107])
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=[200], help="characters of the prompt")
    parser.add_argument(
        "--jobs", type=at_least(0), default=3, help="each shape as often as the others, in random order"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of that order")
    parser.add_argument(
        "--warm-up", type=at_least(0), default=0, help="jobs of each shape for each replica before those that count"
    )
    parser.add_argument(
        "--kill-stages", nargs="+", default=[], choices=STAGES, help="after the jobs, of the first shape"
    )
    parser.add_argument("--rounds", type=at_least(1), default=1, help="of kills at each stage")
    parser.add_argument("--limit", type=amount, default=600.0, help="seconds that each part may take")
    parser.add_argument("--log", type=Path, help="keep the worker's log")
    arguments = parser.parse_args()
    try:
        load_contract(arguments.checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint {error}") from None
    with bench.servers() as found, tempfile.TemporaryDirectory(prefix="rushes-replica-") as folder:
        if "capture" in arguments.kill_stages and not found.capture:
            raise UsageError("--kill-stages capture: RUSHES_CAPTURE names nothing that is captured at start")
        settings = found.model_copy(
            update={
                "checkpoint": arguments.checkpoint,
                "scratch": Path(folder) / "scratch",
                "log_json": True,
                "poll_seconds": POLL_SECONDS,
                # the crashes here are made, and no reason to take a replica for sick
                "drain_after_crashes": 1_000,
            }
        )
        bench.clear(create_sync_engine(settings, pool_size=1))
        log = arguments.log or Path(folder) / "worker.log"
        with WorkerRun(
            settings, layout=str(arguments.layout), device=arguments.device, weights=arguments.weights, log=log
        ) as run:
            missing = measure(run, arguments)
        if missing:
            print(log.read_text()[-4_000:], file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    run(main)
