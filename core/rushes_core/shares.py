"""What becomes of projects' shares of the GPUs between claims. Nothing here executes.

Projects are compared by `project_shares.virtual_time`, which `claims` moves on. What a project lags behind others is
its due while it has work that waits: nothing but claims of its own makes up for it. A project without any has no due
of its own: when it comes back it goes on where that one of the others is that has had least.
"""

from sqlalchemy import CTE, ColumnElement, Float, Update, and_, exists, func, or_, select, update

from rushes_core import replicas
from rushes_core.backlog import in_lane, lanes
from rushes_core.campaigns.tables import Campaign, CampaignCount
from rushes_core.models import ApiKey, Job, ProjectShare, QueuePause, Replica

SETTLE_SECONDS = 1.0
"""How often `forgive_lag` and `bound_lag` are run."""
NO_SHARE = float("-inf")
"""`virtual_time` of a project that starts where the others are, whatever attempts of it still run."""
MOST_LAG_SECONDS = 300.0
"""Of all GPUs that are up and serve: a project whose work waits for something else than its turn is owed no more."""


def forgive_lag() -> Update:
    """Let projects without work that waits start where the others are. Shares that a claim is changing are left."""
    busy = _busy()
    least = select(func.min(ProjectShare.virtual_time)).where(
        ProjectShare.virtual_time > 0, ProjectShare.project.in_(select(busy.c.project))
    )
    # what one has had more than the others is not forgiven
    lags = and_(
        ProjectShare.virtual_time > 0,
        ProjectShare.virtual_time < least.scalar_subquery(),
        ProjectShare.project.not_in(select(busy.c.project)),
    )
    return _change(lags).values(virtual_time=NO_SHARE)


def bound_lag(*, seen_within_seconds: float) -> Update:
    """Owe no project more than `MOST_LAG_SECONDS`.

    Args:
        seen_within_seconds: how long a replica may be silent and still be up.
    """
    up = replicas.up(seen_within_seconds=seen_within_seconds).where(Replica.state.in_(("ready", "busy"))).subquery()
    gpus = select(func.sum(func.substring(up.c.layout, "s([0-9]+)$").cast(Float)))
    latest = select(func.max(ProjectShare.last_start)).scalar_subquery()
    bound = latest - MOST_LAG_SECONDS * func.coalesce(gpus.scalar_subquery(), 1.0)
    return _change(and_(ProjectShare.virtual_time > 0, ProjectShare.virtual_time < bound)).values(virtual_time=bound)


def _change(condition: ColumnElement[bool]) -> Update:
    found = (
        select(ProjectShare.project)
        .where(condition)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("found")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return (
        update(ProjectShare).where(ProjectShare.project == found.c.project).execution_options(synchronize_session=False)
    )


def _busy() -> CTE:
    """Projects with a job that may be claimed, or with campaigns whose jobs are being opened, though none is open."""
    lane = lanes()
    paused = select(QueuePause.project)
    claimable = select(lane.c.project).where(
        exists(select(Job.id).where(in_lane(lane), Job.run_at <= func.now())), lane.c.project.not_in(paused)
    )
    num_queued = select(func.sum(CampaignCount.queued)).where(CampaignCount.campaign_id == Campaign.id)
    opening = select(Campaign.project).where(
        Campaign.state == "in_progress",
        Campaign.hold_reason.is_(None),
        # these wait for jobs of their own
        Campaign.max_parallel.is_(None),
        or_(Campaign.proof_count.is_(None), Campaign.proof_state == "approved"),
        ~exists().where(ApiKey.id == Campaign.api_key, ApiKey.max_running.is_not(None)),
        Campaign.project.not_in(paused),
        num_queued.scalar_subquery() > 0,
    )
    return claimable.union(opening).cte("busy")
