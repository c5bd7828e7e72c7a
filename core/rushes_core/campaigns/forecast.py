"""When a campaign will be done, from what clips took lately and with whom it shares the replicas.

There is no forecast before enough clips were measured, while nothing of the campaign may run, or while no replica is
up: a figure that somebody would plan by is worse than none.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Double, Float, Integer, Select, and_, func, literal, or_, select
from sqlalchemy.orm import aliased

from rushes_core.backlog import EVERYBODY, lanes
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.windows import Window
from rushes_core.measured import RunTimes
from rushes_core.models import Project, QueuePause, Replica

MIN_MEASURED = 20
"""Completed clips before which nothing is said."""
_UNSEEN = 0.1
"""What nobody can know: replicas that come and go, other projects' work. Part of the time that nine of ten need."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """All of it is null where nothing can be said."""

    gpu_seconds: float | None = None
    """What is left to do takes on one replica after another, times the GPUs of each."""
    p50: datetime | None = None
    """When half of such campaigns would be done."""
    p90: datetime | None = None
    """When nine of ten would."""
    basis: str | None = None
    fits_window: bool | None = None
    """Whether it is done, in nine of ten cases, before its window closes next; also null without a window."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a campaign may count on.

    Args:
        num_replicas: that take jobs of its model.
        gpus: of each, on average.
        share: of them, from 0 to 1.
    """

    num_replicas: int
    gpus: float = 1.0
    share: float = 1.0


def of(
    *,
    num_jobs: int,
    cost: float,
    times: RunTimes,
    capacity: Capacity,
    now: datetime,
    max_parallel: int | None = None,
    not_before: datetime | None = None,
    window: Window | None = None,
    is_held: bool = False,
) -> Forecast:
    """
    Args:
        num_jobs: that are not done.
        cost: their frames times pixels / 10,000, as `campaign_counts.remaining_cost`.
        is_held: nobody knows when it may go on: it is paused, waits for approval, or its budget is used up.
    """
    if num_jobs <= 0 or times.seconds_per_cost is None or times.num_jobs < MIN_MEASURED:
        return Forecast()
    seconds = cost * times.seconds_per_cost
    basis = f"last {times.num_jobs} clips"
    gpu_seconds = round(seconds * capacity.gpus, 3)
    parallel = min(capacity.num_replicas * capacity.share, max_parallel or math.inf, num_jobs)
    if is_held or parallel <= 0:
        return Forecast(gpu_seconds=gpu_seconds, basis=basis)
    clip = seconds / num_jobs
    # each replica begins the next clip when the ranks are free; the last one is waited for to its end
    usual = max(clip, (seconds - clip) * times.busy_share / parallel + clip)
    # single clips even out, an error of the measurement itself does not
    spread = clip * (times.spread - 1)
    late = usual * (1 + _UNSEEN + (times.spread - 1) / math.sqrt(times.num_jobs))
    late += spread * (math.sqrt(num_jobs) / parallel + 1)
    begins = max(now, not_before or now)
    p50, p90 = (_after(begins, took, window) for took in (usual, late))
    return Forecast(gpu_seconds, p50, p90, basis, _fits(begins, p90, window))


def _after(begins: datetime, seconds: float, window: Window | None) -> datetime | None:
    if window is not None:
        return window.after_open_seconds(begins, seconds)
    return begins + timedelta(seconds=min(seconds, timedelta(days=36_500).total_seconds()))


def _fits(begins: datetime, ends: datetime | None, window: Window | None) -> bool | None:
    if window is None:
        return None
    opening = window.at(begins)
    if not opening.is_open:
        if opening.until is None:
            return False
        opening = window.at(opening.until)
    return ends is not None and (opening.until is None or ends <= opening.until)


def of_campaign(
    campaign: Campaign, *, num_jobs: int, cost: float, times: RunTimes, capacity: Capacity, now: datetime
) -> Forecast:
    """Of a campaign as it stands: what it was asked to keep to is kept to."""
    return of(
        num_jobs=num_jobs if campaign.state == "in_progress" and campaign.loaded_at is not None else 0,
        cost=cost,
        times=times,
        capacity=capacity,
        now=now,
        max_parallel=campaign.max_parallel,
        not_before=campaign.not_before,
        window=None if campaign.window is None else Window.parse(campaign.window),
        is_held=campaign.paused_at is not None or campaign.hold_reason in ("paused", "approval", "budget", "quota"),
    )


def capacities(ids: Collection[str], *, seen_within_seconds: float) -> Select[str, int, float, float]:
    """What each of these campaigns may count on: its id and the members of `Capacity`.

    Of projects with work of the same class each has as much of the replicas as its weight says, and of the campaigns of
    a project each has the same.
    """
    lane, own, rival = lanes(), aliased(Project), aliased(Campaign)
    weight = func.coalesce(select(own.weight).where(own.name == Campaign.project).scalar_subquery(), 1.0)
    paused = select(QueuePause.project)
    others = (
        select(func.coalesce(func.sum(func.coalesce(Project.weight, 1.0)), 0.0))
        .select_from(lane)
        .outerjoin(Project, Project.name == lane.c.project)
        .where(
            lane.c.model == Campaign.model,
            lane.c.priority == Campaign.priority,
            lane.c.project != Campaign.project,
            lane.c.project.not_in(paused),
        )
        .correlate(Campaign)
        .scalar_subquery()
    )
    rivals = (
        select(func.count())
        .select_from(rival)
        .where(
            rival.id != Campaign.id,
            rival.project == Campaign.project,
            rival.model == Campaign.model,
            rival.priority == Campaign.priority,
            rival.state == "in_progress",
            rival.hold_reason.is_(None),
        )
        .correlate(Campaign)
        .scalar_subquery()
    )
    is_up = and_(
        Replica.model == Campaign.model,
        Replica.state.in_(("ready", "busy")),
        Replica.drain_requested_at.is_(None),
        Replica.last_seen > func.now() - timedelta(seconds=seen_within_seconds),
    )
    is_paused = or_(Campaign.project.in_(paused), literal(EVERYBODY).in_(paused))
    gpus: ColumnElement[float] = func.substring(Replica.layout, "s([0-9]+)$").cast(Float)
    share = (weight / (weight + others) / (1 + rivals)).cast(Double) * (~is_paused).cast(Integer)
    return select(
        Campaign.id,
        select(func.count()).select_from(Replica).where(is_up).correlate(Campaign).scalar_subquery(),
        func.coalesce(select(func.avg(gpus)).where(is_up).correlate(Campaign).scalar_subquery(), 1.0).cast(Double),
        share,
    ).where(Campaign.id.in_(ids))
