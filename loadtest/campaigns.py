"""Campaigns: lines a second from the answer to the request until the last one is a job, memory, and a large cancel.

    python loadtest/campaigns.py --lines 100000
    python loadtest/campaigns.py --lines 1000000 --cases load
    python loadtest/campaigns.py --form csv --gzip --cases load

Embedded servers and `rushes api`, `rushes dispatcher` and `rushes loader` as users start them share the machine's cores
with this run, which only looks. Cases:

load    upload a file, send it as a batch, and wait until it is loaded
cancel  the same, then cancel it while a stand-in for a worker runs its jobs; needs `load`
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import httpx
from command_line import at_least, run
from rushes_cli.stack import EmbeddedStack
from rushes_cli.stack.ports import free_port
from rushes_core import claims, jobs, replicas
from rushes_core.settings import Settings
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

KEY = "load-test-key"
PROMPT = (
    "Waves roll against a lighthouse at dusk while gull number {} calls, a slow dolly shot on 35 mm film, warm light "
    "from the lamp room, spray in the wind, a fishing boat far out on the horizon"
)
CLIP_SECONDS = 0.05
RESULT: dict[str, Any] = {"bucket": "b", "key": "k", "bytes": 1, "sha256": "0" * 64}


@dataclass(frozen=True, slots=True)
class Rushes:
    """The running processes."""

    client: httpx.Client
    engine: Engine
    pids: dict[str, int] = field(default_factory=dict[str, int])

    def cpu_seconds(self, name: str) -> float:
        fields = Path(f"/proc/{self.pids[name]}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def peaks_mb(self) -> dict[str, float]:
        """Of each process, and of the largest of Postgres, which counts the shared buffers that it has touched."""
        peaks = {name: _status_kb(pid, "VmHWM") / 1_024 for name, pid in self.pids.items()}
        peaks["postgres"] = max(_status_kb(pid, "VmHWM") / 1_024 for pid in self._backends())
        return {name: round(peak, 1) for name, peak in peaks.items()}

    def reset_peaks(self) -> None:
        for pid in (*self.pids.values(), *self._backends()):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _backends(self) -> list[int]:
        with self.engine.connect() as connection:
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        parent = _status_kb(pid, "PPid")
        return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@contextmanager
def running(num_bytes: int) -> Iterator[Rushes]:
    with tempfile.TemporaryDirectory(prefix="rushes-load-") as directory, EmbeddedStack(directory) as stack:
        checkpoint = Path(directory) / "checkpoint"
        env = os.environ | stack.settings_env | {"RUSHES_API_KEY": KEY, "RUSHES_CHECKPOINT": str(checkpoint)}
        env |= {"RUSHES_FILES_MAX_BYTES": str(num_bytes), "RUSHES_FILES_MAX_TOTAL_BYTES": str(10 * num_bytes)}
        for command in (["checkpoint", "tiny", str(checkpoint)], ["migrate"]):
            stack.run(command[0], _rushes(*command), env=env, cwd=Path(directory))
        port = free_port()
        words = {"api": ["--port", str(port)], "dispatcher": [], "loader": []}
        pids = {
            name: stack.spawn(name, _rushes(name, *more), env=env, cwd=Path(directory)).popen.pid
            for name, more in words.items()
        }
        fields: dict[str, Any] = {name.removeprefix("RUSHES_").lower(): v for name, v in stack.settings_env.items()}
        engine = bench.patient_engine(Settings(checkpoint=checkpoint, **fields))
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600, trust_env=False) as client:
            _wait(lambda: _answers(client))
            yield Rushes(client, engine, pids)
        stack.check_running()
        engine.dispose()


def _rushes(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rushes_cli", *arguments]


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _wait(condition: Any) -> None:
    while not condition():
        time.sleep(0.02)


def _status_kb(pid: int, name: str) -> int:
    """A figure of /proc/PID/status: kilobytes, or a plain number."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def write_file(path: Path, *, lines: int, form: str, is_gzip: bool) -> None:
    with gzip.open(path, "wt", compresslevel=1) if is_gzip else path.open("w") as file:
        if form == "csv":
            file.write("custom_id,prompt,seconds,size,seed,metadata.shot\r\n")
        for number in range(lines):
            prompt = PROMPT.format(number)
            if form == "csv":
                file.write(f'shot-{number},"{prompt}",5,832x480,{number},{number}\r\n')
                continue
            body = {
                "prompt": prompt,
                "seconds": "5",
                "size": "832x480",
                "seed": number,
                "metadata": {"shot": str(number)},
            }
            line = {"custom_id": f"shot-{number}", "method": "POST", "url": "/v1/videos", "body": body}
            file.write(json.dumps(line) + "\n")


def load(rushes: Rushes, options: argparse.Namespace, path: Path) -> str:
    """The id of a loaded campaign."""
    rushes.reset_peaks()
    began = time.monotonic()
    with path.open("rb") as file:
        name = f"lines.{options.form}{'.gz' if options.gzip else ''}"
        answer = rushes.client.post("/v1/files", files={"file": (name, file)}, data={"purpose": "batch"})
    file_id = answer.raise_for_status().json()["id"]
    upload_seconds = time.monotonic() - began
    cpu, server_cpu = rushes.cpu_seconds("loader"), bench.postgres_cpu_seconds(rushes.engine)
    began = time.monotonic()
    body = {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h"}
    campaign_id = rushes.client.post("/v1/batches", json=body).raise_for_status().json()["id"]
    accept_seconds = time.monotonic() - began
    first_seconds = None
    longest_get = 0.0
    while True:
        asked = time.monotonic()
        batch = rushes.client.get(f"/v1/batches/{campaign_id}").raise_for_status().json()
        longest_get = max(longest_get, time.monotonic() - asked)
        if first_seconds is None and batch["request_counts"]["total"]:
            first_seconds = time.monotonic() - began
        if batch["status"] not in ("validating", "in_progress") or batch["loading"]["completed_at"] is not None:
            break
        time.sleep(0.1)
    seconds = time.monotonic() - began
    assert batch["request_counts"]["total"] == options.lines, batch
    after = bench.postgres_cpu_seconds(rushes.engine)
    bench.report(
        "load",
        lines=options.lines,
        megabytes=path.stat().st_size / 1e6,
        form=f"{options.form}{' gzip' if options.gzip else ''}",
        upload_seconds=upload_seconds,
        accept_seconds=accept_seconds,
        first_jobs_seconds=first_seconds,
        load_seconds=seconds,
        lines_per_second=options.lines / seconds,
        loader_cpu_us_per_line=(rushes.cpu_seconds("loader") - cpu) / options.lines * 1e6,
        postgres_cpu_us_per_line=None
        if after is None or server_cpu is None
        else (after - server_cpu) / options.lines * 1e6,
        longest_get_seconds=longest_get,
        peak_mb=rushes.peaks_mb(),
        load_average=os.getloadavg()[0],
    )
    return campaign_id


class Worker(threading.Thread):
    """Claims, starts and completes jobs as a replica does, but for the rendering."""

    def __init__(self, engine: Engine, model: str) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._model = model
        self.stopping = False
        self.started_at: list[float] = []

    def run(self) -> None:
        values = {"pool": "default", "layout": "r1s1", "device": "cpu", "epoch": 1, "model": self._model}
        reported_at = 0.0
        while not self.stopping:
            if time.monotonic() > reported_at + 1:
                self._execute(replicas.upsert_replica("stand-in#1", state="ready", **values))
                reported_at = time.monotonic()
            job = self._execute(claims.claim(model=self._model, owner="stand-in#1", lease_seconds=30))
            if job is None:
                time.sleep(0.02)
                continue
            fence = job.fence
            if self._execute(jobs.start(job.id, fence=fence, lease_seconds=30)) is None:
                self._execute(jobs.confirm_cancel(job.id, fence=fence))
                continue
            self.started_at.append(time.monotonic())
            time.sleep(CLIP_SECONDS)
            if self._execute(jobs.complete(job.id, fence=fence, result=RESULT, timings={})) is None:
                self._execute(jobs.confirm_cancel(job.id, fence=fence))

    def _execute(self, statement: Any) -> Any:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            return session.execute(statement).scalar_one_or_none()


def cancel(rushes: Rushes, options: argparse.Namespace, campaign_id: str) -> None:
    model = rushes.client.get(f"/v1/batches/{campaign_id}").json()["model"]
    worker = Worker(rushes.engine, model)
    worker.start()
    _wait(lambda: len(worker.started_at) > 20)
    rushes.reset_peaks()
    cpu, server_cpu = rushes.cpu_seconds("loader"), bench.postgres_cpu_seconds(rushes.engine)
    began = time.monotonic()
    rushes.client.post(f"/v1/batches/{campaign_id}/cancel").raise_for_status()
    answered = time.monotonic()
    final_seconds = None
    while True:
        batch = rushes.client.get(f"/v1/batches/{campaign_id}").raise_for_status().json()
        counts = batch["request_counts"]
        if final_seconds is None and not counts["queued"] and not counts["in_progress"]:
            final_seconds = time.monotonic() - began
        if batch["status"] == "cancelled":
            break
        time.sleep(0.1)
    seconds = time.monotonic() - began
    worker.stopping = True
    worker.join()
    after = bench.postgres_cpu_seconds(rushes.engine)
    bench.report(
        "cancel",
        jobs=options.lines,
        answer_seconds=answered - began,
        last_start_after_answer_seconds=max(0.0, worker.started_at[-1] - answered),
        all_final_seconds=final_seconds,
        with_files_seconds=seconds,
        completed=counts["completed"],
        cancelled=counts["cancelled"],
        counters_are_exact=_counters_are_exact(rushes.engine, campaign_id, counts),
        events=_num_events(rushes.engine, campaign_id),
        loader_cpu_us_per_job=(rushes.cpu_seconds("loader") - cpu) / options.lines * 1e6,
        postgres_cpu_us_per_job=None
        if after is None or server_cpu is None
        else (after - server_cpu) / options.lines * 1e6,
        peak_mb=rushes.peaks_mb(),
        load_average=os.getloadavg()[0],
    )


def _counters_are_exact(engine: Engine, campaign_id: str, counts: dict[str, int]) -> bool:
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT state, count(*) AS n FROM jobs WHERE campaign_id = :id GROUP BY state"), {"id": campaign_id}
        )
        found = {row.state: row.n for row in rows}
    return all(counts[state] == found.get(state, 0) for state in ("queued", "completed", "cancelled", "expired"))


def _num_events(engine: Engine, campaign_id: str) -> int:
    with engine.connect() as connection:
        statement = text("SELECT count(*) FROM outbox WHERE job_id = :id AND type <> 'batch.progress'")
        return connection.execute(statement, {"id": campaign_id}).scalar_one()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=at_least(1), default=100_000)
    parser.add_argument("--form", choices=["jsonl", "csv"], default="jsonl")
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=["load", "cancel"], default=["load", "cancel"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rushes-load-") as directory:
        path = Path(directory) / "lines"
        write_file(path, lines=options.lines, form=options.form, is_gzip=options.gzip)
        with running(max(path.stat().st_size, 1_048_576)) as rushes:
            campaign_id = load(rushes, options, path)
            if "cancel" in options.cases:
                cancel(rushes, options, campaign_id)


if __name__ == "__main__":
    run(main)
