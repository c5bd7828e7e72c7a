"""Jobs a second through the statements of a worker: claim, start, complete, each committed.

    python loadtest/throughput.py --connections 4 --seconds 20

Every client is a process with one connection. The servers, the clients and this run on the same cores.
"""

import argparse
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bench
from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.settings import Settings
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

RESULT: dict[str, Any] = {
    "bucket": "rushes",
    "key": "results/default/video/1-1/video.mp4",
    "bytes": 1_000_000,
    "sha256": "0" * 64,
    "num_frames": 107,
    "duration_seconds": 4.458,
    "has_audio": True,
}


def complete_jobs(settings: Settings, owner: str, until: float) -> tuple[int, float]:
    """Claim, start and complete until the monotonic time `until`; how many were completed, and CPU seconds used."""
    engine = create_sync_engine(settings, pool_size=1)
    # every statement is a transaction of its own
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        one(connection, jobs.claim(model="none", owner=owner, lease_seconds=60))
        count, used = 0, time.process_time()
        while time.monotonic() < until:
            job = one(connection, jobs.claim(model=bench.MODEL, owner=owner, lease_seconds=60))
            if job is None:
                time.sleep(0.01)
                continue
            assert job.fence is not None
            assert one(connection, jobs.start(job.id, fence=job.fence, lease_seconds=60)) is not None
            timings = {"denoising": 3.0, "decoding": 1.0}
            done = jobs.complete(job.id, fence=job.fence, result=RESULT, timings=timings)
            assert one(connection, done) is not None
            count += 1
        used = time.process_time() - used
    engine.dispose()
    return count, used


def one(connection: Connection, statement: Any) -> Any:
    """The row of a statement that is a transaction of its own."""
    with Session(connection, expire_on_commit=False) as session:
        return session.scalars(statement).one_or_none()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--projects", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=60_000, help="queued before each case")
    arguments = parser.parse_args()
    with bench.servers() as settings:
        engine = create_sync_engine(settings)
        for connections in arguments.connections:
            bench.clear(engine)
            bench.fill(engine, jobs=arguments.jobs, projects=arguments.projects)
            with get_context("spawn").Pool(connections) as pool:
                # the processes have imported everything when the clock starts
                pool.map(time.sleep, [0.5] * connections)
                server_cpu = bench.postgres_cpu_seconds(engine)
                until = time.monotonic() + arguments.seconds
                tasks = [(settings, f"load-r{number}#bench", until) for number in range(connections)]
                done = pool.starmap(complete_jobs, tasks, chunksize=1)
            server_after = bench.postgres_cpu_seconds(engine)
            count = sum(jobs_done for jobs_done, _ in done)
            with engine.connect() as connection:
                told = connection.execute(text("SELECT count(*) FROM outbox")).scalar_one()
            assert told == count, f"{told} events for {count} jobs"
            bench.report(
                "claim_start_complete",
                connections=connections,
                projects=arguments.projects,
                jobs=count,
                jobs_per_s=count / arguments.seconds,
                client_cpu_ms_per_job=1_000 * sum(used for _, used in done) / count,
                server_cpu_ms_per_job=(
                    None if server_cpu is None or server_after is None else 1_000 * (server_after - server_cpu) / count
                ),
                load_average=Path("/proc/loadavg").read_text().split()[0],
            )
        engine.dispose()


if __name__ == "__main__":
    main()
