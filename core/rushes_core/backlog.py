"""Statements on what waits: how much, how long, in which order, and whose jobs are paused."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Double,
    Integer,
    Select,
    String,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import aliased
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE, CompoundSelect

from rushes_core.campaigns.tables import Campaign, CampaignCount
from rushes_core.fields import PRIORITIES
from rushes_core.holds import CAMPAIGN, CONCURRENCY
from rushes_core.models import ApiKey, Job, ProjectShare, QueuePause, Replica
from rushes_core.predicates import IS_CLAIMABLE, IS_LEASED, IS_QUEUED, in_states
from rushes_core.states import JobState

SERVING_WINDOW = timedelta(minutes=1)
"""A replica that has been silent for longer is not woken: it will look for work by itself when it is back."""
MAX_AHEAD = 10_000
"""Where the count of jobs ahead in the queue stops."""
MAX_COUNTED = 100_000
"""Where `overview` stops to count the jobs of one project and class."""
SAMPLED_PER_LANE = 10
"""Jobs of one project and class that `shapes_waiting` looks at, the first ones."""
MAX_SAMPLED = 300
"""Jobs of one class."""
EVERYBODY = "*"
"""The project of a pause of all projects."""

_ONE = literal_column("1", Integer)


def pause_queue(project: str) -> ReturningInsert[QueuePause]:
    """Have no more jobs of a project claimed, or of all (`EVERYBODY`), until it is resumed. The pause, an earlier one
    if there is one. What a replica holds already goes on."""
    statement = upsert(QueuePause).values(project=project)
    # an update of nothing: the row comes back whether it is new or not
    statement = statement.on_conflict_do_update(index_elements=[QueuePause.project], set_={"project": project})
    return statement.returning(QueuePause)


def resume_queue(project: str) -> ReturningDelete[str]:
    """End a pause; no row: there was none. A pause of all projects and one of a single project are apart."""
    return delete(QueuePause).where(QueuePause.project == project).returning(QueuePause.project)


def queue_pauses(project: str | None = None) -> Select[QueuePause]:
    """Every pause, or those that a project feels."""
    statement = select(QueuePause).order_by(QueuePause.project)
    return statement if project is None else statement.where(QueuePause.project.in_((project, EVERYBODY)))


def overview(project: str | None = None) -> CompoundSelect[str, Any, str, int, int, Any, bool]:
    """What is queued, claimed and running, of one project or of all: one row for each state, class and hold with jobs,
    with queued jobs of paused projects, if nothing else holds them, in rows of their own.

    Columns: `state`, `priority`, `hold`, `num_jobs`, `num_early`, those of them whose time to be claimed has not come,
    `waiting_seconds` of the queued job that has waited longest since it might have been claimed; null while none
    may be; and `is_paused`. Queued jobs are counted up to `MAX_COUNTED` for each project, class and model, held ones
    for each key; those that wait with their campaign are of its class.
    """
    lane, key = lanes(), _keys()
    open_ = select(Job.run_at).where(in_lane(lane)).order_by(Job.run_at).limit(MAX_COUNTED)
    open_rows = open_.correlate(lane).lateral("open")
    held = (
        select(Job.priority, Job.hold, Job.run_at)
        .where(IS_QUEUED, Job.api_key == key.c.api_key, Job.hold == CONCURRENCY)
        .order_by(Job.hold, Job.priority, Job.run_at)
        .limit(MAX_COUNTED)
    )
    held_rows = held.correlate(key).lateral("held")
    queued, no_hold = literal(JobState.QUEUED.value, String), null().cast(String)
    paused = select(QueuePause.project)
    is_paused = or_(lane.c.project.in_(paused), literal(EVERYBODY).in_(paused))
    each = select(lane.c.priority, open_rows.c.run_at, is_paused.label("is_paused")).join(open_rows, true())
    if project is not None:
        each = each.where(lane.c.project == project)
    opened = each.subquery("opened")
    of_open = select(
        queued.label("state"),
        opened.c.priority,
        no_hold.label("hold"),
        func.count().label("num_jobs"),
        _num_early(opened.c.run_at).label("num_early"),
        _seconds_since(func.min(opened.c.run_at)).label("waiting_seconds"),
        opened.c.is_paused,
    ).group_by(opened.c.priority, opened.c.is_paused)
    of_held = (
        select(
            queued,
            held_rows.c.priority,
            held_rows.c.hold,
            func.count(),
            _num_early(held_rows.c.run_at),
            _seconds_since(func.min(held_rows.c.run_at)),
            false(),
        )
        .select_from(key)
        .join(held_rows, true())
        .group_by(held_rows.c.priority, held_rows.c.hold)
    )
    state = Job.state.cast(String)
    leased = (
        select(state, Job.priority, no_hold, func.count(), literal_column("0", Integer), null().cast(Double), false())
        .where(IS_LEASED)
        .group_by(state, Job.priority)
    )
    if project is not None:
        of_held = of_held.join(ApiKey, ApiKey.id == key.c.api_key).where(ApiKey.project == project)
        leased = leased.where(Job.project == project)
    return union_all(of_open, of_held, _in_campaigns(project), leased)


def _in_campaigns(project: str | None) -> Select[*tuple[Any, ...]]:
    """Jobs that their campaigns have not opened, as a part of `overview`: by the counters, less those that are open."""
    counted = select(func.coalesce(func.sum(CampaignCount.queued), 0)).where(CampaignCount.campaign_id == Campaign.id)
    # as the index of open jobs has it
    is_open = and_(in_states(JobState.QUEUED), text("hold IS DISTINCT FROM 'campaign'"))
    open_ = select(func.count()).select_from(Job).where(Job.campaign_id == Campaign.id, is_open)
    waiting = counted.correlate(Campaign).scalar_subquery() - open_.correlate(Campaign).scalar_subquery()
    each = select(Campaign.priority.label("priority"), waiting.label("waiting")).where(
        Campaign.state.in_(("validating", "in_progress", "cancelling"))
    )
    if project is not None:
        each = each.where(Campaign.project == project)
    rows = each.subquery("campaigns_waiting")
    return (
        select(
            literal(JobState.QUEUED.value, String),
            rows.c.priority,
            literal(CAMPAIGN, String),
            func.sum(rows.c.waiting).cast(BigInteger),
            literal_column("0", Integer),
            null().cast(Double),
            false(),
        )
        .where(rows.c.waiting > 0)
        .group_by(rows.c.priority)
    )


def _num_early(run_at: ColumnElement[datetime]) -> ColumnElement[int]:
    return func.count().filter(run_at > func.now())


def _seconds_since(at: ColumnElement[datetime]) -> ColumnElement[Any]:
    seconds = func.extract("epoch", func.now() - at).cast(Double)
    return case((seconds > 0, seconds))


def num_ahead(job: Job) -> Select[int]:
    """About how many queued jobs are claimed before `job`, counted up to `MAX_AHEAD`.

    All of a more urgent class, the older ones of its project, and of each other project as many as those; before a held
    job also those of its key that are opened earlier. Paused projects take no turns.
    """
    ready = and_(IS_CLAIMABLE, Job.model == job.model, Job.run_at <= func.now())
    same_class = Job.priority == job.priority
    place = tuple_(Job.run_at, Job.id)
    older = place < tuple_(literal(job.run_at), literal(job.id))
    paused = select(QueuePause.project)
    takes_turns = or_(Job.project == job.project, Job.project.not_in(paused))
    urgent = select(_ONE).where(ready, Job.priority < job.priority, takes_turns).limit(MAX_AHEAD)
    own = select(_ONE.label("one")).where(ready, same_class, Job.project == job.project, older).limit(MAX_AHEAD)
    if job.hold is not None:
        opened_before = tuple_(Job.priority, Job.run_at, Job.id) < tuple_(
            literal(job.priority), literal(job.run_at), literal(job.id)
        )
        held = select(_ONE).where(IS_QUEUED, Job.api_key == job.api_key, Job.hold == job.hold, opened_before)
        own = select(union_all(own, held.where(Job.run_at <= func.now()).limit(MAX_AHEAD)).subquery().c.one)
    num_own = select(func.count()).select_from(own.subquery()).scalar_subquery()
    each = (
        select(_ONE.label("one"))
        .where(ready, same_class, Job.project == ProjectShare.project)
        .limit(num_own)
        .correlate(ProjectShare)
        .lateral("each")
    )
    others = (
        select(each.c.one)
        .select_from(ProjectShare)
        .join(each, true())
        .where(ProjectShare.project != job.project, ProjectShare.project.not_in(paused))
        .limit(MAX_AHEAD)
    )
    ahead = union_all(urgent, own, others).limit(MAX_AHEAD).subquery()
    return select(func.count()).select_from(ahead)


def shapes_waiting(model: str) -> Select[int, int, int, int, int]:
    """Sizes and lengths of the first queued jobs of each project and class.

    Columns: `priority`, `width`, `height`, `num_frames` and `num_jobs`, of at most `MAX_SAMPLED` jobs of each class,
    however many wait. Paused projects take no turns.
    """
    is_any_paused = exists().where(QueuePause.project == EVERYBODY)
    each = [select(_sampled(model, priority).subquery()) for priority in PRIORITIES.values()]
    sampled = union_all(*each).subquery("sampled")
    columns = (sampled.c.priority, sampled.c.width, sampled.c.height, sampled.c.num_frames)
    return select(*columns, func.count().label("num_jobs")).where(~is_any_paused).group_by(*columns)


def _sampled(model: str, priority: int) -> Select[int, int, int, int]:
    """What `shapes_waiting` counts of one class: its `priority` and each job's shape."""
    lane = lanes(model, priority)
    first = (
        select(Job.width, Job.height, Job.num_frames)
        .where(in_lane(lane), Job.run_at <= func.now())
        .order_by(Job.run_at, Job.id)
        .limit(SAMPLED_PER_LANE)
        .correlate(lane)
        .lateral("first_in_lane")
    )
    return (
        select(lane.c.priority, first.c.width, first.c.height, first.c.num_frames)
        .select_from(lane)
        .join(first, true())
        .where(lane.c.project.not_in(select(QueuePause.project)))
        .limit(MAX_SAMPLED)
    )


def num_ready(*, pool: str, limit: int) -> Select[int]:
    """Jobs that a replica of the pool could claim now, counted up to `limit`."""
    lane = lanes()
    is_served = exists().where(
        Replica.model == lane.c.model,
        Replica.pool == pool,
        Replica.state.in_(("ready", "busy")),
        Replica.last_seen > func.now() - SERVING_WINDOW,
    )
    is_paused = exists().where(QueuePause.project.in_((lane.c.project, EVERYBODY)))
    one = (
        select(_ONE.label("one"))
        .where(
            in_lane(lane),
            Job.run_at <= func.now(),
            Job.cancel_requested_at.is_(None),
            or_(Job.deadline_at.is_(None), Job.deadline_at > func.now()),
            or_(Job.start_by.is_(None), Job.start_by > func.now()),
        )
        .limit(limit)
        .correlate(lane)
        .lateral("ready_in_lane")
    )
    ready = select(one.c.one).select_from(lane).join(one, true()).where(is_served, ~is_paused).limit(limit).subquery()
    return select(func.count()).select_from(ready)


def lanes(model: str | None = None, priority: int | None = None) -> CTE:
    """Every model, class and project with claimable jobs, or those of one model or class: one probe of the index for
    each, however many jobs there are."""
    following = aliased(Job)
    is_queued = following.state == literal_column(f"'{JobState.QUEUED}'", Job.state.type)
    first_of, next_of = [IS_CLAIMABLE], [is_queued, following.hold.is_(None)]
    if model is not None:
        first_of.append(Job.model == model)
        next_of.append(following.model == model)
    if priority is not None:
        first_of.append(Job.priority == priority)
        next_of.append(following.priority == priority)
    first = (
        select(Job.model, Job.priority, Job.project)
        .where(*first_of)
        .order_by(Job.model, Job.priority, Job.project)
        .limit(_ONE)
        .cte("lanes" if priority is None else f"lanes_{priority}", recursive=True)
    )
    lane = (following.model, following.priority, following.project)
    after = (
        select(*lane)
        .where(*next_of, tuple_(*lane) > tuple_(first.c.model, first.c.priority, first.c.project))
        .order_by(*lane)
        .limit(_ONE)
        .correlate(first)
        .lateral("after")
    )
    return first.union_all(select(after).select_from(first).join(after, true()))


def _keys() -> CTE:
    """Every key with queued jobs, found as `lanes` are."""
    first = (
        select(Job.api_key)
        .where(IS_QUEUED, Job.api_key.is_not(None))
        .order_by(Job.api_key)
        .limit(_ONE)
        .cte("keys", recursive=True)
    )
    following = aliased(Job)
    is_queued = following.state == literal_column(f"'{JobState.QUEUED}'", Job.state.type)
    after = (
        select(following.api_key)
        .where(is_queued, following.api_key > first.c.api_key)
        .order_by(following.api_key)
        .limit(_ONE)
        .correlate(first)
        .lateral("after")
    )
    return first.union_all(select(after).select_from(first).join(after, true()))


def in_lane(lane: CTE) -> ColumnElement[bool]:
    """Condition on the claimable jobs of a row of `lanes`."""
    return and_(IS_CLAIMABLE, Job.model == lane.c.model, Job.priority == lane.c.priority, Job.project == lane.c.project)
