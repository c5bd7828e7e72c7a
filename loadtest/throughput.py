"""Jobs a second through the statements of a worker: claim, start, complete, each committed.

    python loadtest/throughput.py --connections 4 --seconds 20

Every client is a process with one connection. The servers, the clients and this run on the same cores.
"""

import argparse
import time
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bench
from psycopg.rows import dict_row
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


class Client:
    """Runs the statements of a worker on one connection, each as a transaction of its own.

    Args:
        bare: send the compiled statements through the driver alone, without SQLAlchemy: what the server can take.
    """

    def __init__(self, connection: Connection, owner: str, *, bare: bool) -> None:
        self._connection = connection
        self._driver: Any = connection.connection.driver_connection
        self._owner = owner
        self._bare = bare
        timings = {"denoising": 3.0, "decoding": 1.0}
        self._compiled = {
            "claim": self._compile(jobs.claim(model=bench.MODEL, owner=owner, lease_seconds=60)),
            "start": self._compile(jobs.start("", fence=-1, lease_seconds=60)),
            "complete": self._compile(jobs.complete("", fence=-1, result=RESULT, timings=timings)),
        }

    def claim(self) -> tuple[str, int] | None:
        if self._bare:
            row = self._run("claim")
            return None if row is None else (row["id"], row["fence"])
        job = self._one(jobs.claim(model=bench.MODEL, owner=self._owner, lease_seconds=60))
        return None if job is None else (job.id, job.fence)

    def start(self, job_id: str, fence: int) -> bool:
        if self._bare:
            return self._run("start", job_id, fence) is not None
        return self._one(jobs.start(job_id, fence=fence, lease_seconds=60)) is not None

    def complete(self, job_id: str, fence: int) -> bool:
        if self._bare:
            return self._run("complete", job_id, fence) is not None
        timings = {"denoising": 3.0, "decoding": 1.0}
        return self._one(jobs.complete(job_id, fence=fence, result=RESULT, timings=timings)) is not None

    def _one(self, statement: Any) -> Any:
        with Session(self._connection, expire_on_commit=False) as session:
            return session.scalars(statement).one_or_none()

    def _compile(self, statement: Any) -> tuple[str, dict[str, Any]]:
        compiled = statement.compile(self._connection)
        processors = compiled._bind_processors
        return str(compiled), {
            name: processors[name](value) if name in processors else value for name, value in compiled.params.items()
        }

    def _run(self, name: str, job_id: str = "", fence: int = 0) -> Any:
        statement, values = self._compiled[name]
        own = {"": job_id, -1: fence}
        values = {
            key: own.get(value, value) if isinstance(value, (str, int)) else value for key, value in values.items()
        }
        return self._driver.cursor(row_factory=dict_row).execute(statement, values).fetchone()


def complete_jobs(settings: Settings, owner: str, until: float, bare: bool) -> tuple[int, float]:
    """Claim, start and complete until the monotonic time `until`; how many were completed, and CPU seconds used."""
    engine = create_sync_engine(settings, pool_size=1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        client = Client(connection, owner, bare=bare)
        count, used = 0, time.process_time()
        while time.monotonic() < until:
            held = client.claim()
            if held is None:
                time.sleep(0.01)
                continue
            assert client.start(*held)
            assert client.complete(*held)
            count += 1
        used = time.process_time() - used
    engine.dispose()
    return count, used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--projects", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=60_000, help="queued before each case")
    arguments = parser.parse_args()
    with bench.servers() as settings:
        engine = create_sync_engine(settings)
        for bare, connections in product((False, True), arguments.connections):
            bench.clear(engine)
            bench.fill(engine, jobs=arguments.jobs, projects=arguments.projects)
            with get_context("spawn").Pool(connections) as pool:
                # the processes have imported everything when the clock starts
                pool.map(time.sleep, [0.5] * connections)
                server_cpu = bench.postgres_cpu_seconds(engine)
                until = time.monotonic() + arguments.seconds
                tasks = [(settings, f"load-r{number}#bench", until, bare) for number in range(connections)]
                done = pool.starmap(complete_jobs, tasks, chunksize=1)
            server_after = bench.postgres_cpu_seconds(engine)
            count = sum(jobs_done for jobs_done, _ in done)
            with engine.connect() as connection:
                told = connection.execute(text("SELECT count(*) FROM outbox")).scalar_one()
            assert told == count, f"{told} events for {count} jobs"
            bench.report(
                "claim_start_complete",
                client="driver" if bare else "sqlalchemy",
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
