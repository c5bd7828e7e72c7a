"""What the rows of the fault matrix share: their registry, and what they do and demand again and again.

Times are scaled to the lease of the runs, which is 4 s: what must outlast a lease lasts two or three of them.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster
from support.faults.processes import Worker
from support.processes import is_alive

Scenario = Callable[[Cluster], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix."""

    number: int
    name: str
    play: Scenario | None
    why_not: str = ""
    in_suite: bool = False


class NotHere(Exception):
    """A scenario cannot be played on this machine; the message says why."""


ROWS: dict[int, Row] = {}


def row(number: int, name: str, *, in_suite: bool = False) -> Callable[[Scenario], Scenario]:
    def register(play: Scenario) -> Scenario:
        ROWS[number] = Row(number, name, play, in_suite=in_suite)
        return play

    return register


def not_run(number: int, name: str, reason: str) -> None:
    ROWS[number] = Row(number, name, None, reason)


def slow_job(cluster: Cluster, *, attempt: int = 1, step: float = 0.4) -> str:
    """A job that is running, slow on this attempt alone."""
    job_id = cluster.client.create(f"a wave [step {step:g} on attempt {attempt}]", tries=10)
    assert job_id is not None
    cluster.wait_state(job_id, "running")
    return job_id


def reran(cluster: Cluster, job_id: str, *, since: float, crash_count: int | None = 1) -> None:
    """The job ran again in time, and ended completed."""
    job = cluster.wait_state(job_id, *FINAL)
    attempts = cluster.attempts(job_id)
    cluster.expect(
        "the job was completed by its second attempt",
        job["state"] == "completed" and len(attempts) == 2,
        f"{job['state']} after {len(attempts)} attempts",
        job=job_id,
    )
    if len(attempts) > 1:
        seconds = attempts[1]["claimed_at"].timestamp() - since
        cluster.recovery_seconds = seconds
        limit = 10 * cluster.patience
        cluster.expect(
            f"the job ran again within lease + {limit:g} s",
            seconds <= LEASE_SECONDS + limit,
            f"{seconds:.1f} s",
            job=job_id,
        )
    if crash_count is not None:
        cluster.expect(
            f"crash_count is {crash_count}", job["crash_count"] == crash_count, job["crash_count"], job=job_id
        )


def ends_within(cluster: Cluster, pids: Sequence[int], seconds: float, what: str) -> None:
    try:
        cluster.until(lambda: not any(map(is_alive, pids)), seconds=seconds)
        holds = True
    except TimeoutError:
        holds = False
    cluster.expect(
        f"{what} gone within {seconds * cluster.patience:g} s", holds, [pid for pid in pids if is_alive(pid)]
    )


def at_point(cluster: Cluster, point: str, *, prompt: str = "a wave") -> tuple[str, Worker]:
    """A job whose first holder meets `point`, once."""
    cluster.start_api()
    cluster.start_dispatcher()
    cluster.start_worker({"FAULT_POINT": point})
    cluster.wait_ready()
    job_id = cluster.client.create(prompt, tries=10)
    assert job_id is not None
    cluster.until((cluster.folder / "once").exists)
    return job_id, cluster.workers[0]


def clips(cluster: Cluster, job_id: str) -> list[str]:
    from support.stack import s3_client

    answer = s3_client(cluster.env).list_objects_v2(Bucket=cluster.env["RUSHES_S3_BUCKET"])
    keys = [item["Key"] for item in answer.get("Contents", ())]
    return [key for key in keys if job_id in key and key.endswith("video.mp4")]


def renders(cluster: Cluster) -> list[dict[str, Any]]:
    from support.faults.history import load

    path = cluster.folder / "renders.jsonl"
    return load(path) if path.exists() else []


def statuses_of(cluster: Cluster, op: str) -> list[int]:
    from support.faults.history import load

    statuses = [record["data"].get("status") for record in load(cluster.history.path) if record["op"] == op]
    return [status for status in statuses if status is not None]


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def small_disk(path: Path, *, megabytes: int) -> Iterator[Path]:
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        raise NotHere("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
