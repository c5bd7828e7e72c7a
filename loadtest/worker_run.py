"""A `rushes worker` that is measured: its log as it comes, its rows, its processes and the memory of its devices."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from rushes_cli.bench_lengths import prompt_text
from rushes_cli.main import UsageError
from rushes_core.arrivals import CREATE
from rushes_core.contract import load_contract
from rushes_core.database import create_sync_engine
from rushes_core.errors import RushesError
from rushes_core.ids import new_video_id
from rushes_core.models import Job, Replica
from rushes_core.served_model import model_name
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES
from rushes_worker.child import settings_environment
from sqlalchemy import func, select
from sqlalchemy.orm import Session

Record = dict[str, Any]
"""A record of the log; `at` is when it was written, in seconds since the epoch."""

STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.005
_ROLES = ("rank", "supervisor", "media", "launcher")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job asks for; `tokens` are characters of the prompt."""

    width: int
    height: int
    frames: int
    tokens: int

    @property
    def pixels(self) -> int:
        """Of the whole clip."""
        return self.width * self.height * self.frames

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}, {self.tokens} tokens"


def all_shapes(sizes: Sequence[tuple[int, int]], frames: Sequence[int], tokens: Sequence[int]) -> list[Shape]:
    """Every combination; a size is width and height."""
    return [Shape(width, height, *rest) for (width, height), *rest in product(sizes, frames, tokens)]


class WorkerRun:
    """Runs between `start` and the end of the context.

    Args:
        settings: of servers whose tables have no other jobs.
        log: where the worker's log goes.
    """

    def __init__(self, settings: Settings, *, layout: str, device: str, weights: str | None, log: Path) -> None:
        self.records: list[Record] = []
        self._settings = settings
        self._engine = create_sync_engine(settings, pool_size=1)
        self._model = model_name(settings, load_contract(settings.checkpoint))
        self._command = [sys.executable, "-P", "-m", "rushes_cli", "worker", "--layout", layout, "--device", device]
        if weights:
            self._command += ["--weights", weights]
        self._log = log
        self._read_to = 0
        self._seed = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """When it was, in seconds since the epoch."""
        began = time.time()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, env=settings_environment(self._settings), stdout=output, stderr=subprocess.STDOUT
            )
        return began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._engine.dispose()

    def queue(self, shapes: Sequence[Shape], *, max_attempts: int = 1) -> list[str]:
        """Accept one job of each shape in one transaction; their ids."""
        new = []
        for shape in shapes:
            self._seed += 1
            columns = {
                "id": new_video_id(),
                "project": "default",
                "model": self._model,
                "priority": 1,
                "prompt": prompt_text(shape.tokens),
                "seed": self._seed,
                "width": shape.width,
                "height": shape.height,
                "num_frames": shape.frames,
                "request": {},
                "max_attempts": max_attempts,
            }
            new.append(columns)
        with Session(self._engine) as session, session.begin():
            session.execute(CREATE, {"jobs": json.dumps(new)})
        return [job["id"] for job in new]

    def jobs(self, ids: Collection[str]) -> list[Job]:
        with Session(self._engine, expire_on_commit=False) as session:
            return list(session.scalars(select(Job).where(Job.id.in_(ids)).order_by(Job.id)))

    def num_open(self, ids: Collection[str]) -> int:
        """How many of these jobs have not ended."""
        with self._engine.connect() as connection:
            count = select(func.count()).where(Job.id.in_(ids), Job.state.not_in(FINAL_STATES))
            return connection.execute(count).scalar_one()

    def replicas(self) -> list[Replica]:
        """In order."""
        with Session(self._engine, expire_on_commit=False) as session:
            return list(session.scalars(select(Replica).where(Replica.state != "stopped").order_by(Replica.id)))

    def read(self) -> None:
        """Take in what the log has got since."""
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            if line.startswith(b"{"):
                record = json.loads(line)
                self.records.append(record | {"at": datetime.fromisoformat(record["timestamp"]).timestamp()})

    def until(self, is_so: Callable[[], bool], what: str, *, seconds: float, every: float = _LOOK_SECONDS) -> None:
        """Read the log until `is_so`.

        Raises:
            UsageError: the worker refuses what it was given.
            RushesError: it is not in time, or the worker has ended; with why it refused, or the end of its log.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            status = None if self._process is None else self._process.poll()
            ended = self._process is None or status is not None
            if ended or time.monotonic() > deadline:
                text = self._log.read_text()
                if ended and (refusals := [line for line in text.splitlines() if line.startswith("rushes worker: ")]):
                    raise UsageError(refusals[-1]) if status == 2 else RushesError(refusals[-1])
                why = "the worker has ended" if ended else f"not in {seconds:g} s"
                raise RushesError(f"{what}: {why}\n{text[-4_000:]}")
            time.sleep(every)
            self.read()
        self.read()

    def find(self, event: str, *, since: int = 0, **fields: Any) -> Record | None:
        """The first record of `event` with these fields, from record `since` on."""
        wanted = {"event": event, **fields}
        for record in self.records[since:]:
            if wanted.items() <= record.items():
                return record
        return None

    def until_found(self, event: str, *, seconds: float, since: int = 0, **fields: Any) -> Record:
        """As `until`, a record that `find` finds."""
        self.until(lambda: self.find(event, since=since, **fields) is not None, f"{event} {fields}", seconds=seconds)
        found = self.find(event, since=since, **fields)
        assert found is not None
        return found

    def until_idle(self, replicas: int, *, seconds: float) -> list[Replica]:
        """Every replica is ready and renders nothing; what its row says of memory is of now."""
        self.until(
            lambda: [one.state for one in self.replicas()] == ["ready"] * replicas,
            f"{replicas} replicas are ready",
            seconds=seconds,
            every=0.05,
        )
        return self.replicas()

    def processes(self) -> dict[int, str]:
        """Role of each process that the worker runs, itself included: `rank`, `supervisor`, `media` or `other`."""
        assert self._process is not None
        found = {}
        for one in psutil.Process(self._process.pid).children(recursive=True):
            try:
                words = " ".join(one.cmdline())
            except psutil.Error:
                continue
            if words:
                found[one.pid] = next((role for role in _ROLES if f"rushes_worker.{role}" in words), "other")
        return found | {self._process.pid: "launcher"}

    def resident_bytes(self) -> dict[str, int]:
        """By role, over all processes of it."""
        sums: Counter[str] = Counter()
        for pid, role in self.processes().items():
            try:
                sums[role] += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
        return dict(sums)


def present(pids: Collection[int]) -> list[int]:
    """Those that are not gone: one that was killed is, once its threads have ended and its parent has seen that."""
    return [pid for pid in pids if psutil.pid_exists(pid)]


def gpu_used_bytes() -> list[int]:
    """Memory in use on each GPU of this machine, by index; empty without any."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    return [int(line) << 20 for line in answer.stdout.split()]


def shared_segments() -> set[str]:
    """Named segments of shared memory, but for those of Postgres."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("PostgreSQL.")}
