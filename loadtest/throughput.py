"""Jobs a second from claim to completion: what Postgres and a worker's own code take when a clip takes no time.

    python loadtest/throughput.py --processes 2 4 --seconds 20

Every client is a process. Servers, clients and this run on the same cores. Clients, from the least of a worker to
the most: `driver`, the statements on one connection; `ledger`, the class that runs them; `claimer`, a replica without
ranks: one thread claims ahead while another starts and completes, and a heartbeat keeps the leases. Each project's jobs
count against a key of its own, whose GPU time is added up with every job.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bench
from command_line import amount, at_least, run
from rankless import RanklessReplica
from rushes_core import claims, jobs
from rushes_core.claims import ClaimedJob
from rushes_core.errors import RushesError
from rushes_core.models import Job
from rushes_core.prepared import Prepared
from rushes_core.settings import Settings
from rushes_worker.connections import Connections
from rushes_worker.ledger import Ledger
from sqlalchemy import Engine, bindparam, text
from sqlalchemy.orm import load_only

RESULT: dict[str, Any] = {
    "bucket": "rushes",
    "key": "results/default/video/1-1/video.mp4",
    "bytes": 1_000_000,
    "sha256": "0" * 64,
    "content_type": "video/mp4",
    "num_frames": 107,
    "width": 832,
    "height": 480,
    "fps": 24,
    "duration_seconds": 4.458,
    "has_audio": True,
    "audio_sample_rate": 32_000,
}
TIMINGS = {"encoding": 0.5, "denoising": 3.0, "decoding": 1.0, "muxing": 0.2, "uploading": 0.3, "total": 5.0}


def through_driver(settings: Settings, owner: str, until: float) -> int:
    """Claim, start and complete on one connection until the monotonic time `until`; how many jobs."""
    job_id, fence = bindparam("job_id"), bindparam("fence")
    columns = [one.name for one in fields(ClaimedJob)]
    # first the one that waits for no other claim, as a worker does
    claim, claim_any = (
        Prepared(claims.claim(model=bench.MODEL, owner=owner, lease_seconds=60, only=columns, may_wait=may_wait))
        for may_wait in (False, True)
    )
    state = load_only(Job.state)
    start = Prepared(jobs.start(job_id, fence=fence, lease_seconds=60).options(state))
    complete = Prepared(jobs.complete(job_id, fence=fence, result=RESULT, timings=TIMINGS).options(state))
    connections = Connections(settings)
    count = 0
    with connections.lend() as session:
        while time.monotonic() < until:
            found = claim.execute(session) or claim_any.execute(session)
            if not found:
                break
            held = {"job_id": found[0]["id"], "fence": found[0]["fence"]}
            assert start.execute(session, **held)
            assert complete.execute(session, **held)
            count += 1
    connections.close()
    return count


def through_ledger(settings: Settings, owner: str, until: float) -> int:
    """The same through a worker's ledger."""
    ledger = Ledger(settings, replica_id=owner, model=bench.MODEL)
    count = 0
    while time.monotonic() < until:
        claim = ledger.claim(())
        if claim is None:
            break
        assert ledger.start(claim.lease)
        assert ledger.complete(claim.lease, result=RESULT, timings=TIMINGS)
        count += 1
    ledger.close()
    return count


def through_claimer(settings: Settings, owner: str, until: float) -> int:
    """The same as a replica does it, but for its ranks and what they make."""
    replica = RanklessReplica(settings, owner)
    count = 0
    while time.monotonic() < until:
        claim = replica.take(wait_seconds=0.5)
        if claim is None:
            continue
        assert replica.ledger.start(claim.lease)
        assert replica.ledger.complete(claim.lease, result=RESULT, timings=TIMINGS)
        replica.heartbeat.drop(claim.lease)
        count += 1
    replica.close()
    return count


CLIENTS: dict[str, Callable[[Settings, str, float], int]] = {
    "driver": through_driver,
    "ledger": through_ledger,
    "claimer": through_claimer,
}


def complete_jobs(client: str, settings: Settings, owner: str, until: float) -> tuple[int, float]:
    """How many jobs were completed, and CPU seconds used."""
    used = time.process_time()
    count = CLIENTS[client](settings, owner, until)
    return count, time.process_time() - used


def written(engine: Engine) -> tuple[int, int]:
    """Transactions that were committed in the database, and bytes of write-ahead log, since some time."""
    with engine.connect() as connection:
        commits = connection.execute(
            text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        ).scalar_one()
        size = connection.execute(text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")).scalar_one()
    return commits, int(size)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--processes", type=at_least(1), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--projects", type=at_least(1), default=20)
    parser.add_argument("--seconds", type=amount, default=15.0)
    parser.add_argument("--jobs", type=at_least(1), default=60_000, help="queued before each case")
    arguments = parser.parse_args()
    with bench.servers() as settings:
        engine = bench.patient_engine(settings)
        for client, processes in product(arguments.clients, arguments.processes):
            bench.clear(engine)
            bench.fill(engine, jobs=arguments.jobs, projects=arguments.projects, keys=True)
            with get_context("spawn").Pool(processes) as pool:
                # the processes have imported everything when the clock starts
                pool.map(time.sleep, [0.5] * processes)
                commits, wal_bytes = written(engine)
                server_cpu = bench.postgres_cpu_seconds(engine)
                until = time.monotonic() + arguments.seconds
                tasks = [(client, settings, f"load-r{number}#bench", until) for number in range(processes)]
                done = pool.starmap(complete_jobs, tasks, chunksize=1)
            server_after = bench.postgres_cpu_seconds(engine)
            # the clients have ended, and with that told what they committed
            commits_after, wal_bytes_after = written(engine)
            count = sum(jobs_done for jobs_done, _ in done)
            if count >= arguments.jobs:
                raise RushesError(f"no jobs were left of --jobs {arguments.jobs}: the figure would be too low")
            with engine.connect() as connection:
                ended = "SELECT count(*) FROM outbox WHERE type = 'video.completed'"
                told = connection.execute(text(ended)).scalar_one()
            assert told == count, f"{told} events for {count} jobs"
            bench.report(
                "claim_start_complete",
                client=client,
                processes=processes,
                projects=arguments.projects,
                jobs=count,
                jobs_per_s=count / arguments.seconds,
                client_cpu_ms_per_job=1_000 * sum(used for _, used in done) / count,
                server_cpu_ms_per_job=(
                    None if server_cpu is None or server_after is None else 1_000 * (server_after - server_cpu) / count
                ),
                transactions_per_job=(commits_after - commits) / count,
                wal_bytes_per_job=round((wal_bytes_after - wal_bytes) / count),
                load_average=Path("/proc/loadavg").read_text().split()[0],
            )
        engine.dispose()


if __name__ == "__main__":
    run(main)
