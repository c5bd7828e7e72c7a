"""One replica from its start through queued jobs: what each stage of the start takes, and how long its device waits
between two of them.

    python loadtest/replica.py --checkpoint DIR --weights synthetic --size 1344x768 --frames 124 --jobs 3

Starts `rushes worker` as an operator does, with jobs in the queue, and reads its log. Without `RUSHES_*` servers it has
embedded ones. Ends with status 1 when a job is not rendered.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
from rushes_core.arrivals import CREATE
from rushes_core.contract import load_contract
from rushes_core.database import create_sync_engine
from rushes_core.ids import new_video_id
from rushes_core.served_model import model_name
from rushes_core.settings import Settings
from rushes_worker.child import settings_environment
from sqlalchemy import Engine
from sqlalchemy.orm import Session

WORDS = "waves roll against the lighthouse at dusk while a gull calls over the harbour "
STOP_SECONDS = 30.0


def queue(engine: Engine, settings: Settings, arguments: argparse.Namespace) -> None:
    """Accept the jobs, all before the worker starts."""
    width, height = map(int, arguments.size.split("x"))
    prompt = (WORDS * (arguments.tokens // len(WORDS) + 1))[: arguments.tokens]
    columns = {
        "project": "default",
        "model": model_name(settings, load_contract(settings.checkpoint)),
        "priority": 1,
        "prompt": prompt,
        "width": width,
        "height": height,
        "num_frames": arguments.frames,
        "request": {},
        "max_attempts": 1,
    }
    new = [{"id": new_video_id(), "seed": seed, **columns} for seed in range(arguments.jobs)]
    with Session(engine) as session, session.begin():
        session.execute(CREATE, {"jobs": json.dumps(new)})


def records(worker: "subprocess.Popen[bytes]", log: Path, *, seconds: float) -> Iterator[dict[str, Any]]:
    """The worker's log records as they come, each with `at`, seconds since this was called."""
    began = time.monotonic()
    with log.open("rb") as file:
        while time.monotonic() < began + seconds:
            line = file.readline()
            if line.startswith(b"{") and line.endswith(b"\n"):
                yield {**json.loads(line), "at": time.monotonic() - began}
            elif not line:
                if worker.poll() is not None:
                    return
                time.sleep(0.005)


def follow(worker: "subprocess.Popen[bytes]", log: Path, arguments: argparse.Namespace) -> int:
    """Report the start and every job; how many were rendered."""
    rendered, accepted = 0, False
    for record in records(worker, log, seconds=arguments.limit):
        event = record["event"]
        if event == "replica_ready":
            bench.report("start", ready_seconds=record["at"], devices=record["devices"], stages=record["seconds"])
        elif event == "job_started" and not accepted:
            accepted = True
            bench.report("first job accepted", seconds=record["at"])
        elif event == "job_rendered":
            rendered += 1
            idle = record["idle_before_seconds"]
            bench.report("job", at_seconds=record["at"], idle_before_seconds=idle, ahead=record["told_ahead"])
            if rendered == arguments.jobs:
                break
    return rendered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--weights", help="as `rushes worker` takes it")
    parser.add_argument("--layout", default="r1s1")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=107)
    parser.add_argument("--tokens", type=int, default=200, help="characters of the prompt")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that all may take")
    parser.add_argument("--log", type=Path, help="keep the worker's log")
    arguments = parser.parse_args()
    with bench.servers() as found, tempfile.TemporaryDirectory(prefix="rushes-replica-") as folder:
        settings = found.model_copy(
            update={"checkpoint": arguments.checkpoint, "scratch": Path(folder) / "scratch", "log_json": True}
        )
        engine = create_sync_engine(settings, pool_size=1)
        bench.clear(engine)
        queue(engine, settings, arguments)
        log = arguments.log or Path(folder) / "worker.log"
        command = [sys.executable, "-P", "-m", "rushes_cli.main", "worker", "--layout", arguments.layout]
        command += ["--device", arguments.device]
        if arguments.weights:
            command += ["--weights", arguments.weights]
        with log.open("wb") as output:
            worker = subprocess.Popen(
                command, env=settings_environment(settings), stdout=output, stderr=subprocess.STDOUT
            )
        try:
            rendered = follow(worker, log, arguments)
        finally:
            worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
        if rendered < arguments.jobs:
            print(log.read_text()[-4_000:], file=sys.stderr)
        bench.report("end", rendered=rendered, load_average=os.getloadavg()[0])
    return 0 if rendered == arguments.jobs else 1


if __name__ == "__main__":
    sys.exit(main())
