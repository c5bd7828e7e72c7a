"""What Prometheus scrapes: requests of all processes behind this port, and the queue and the replicas as the database
has them."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from rushes_core import backlog, beats, ends, measured, replicas
from rushes_core.campaigns import foresight
from rushes_core.campaigns import statements as campaigns
from rushes_core.campaigns.tables import ACTIVE_STATES
from rushes_core.database import EACH_ALONE
from rushes_core.fields import PRIORITIES
from rushes_core.holds import CAMPAIGN, CONCURRENCY
from rushes_core.log import get_logger
from rushes_core.states import JobState
from rushes_core.webhooks import deliveries, endpoints
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rushes_api.campaign_metrics import NUM_CAMPAIGNS, Fulfilled, forecast_figures
from rushes_api.eta import num_gpus
from rushes_api.figures import figures_folder, forget_dead
from rushes_api.job_histograms import JobHistograms

log = get_logger(__name__)

KEPT_SECONDS = 1.0
"""How long what the database said is told again, however often somebody scrapes."""
QUANTILES = (0.5, 0.8, 0.95)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the database said at one time."""

    at: float
    """By the monotonic clock."""
    queue: Sequence[Any]
    replicas: Sequence[Any]
    recent: Sequence[Any]
    num_paused: int
    ends: Mapping[tuple[str, str], int]
    """How many jobs ended, by state and code."""
    silences: Mapping[str, float]
    webhooks: Any
    webhook_endpoints: Sequence[Any]
    campaigns: Mapping[str, int]
    fulfilled: Sequence[Fulfilled]


class Metrics:
    """The figures of the API: of this process, or of all that count into one folder."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        folder = figures_folder()
        own = self._registry if folder is None else None
        if folder is not None:
            forget_dead(folder)
            MultiProcessCollector(self._registry, folder)
        self._requests = Counter(
            "rushes_http_requests",
            "Requests that were answered",
            ["method", "route", "status"],
            registry=own,
        )
        self._seconds = Histogram(
            "rushes_http_request_seconds",
            "Seconds until an answer began",
            ["route"],
            buckets=_BUCKETS,
            registry=own,
        )
        self._waiting = Gauge(
            "rushes_http_waiting", "Requests that wait for jobs", registry=own, multiprocess_mode="livesum"
        )
        self._database = _DatabaseFigures()
        self._registry.register(self._database)

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request is being answered."""
        self._requests.labels(method if method in _METHODS else _OTHER, route, str(int(status))).inc()
        self._seconds.labels(route).observe(seconds)

    def note_waiting(self, count: int) -> None:
        """So many requests of this process wait for jobs now."""
        self._waiting.set(count)

    async def text(self, sessions: async_sessionmaker[AsyncSession], *, seen_within_seconds: float) -> bytes:
        """Everything in the text format. While the database is away, what it would say is missing."""
        await self._database.refresh(sessions, seen_within_seconds=seen_within_seconds)
        return generate_latest(self._registry)


class CountRequests:
    """ASGI middleware outside of everything else: every answer is counted by its route and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # whatever paths people make up is one route
                route = getattr(scope.get("route"), "path", _OTHER)
                self._metrics.note(scope["method"], route, message["status"], time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, noting)


class _DatabaseFigures(Collector):
    def __init__(self) -> None:
        self._reading: _Reading | None = None
        self._histograms = JobHistograms()

    async def refresh(self, sessions: async_sessionmaker[AsyncSession], *, seen_within_seconds: float) -> None:
        if self._reading is not None and time.monotonic() - self._reading.at < KEPT_SECONDS:
            return
        try:
            async with sessions() as session:
                await session.connection(execution_options=EACH_ALONE)
                await self._histograms.refresh(session)
                self._reading = await _read(session, seen_within_seconds)
        except (DBAPIError, PoolTimeout, OSError) as error:
            log.warning("metrics_incomplete", error=str(error).splitlines()[0])
            self._reading = None

    def collect(self) -> Iterable[Metric]:
        reading = self._reading
        yield GaugeMetricFamily("rushes_database_up", "Whether the database answered", value=float(reading is not None))
        if reading is not None:
            yield from _queue_figures(reading)
            yield _end_figures(reading)
            yield _silence_figures(reading)
            yield _campaign_figures(reading)
            yield from forecast_figures(reading.fulfilled)
            yield from _replica_figures(reading)
            yield from _time_figures(reading)
            yield from self._histograms.families()
            yield from _webhook_figures(reading)


async def _read(session: AsyncSession, seen_within_seconds: float) -> _Reading:
    queue = (await session.execute(backlog.overview())).all()
    up = (await session.execute(replicas.up(seen_within_seconds=seen_within_seconds))).scalars().all()
    recent = (await session.execute(measured.recent(QUANTILES))).all()
    pauses = (await session.execute(backlog.queue_pauses())).scalars().all()
    num_ended = {(row[0], row[1]): int(row[2]) for row in (await session.execute(ends.counts())).all()}
    silences = {row[0]: float(row[1]) for row in (await session.execute(beats.silences())).all()}
    webhooks = (await session.execute(deliveries.standing())).one()
    endpoint_states = (await session.execute(endpoints.states())).all()
    active = {row[0]: row[1] for row in (await session.execute(campaigns.num_active_by_state())).all()}
    ended = (await session.execute(foresight.fulfilled(NUM_CAMPAIGNS))).all()
    fulfilled = [Fulfilled(told, ended_at) for told, ended_at in ended if ended_at is not None]
    return _Reading(
        at=time.monotonic(),
        queue=queue,
        replicas=up,
        recent=recent,
        num_paused=len(pauses),
        ends=num_ended,
        silences=silences,
        webhooks=webhooks,
        webhook_endpoints=endpoint_states,
        campaigns=active,
        fulfilled=fulfilled,
    )


def _queue_figures(reading: _Reading) -> Iterable[Metric]:
    depth = GaugeMetricFamily("rushes_queue_depth", "Queued jobs, those that are held too", labels=["priority"])
    held = GaugeMetricFamily("rushes_queue_held", "Queued jobs over their key's max_running", labels=["priority"])
    unopened = GaugeMetricFamily(
        "rushes_queue_in_campaigns", "Queued jobs that their campaign has not opened", labels=["priority"]
    )
    early = GaugeMetricFamily("rushes_queue_early", "Other queued jobs whose time has not come", labels=["priority"])
    paused = GaugeMetricFamily("rushes_queue_paused", "Other queued jobs of paused projects", labels=["priority"])
    ready = GaugeMetricFamily("rushes_queue_ready", "Queued jobs that may start", labels=["priority"])
    oldest = GaugeMetricFamily(
        "rushes_queue_oldest_seconds", "Since when the first one that may start might have", labels=["priority"]
    )
    running = GaugeMetricFamily("rushes_jobs_in_progress", "Jobs that replicas hold", labels=["priority"])
    for name, value in PRIORITIES.items():
        rows = [row for row in reading.queue if row.priority == value]
        queued = [row for row in rows if row.state == JobState.QUEUED]
        depth.add_metric([name], sum(row.num_jobs for row in queued))
        held.add_metric([name], sum(row.num_jobs for row in queued if row.hold == CONCURRENCY))
        unopened.add_metric([name], sum(row.num_jobs for row in queued if row.hold == CAMPAIGN))
        free = [row for row in queued if row.hold is None]
        unpaused = [row for row in free if not row.is_paused]
        early.add_metric([name], sum(row.num_early for row in free))
        paused.add_metric([name], sum(row.num_jobs - row.num_early for row in free if row.is_paused))
        ready.add_metric([name], sum(row.num_jobs - row.num_early for row in unpaused))
        oldest.add_metric([name], max((row.waiting_seconds or 0.0 for row in unpaused), default=0.0))
        running.add_metric([name], sum(row.num_jobs for row in rows if row.state != JobState.QUEUED))
    yield from (depth, held, unopened, early, paused, ready, oldest, running)
    yield GaugeMetricFamily(
        "rushes_queues_paused", "Projects that are paused; all of them count as one", value=reading.num_paused
    )


def _end_figures(reading: _Reading) -> Metric:
    family = CounterMetricFamily(
        "rushes_jobs_ended", "Ends of jobs, of retried ones each, by the code of the error", labels=["state", "code"]
    )
    # from the beginning, for the first of each kind to be seen as an increase
    for state, code in sorted({*ends.KNOWN, *reading.ends}):
        family.add_metric([state, code], reading.ends.get((state, code), 0))
    return family


def _silence_figures(reading: _Reading) -> Metric:
    family = GaugeMetricFamily(
        "rushes_process_silent_seconds",
        "Since a dispatcher or a sender did its work, or a loader ran; infinite if none ever did",
        labels=["process"],
    )
    for process in beats.PROCESSES:
        family.add_metric([process], reading.silences.get(process, math.inf))
    return family


def _campaign_figures(reading: _Reading) -> Metric:
    family = GaugeMetricFamily("rushes_campaigns", "Campaigns that have not ended", labels=["state"])
    for state in ACTIVE_STATES:
        family.add_metric([state], reading.campaigns.get(state, 0))
    return family


def _replica_figures(reading: _Reading) -> Iterable[Metric]:
    labels = ["model", "status"]
    replicas_up = GaugeMetricFamily("rushes_replicas", "Replicas that were heard of lately", labels=labels)
    gpus = GaugeMetricFamily("rushes_gpus", "Devices that they have", labels=labels)
    layouts: dict[tuple[str, str], list[str]] = {}
    for replica in reading.replicas:
        layouts.setdefault((replica.model, replica.state), []).append(replica.layout)
    for values, found in sorted(layouts.items()):
        replicas_up.add_metric(values, len(found))
        gpus.add_metric(values, sum(map(num_gpus, found)))
    return replicas_up, gpus


def _webhook_figures(reading: _Reading) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "rushes_webhooks_waiting", "Deliveries that wait to be sent, or sent again", value=reading.webhooks.num_waiting
    )
    yield GaugeMetricFamily(
        "rushes_webhook_lag_seconds",
        "Since when the first that is due might have been sent",
        value=reading.webhooks.lag,
    )
    family = GaugeMetricFamily("rushes_webhook_endpoints", "Registered endpoints", labels=["state"])
    counts = dict(reading.webhook_endpoints)
    for state in ("enabled", "paused", "disabled"):
        family.add_metric([state], counts.get(state, 0))
    yield family


def _time_figures(reading: _Reading) -> Iterable[Metric]:
    labels = ["size", "num_frames", "quantile"]
    runs = GaugeMetricFamily("rushes_recent_run_seconds", "Seconds that the last completed jobs ran", labels=labels)
    waits = GaugeMetricFamily("rushes_recent_wait_seconds", "Seconds that they had waited", labels=labels)
    counts = GaugeMetricFamily("rushes_recent_jobs", "How many they are", labels=labels[:2])
    for row in reading.recent:
        shape = [f"{row.width}x{row.height}", str(row.num_frames)]
        counts.add_metric(shape, row.num_jobs)
        for family, values in ((runs, row.run), (waits, row.wait)):
            for quantile, value in zip(QUANTILES, values or (), strict=False):
                if value is not None:
                    family.add_metric([*shape, str(quantile)], value)
    return runs, waits, counts
