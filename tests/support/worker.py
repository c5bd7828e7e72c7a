"""Workers for tests: real processes on the scripted pipeline, and the jobs that they run."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rushes_core import jobs, replicas
from rushes_core.database import create_sync_engine
from rushes_core.ids import new_video_id
from rushes_core.models import Job, JobAttempt, JobEvent, Replica
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from rushes_worker.child import settings_environment
from rushes_worker.commands import Boot
from rushes_worker.name import process_detail
from sqlalchemy import create_engine, delete, func, select, text, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate
from support.forked import Forked, preload
from support.new_jobs import insert_job
from support.processes import children, descendants

T = TypeVar("T")

preload("rushes_worker.launcher", "rushes_worker.node")

MODEL = "fasth3-scripted"
SCRIPTED = "support.scripted_pipeline:ScriptedPipeline"
NUM_FRAMES = 107
SIZE = 64
TESTS = Path(__file__).parents[1]


def first_boot(folder: Path) -> Boot:
    """What the only rank of a first group is told, on the CPU."""
    return Boot(
        rank=0,
        sp=1,
        epoch=1,
        device="cpu",
        pipeline=SCRIPTED,
        options=(),
        checkpoint=folder,
        rendezvous=(folder / "rendezvous").as_uri(),
        token="one",
        listener=None,
        collective_timeout_seconds=60,
        log_level="INFO",
        log_json=True,
    )


def write_contract(path: Path) -> Path:
    """A directory with the JSON files that the control plane reads of a checkpoint, and no weights."""
    contract = {
        "schema_version": "fasth3-inference-contract-v1",
        "model_id": MODEL,
        "task": "t2av",
        "attention_backend": "VIDEO_SPARSE_ATTN_H3",
        "vsa_sparsity": 0.9,
        "vsa_tile_size": 64,
        "dmd_denoising_steps": [1000, 875, 750, 625, 500, 375, 250, 125],
        "transformer_forwards": 8,
        "num_inference_steps": 9,
        "guidance_scale": 1.0,
    }
    path.mkdir(parents=True)
    (path / "fastvideo_inference.json").write_text(json.dumps(contract))
    for folder, shift in (("scheduler", 12.0), ("audio_scheduler", 12.0)):
        (path / folder).mkdir()
        config = {"_class_name": "MiniMaxH3Scheduler", "shift": shift}
        (path / folder / "scheduler_config.json").write_text(json.dumps(config))
    return path


def keys_of(job: Job) -> set[str]:
    """Keys of everything that the result of a completed job points at."""
    assert job.result is not None
    return {job.result["key"], *(one["key"] for one in job.result["variants"].values())}


def eventually(question: Callable[[], T | None], *, seconds: float = 120.0) -> T:
    """The first true answer to `question`; the test fails when there is none in `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {answer!r} after {seconds:g} s")
        time.sleep(0.05)
    return answer


class Jobs:
    """The job table as a client and an operator would use it."""

    def __init__(self, settings: Settings) -> None:
        self._engine = create_sync_engine(settings, pool_size=2)

    def add(self, prompt: str = "a wave", **values: Any) -> str:
        """A queued job; its id."""
        columns = {
            "id": new_video_id(),
            "project": "default",
            "model": MODEL,
            "prompt": prompt,
            "seed": 7,
            "width": SIZE,
            "height": SIZE,
            "num_frames": NUM_FRAMES,
            "request": {},
            "max_attempts": 3,
        }
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            return insert_job(session, **(columns | values)).id

    def get(self, job_id: str) -> Job:
        with Session(self._engine, expire_on_commit=False) as session:
            return session.get_one(Job, job_id)

    def cancel(self, job_id: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == job_id).values(cancel_requested_at=func.now()))

    def delete(self, job_id: str) -> None:
        self._one(jobs.delete_job(job_id, project="default"))

    def drain(self, replica_id: str) -> None:
        """What an operator asks of one replica."""
        with self._engine.begin() as connection:
            assert connection.execute(replicas.request_drain(replica_id)).one_or_none() is not None

    def resume(self, replica_id: str) -> None:
        with self._engine.begin() as connection:
            assert connection.execute(replicas.cancel_drain(replica_id)).one_or_none() is not None

    def reap(self) -> None:
        """What the dispatcher does about leases that ran out."""
        with self._engine.begin() as connection:
            connection.execute(jobs.reap())

    @contextmanager
    def start_refused(self, job_id: str) -> Iterator[None]:
        """The database breaks off every start of this job."""
        with self._engine.begin() as connection:
            connection.execute(
                text(f"ALTER TABLE jobs ADD CONSTRAINT no_start CHECK (id <> '{job_id}' OR state <> 'running')")
            )
        try:
            yield
        finally:
            with self._engine.begin() as connection:
                connection.execute(text("ALTER TABLE jobs DROP CONSTRAINT no_start"))

    def end_lease(self, job_id: str) -> None:
        """Have the lease of a held job run out, and its job reaped."""
        with self._engine.begin() as connection:
            late = func.now() - timedelta(seconds=5)
            connection.execute(update(Job).where(Job.id == job_id).values(lease_until=late))
            connection.execute(jobs.reap())

    def pass_lease(self, job_id: str) -> None:
        """Have as much time go by as the lease of a job lasts whose holder is dead, and was silent for that long."""
        held = self.get(job_id)
        assert held.lease_until is not None
        late = held.lease_until - datetime.now(UTC) + timedelta(seconds=5)
        with self._engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == job_id).values(lease_until=Job.lease_until - late))
            silent = update(Replica).where(Replica.id == held.lease_owner)
            connection.execute(silent.values(last_seen=Replica.last_seen - late))

    def break_connections(self) -> None:
        """End every other connection to this database, in whatever transaction it is."""
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )

    @contextmanager
    def outage(self) -> Iterator[None]:
        """This database accepts no connection, and has none."""
        server = create_engine(self._engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
        name = self._engine.url.database
        with server.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
            )
            try:
                yield
            finally:
                connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
        server.dispose()

    def seconds_in_open_transactions(self) -> float:
        """How long the oldest transaction that does nothing has been open."""
        with self._engine.connect() as connection:
            age: float = connection.execute(
                text(
                    "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - state_change)), 0)::float "
                    "FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
                )
            ).scalar_one()
        return age

    def attempts(self, job_id: str) -> Sequence[JobAttempt]:
        with Session(self._engine, expire_on_commit=False) as session:
            return session.scalars(jobs.attempts(job_id)).all()

    def states(self, job_id: str) -> list[str]:
        """Every state that the job has been in, in order."""
        with Session(self._engine) as session:
            events = select(JobEvent.new_state).where(JobEvent.job_id == job_id).order_by(JobEvent.id)
            return list(session.scalars(events))

    def entered(self, job_id: str, state: JobState) -> datetime:
        """When the job was in `state` for the first time."""
        with Session(self._engine) as session:
            event = select(JobEvent.at).where(JobEvent.job_id == job_id, JobEvent.new_state == state)
            return session.scalars(event.order_by(JobEvent.id).limit(1)).one()

    def replicas(self) -> list[Replica]:
        with Session(self._engine, expire_on_commit=False) as session:
            return list(session.scalars(select(Replica).where(Replica.state != "stopped").order_by(Replica.id)))

    def all_replicas(self) -> list[Replica]:
        with Session(self._engine, expire_on_commit=False) as session:
            return list(session.scalars(select(Replica).order_by(Replica.started_at)))

    def wait_for(self, job_id: str, *states: JobState, seconds: float = 120.0) -> Job:
        """The job once it is in one of `states`."""

        def reached() -> Job | None:
            job = self.get(job_id)
            return job if job.state in states else None

        return eventually(reached, seconds=seconds)

    def wait_for_step(self, job_id: str, step: int) -> Job:
        """The job once `step` denoise steps were reported."""

        def reached() -> Job | None:
            job = self.get(job_id)
            return job if job.completed_steps >= step else None

        return eventually(reached)

    def wait_completed(self, job_id: str) -> Job:
        job = self.wait_for(job_id, *FINAL_STATES)
        assert job.state == JobState.COMPLETED, job.error
        return job

    def wait_ready(self, count: int = 1) -> list[Replica]:
        """The replicas once `count` of them are ready."""

        def ready() -> list[Replica] | None:
            found = [replica for replica in self.replicas() if replica.state == "ready"]
            return found if len(found) >= count else None

        return eventually(ready)

    @contextmanager
    def namesake(self, name: str) -> Iterator[None]:
        """Another replica of this name is up, in this process."""
        row: dict[str, Any] = {"layout": "r1s1", "model": "m", "device": "cpu", "state": "ready", "epoch": 1}
        replica_id = f"{name}#0-0"
        with self._engine.begin() as connection:
            connection.execute(
                replicas.upsert_replica(replica_id, pool="other", job_id=None, detail=process_detail(), **row)
            )
            # however long this takes
            late = update(Replica).where(Replica.id == replica_id).values(last_seen=func.now() + timedelta(hours=1))
            connection.execute(late)
        yield
        with self._engine.begin() as connection:
            connection.execute(delete(Replica).where(Replica.id == replica_id))

    def close(self) -> None:
        self._engine.dispose()

    def _one(self, statement: ReturningUpdate[Job]) -> Job:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            return session.scalars(statement).one()


class Worker:
    """A running `rushes worker`; what it still runs when the test ends is killed with it.

    Args:
        python: the interpreter that runs it and starts its supervisors; without one it is a fork.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        *,
        layout: str = "r1s1",
        device: str = "cpu",
        nodes: int = 1,
        env: dict[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self._start(settings, log, ["support.worker_process", layout, device, str(nodes)], env, python=python)

    def _start(
        self,
        settings: Settings,
        log: Path,
        arguments: Sequence[str],
        env: dict[str, str] | None,
        behind: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        self.log = log
        environment = settings_environment(settings) | {"PYTHONPATH": str(TESTS)} | (env or {})
        if not behind and python is None:
            self._process = Forked(arguments[0], arguments[1:], env=environment, log=log)
            return
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*behind, python or sys.executable, "-P", "-m", "rushes_core.starting", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log.read_text())
        if self._process.poll() is None:
            # its supervisors, ranks and media processes end with it
            self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, *, seconds: float = 180.0) -> int:
        return self._process.wait(seconds)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log records of event `name` so far."""
        return [record for record in self._records() if record.get("event") == name]

    def _records(self) -> Iterator[dict[str, Any]]:
        for line in self.log.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def descendants(self) -> list[int]:
        """Process numbers of everything that it runs."""
        return descendants(self._process.pid)

    @property
    def supervisors(self) -> list[int]:
        """Their process numbers."""
        return children(self._process.pid)


StartWorker = Callable[..., Worker]
"""Starts one: `layout`, `env`, `log`, and what is other than the settings."""


@contextmanager
def starting_workers(settings: Settings, log: Path) -> Iterator[StartWorker]:
    """What starts workers that end with the context."""
    usual = log
    with ExitStack() as running:

        def start(
            *,
            layout: str = "r1s1",
            env: dict[str, str] | None = None,
            log: Path | None = None,
            python: str | None = None,
            **changes: Any,
        ) -> Worker:
            chosen = settings.model_copy(update=changes)
            return running.enter_context(Worker(chosen, log or usual, layout=layout, env=env, python=python))

        yield start


class JoiningNode(Worker):
    """A running `rushes worker --join`.

    Args:
        behind: a command that runs it somewhere else, as the process that is started.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        address: str,
        *,
        env: dict[str, str] | None = None,
        behind: Sequence[str] = (),
    ) -> None:
        self._start(settings, log, ["support.joining_process", address], env, behind)
