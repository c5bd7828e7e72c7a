"""When jobs will start and end, from what clips took lately and what the replicas have before them.

The figures are a few seconds old: one task of the process reads them, and no request waits for that.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Any, Self

from rushes_core import backlog, replicas
from rushes_core.database import EACH_ALONE
from rushes_core.log import get_logger
from rushes_core.measured import measured
from rushes_core.models import Job, MeasuredTime, Replica
from rushes_core.predicates import IS_LEASED
from rushes_core.settings import Settings
from rushes_core.states import JobState, Phase
from rushes_core.time_limit import within
from rushes_core.video import Eta
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

log = get_logger(__name__)

REFRESH_SECONDS = 3.0
STALE_SECONDS = 15.0
"""Figures that are older say nothing any more."""
_START_SECONDS = 1.0
"""What an idle replica takes to find a job."""
_ON_RANKS = (None, Phase.ENCODING, Phase.DENOISING, Phase.DECODING)

Shape = tuple[int, int, int]
"""Width, height and frames."""


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """What clips of one shape took."""

    num_jobs: int
    run_seconds: float
    """From start to completion, of four of five."""
    ranks_seconds: float
    """The part of it for which the ranks are taken: the next job starts when they are free."""

    @classmethod
    def of(cls, row: MeasuredTime) -> Self:
        on_ranks = sum(float(row.phases.get(phase.value, 0.0)) for phase in _ON_RANKS if phase is not None)
        spread = row.run_p80 / row.run_p50 if row.run_p50 > 0 else 1.0
        return cls(row.num_jobs, row.run_p80, min(row.run_p80, on_ranks * spread) or row.run_p80)


@dataclass(frozen=True, slots=True)
class Leased:
    """A job that a replica holds."""

    is_running: bool
    phase: str | None
    shape: Shape
    started_at: datetime | None
    progress: int = 0
    owner: str | None = None
    """The replica."""


@dataclass(frozen=True)
class Outlook:
    """What forecasts are made from, as it was at one time."""

    at: datetime
    """By the database's clock."""
    clock_ahead: timedelta
    """By how much that clock is ahead of this process's."""
    shapes: Mapping[Shape, ShapeTimes]
    num_replicas: int
    """That take jobs."""
    gpus_per_replica: float | None
    """Of those that take jobs, on average."""
    leased: Sequence[Leased]
    paused: frozenset[str]
    """Projects, or `*`."""
    waiting: Mapping[int, Mapping[Shape, int]] = field(default_factory=dict[int, Mapping[Shape, int]])
    """Of the first jobs in the queues of each class, how many have which shape."""
    is_drained: bool = False
    """Whether there are replicas, and each of them was told to take no jobs."""

    def eta(self, job: Job, num_ahead: int | None) -> Eta | None:
        """When `job` starts and ends.

        None: it has ended, nothing was measured, nobody would run it, or nobody knows when it may be claimed: it waits
        for other jobs of its key or for an operator, or the jobs ahead were not counted.
        """
        if job.state.is_final or not self.shapes or not self.num_replicas:
            return None
        now = self.now()
        times = self.shapes.get((job.width, job.height, job.num_frames))
        if job.state is JobState.RUNNING:
            return None if times is None else _eta(now, None, _end(job, times, now))
        starts_at = self._start(job, num_ahead, now)
        if starts_at is None:
            return None
        return _eta(now, starts_at, None if times is None else starts_at + timedelta(seconds=times.run_seconds))

    def wait_seconds(self, num_ahead: int, *, priority: int | None = None) -> float | None:
        """How long after `at` a job starts that has so many queued ones before it; None: nobody knows.

        Args:
            priority: its class: those before it are of this one or a more urgent one. None: the least urgent.
        """
        if not self.shapes or not self.num_replicas:
            return None
        free = list(self._free)
        mean = self._mean_ahead(priority)
        # once all replicas are as far as the last one, each round of them takes as long as a clip
        rounds = max(0, num_ahead // len(free) - math.ceil((free[-1] - free[0]) / mean)) if mean else 0
        heapify(free)
        for _ in range(num_ahead - rounds * len(free)):
            heapreplace(free, free[0] + mean)
        return _START_SECONDS + free[0] + rounds * mean

    def now(self) -> datetime:
        """By the database's clock."""
        return datetime.now(UTC) + self.clock_ahead

    def _start(self, job: Job, num_ahead: int | None, now: datetime) -> datetime | None:
        if job.state is JobState.CLAIMED:
            # its replica holds it for when the running one leaves the ranks
            running = [self._seconds_left(one) for one in self._held_by(job.lease_owner) if one.is_running]
            return self.at + timedelta(seconds=sum(running))
        if job.hold is not None or not self.paused.isdisjoint((job.project, backlog.EVERYBODY)):
            return None
        if job.run_at > now and num_ahead is None:
            num_ahead = 0
        wait = None if num_ahead is None else self.wait_seconds(num_ahead, priority=job.priority)
        return None if wait is None else max(job.run_at, self.at + timedelta(seconds=wait))

    def _seconds_left(self, leased: Leased) -> float:
        """Of the ranks' time, until they are free of this job."""
        if leased.is_running and leased.phase not in _ON_RANKS:
            return 0.0
        times = self.shapes.get(leased.shape)
        seconds = self._mean_seconds if times is None else times.ranks_seconds
        if not leased.is_running or leased.started_at is None:
            return seconds
        return _left(seconds, (self.at - leased.started_at).total_seconds(), leased.progress)

    def _held_by(self, owner: str | None) -> list[Leased]:
        return [each for each in self.leased if each.owner == owner]

    @cached_property
    def _free(self) -> Sequence[float]:
        """Seconds until each replica that takes jobs is free of everything that it holds, the first one first."""
        held: dict[str | None, float] = defaultdict(float)
        for each in self.leased:
            held[each.owner] += self._seconds_left(each)
        idle = [0.0] * max(0, self.num_replicas - len(held))
        return sorted([*idle, *held.values()])[: self.num_replicas]

    def _mean_ahead(self, priority: int | None) -> float:
        """What the ranks take for a clip of those that wait in this class and more urgent ones."""
        num_jobs, seconds = 0, 0.0
        for one, shapes in self.waiting.items():
            if priority is None or one <= priority:
                for shape, count in shapes.items():
                    times = self.shapes.get(shape)
                    num_jobs += count
                    seconds += count * (self._mean_seconds if times is None else times.ranks_seconds)
        return seconds / num_jobs if num_jobs else self._mean_seconds

    @cached_property
    def _mean_seconds(self) -> float:
        """What the ranks take for a clip of those that were rendered lately."""
        num_jobs = sum(times.num_jobs for times in self.shapes.values())
        return sum(times.num_jobs * times.ranks_seconds for times in self.shapes.values()) / max(1, num_jobs)


def _end(job: Job, times: ShapeTimes, now: datetime) -> datetime:
    assert job.started_at is not None, "a running job has started"
    return now + timedelta(seconds=_left(times.run_seconds, (now - job.started_at).total_seconds(), job.progress))


def _left(seconds: float, spent: float, progress: int) -> float:
    """Of what takes so long: one that is later than most goes by what is left of it."""
    return seconds - spent if spent < seconds else seconds * (100 - progress) / 100


def _eta(now: datetime, starts_at: datetime | None, completes_at: datetime | None) -> Eta:
    def seconds(at: datetime | None) -> int | None:
        return None if at is None else math.ceil(max(at, now).timestamp())

    return Eta(starts_at=seconds(starts_at), completes_at=seconds(completes_at), confidence="p80")


class Forecast:
    """Keeps an outlook for one model that is a few seconds old."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession], *, model: str, seen_within_seconds: float) -> None:
        self._sessions = sessions
        self._model = model
        self._seen_within_seconds = seen_within_seconds
        self._outlook: Outlook | None = None
        self._read_at = float("-inf")

    @property
    def outlook(self) -> Outlook | None:
        """None: the database has not told anything lately."""
        return self._outlook if time.monotonic() - self._read_at < STALE_SECONDS else None

    @property
    def is_drained(self) -> bool:
        """Whether jobs wait until an operator resumes a replica, as far as anybody knows."""
        outlook = self.outlook
        return outlook is not None and outlook.is_drained

    def eta(self, job: Job, num_ahead: int | None) -> Eta | None:
        """When `job` starts and ends, as `Outlook.eta` tells; None without an outlook."""
        outlook = self.outlook
        return None if outlook is None else outlook.eta(job, num_ahead)

    async def run(self) -> None:
        """Read again and again, until this task is cancelled."""
        while True:
            try:
                # what takes longer says nothing any more when it comes
                await within(self.refresh(), STALE_SECONDS)
            except (SQLAlchemyError, OSError) as error:
                log.debug("forecast_failed", error=str(error).splitlines()[0])
            except Exception:
                log.exception("forecast_failed")
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        began = time.monotonic()
        async with self._sessions() as session:
            await session.connection(execution_options=EACH_ALONE)
            self._outlook = await self._read(session)
        self._read_at = began

    async def _read(self, session: AsyncSession) -> Outlook:
        now: datetime = (await session.execute(select(func.now()))).scalar_one()
        clock_ahead = now - datetime.now(UTC)
        shapes = (await session.execute(measured(self._model))).scalars()
        of_model = replicas.up(seen_within_seconds=self._seen_within_seconds).where(Replica.model == self._model)
        up = (await session.execute(of_model)).scalars().all()
        undrained = [replica for replica in up if replica.drain_requested_at is None]
        sizes = [num_gpus(replica.layout) for replica in undrained if replica.state in ("ready", "busy")]
        shape_columns = (Job.width, Job.height, Job.num_frames)
        leased = select(Job.state, Job.phase, *shape_columns, Job.started_at, Job.progress, Job.lease_owner)
        held = (await session.execute(leased.where(IS_LEASED, Job.model == self._model))).all()
        pauses = (await session.execute(backlog.queue_pauses())).scalars()
        waiting: dict[int, dict[Shape, int]] = defaultdict(dict)
        for priority, *shape, count in (await session.execute(backlog.shapes_waiting(self._model))).all():
            waiting[priority][(shape[0], shape[1], shape[2])] = count
        return Outlook(
            at=now,
            clock_ahead=clock_ahead,
            shapes={(row.width, row.height, row.num_frames): ShapeTimes.of(row) for row in shapes},
            num_replicas=len(sizes),
            gpus_per_replica=sum(sizes) / len(sizes) if sizes else None,
            leased=[_leased(row) for row in held],
            paused=frozenset(pause.project for pause in pauses),
            waiting=waiting,
            is_drained=bool(up) and not undrained,
        )


def _leased(row: Any) -> Leased:
    shape = (row.width, row.height, row.num_frames)
    return Leased(row.state is JobState.RUNNING, row.phase, shape, row.started_at, row.progress, row.lease_owner)


def num_gpus(layout: str) -> int:
    """Devices of each replica of a layout `rRsS`: R replicas of S each."""
    return int(layout.rpartition("s")[2])


@asynccontextmanager
async def forecasting(
    settings: Settings, sessions: async_sessionmaker[AsyncSession], *, model: str
) -> AsyncGenerator[Forecast]:
    """A forecast that is kept up to date until the end of the context."""
    forecast = Forecast(sessions, model=model, seen_within_seconds=settings.lease_seconds)
    read = asyncio.create_task(forecast.run())
    try:
        yield forecast
    finally:
        read.cancel()
        await asyncio.wait({read})
