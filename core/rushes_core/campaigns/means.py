"""What a campaign is rendered with: the replicas, with whom it shares them, and how long clips took there lately."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import ColumnElement, Double, Float, Integer, Select, and_, func, literal, or_, select
from sqlalchemy.orm import Session, aliased

from rushes_core.backlog import EVERYBODY, lanes
from rushes_core.campaigns.forecast import Capacity, Means
from rushes_core.campaigns.tables import Campaign
from rushes_core.measured import RunTimes, measured
from rushes_core.models import Project, QueuePause, Replica


def means_of(session: Session, campaigns: Sequence[Campaign], *, seen_within_seconds: float) -> dict[str, Means]:
    """What each of these campaigns may count on, by its id.

    Args:
        seen_within_seconds: how long a replica may be silent and still be counted on.
    """
    models = {one.model for one in campaigns}
    times = {model: RunTimes.of(session.scalars(measured(model))) for model in models}
    wanted = capacities([one.id for one in campaigns], seen_within_seconds=seen_within_seconds)
    found = {row[0]: Capacity(*row[1:]) for row in session.execute(wanted)}
    # one that went meanwhile counts on nobody
    return {one.id: Means(times[one.model], found.get(one.id, Capacity(0)), one.max_parallel) for one in campaigns}


def capacities(ids: Sequence[str], *, seen_within_seconds: float) -> Select[str, int, float, float]:
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
