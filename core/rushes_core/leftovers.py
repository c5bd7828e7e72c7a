"""Statements of the sweeper on what has had its time: objects of deleted jobs, old clips, old keys, idle shares."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Delete, Select, TextClause, Update, case, delete, func, literal, select, text, tuple_, update
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.dml import ReturningDelete

from rushes_core.backlog import lanes
from rushes_core.jobs import IDEMPOTENCY_KEYS_KEPT
from rushes_core.models import RESULT_RETAINED, File, IdempotencyKey, Job, ProjectShare
from rushes_core.states import FINAL_STATES, JobState
from rushes_core.webhooks.deliveries import RETENTION_DAYS

_Row = TypeVar("_Row", Job, File)

Place = tuple[datetime, str]
"""Where a row stands among those to be removed: the time that orders them, and its id."""


def unpurged(*, after: Place | None = None, limit: int = 20) -> Select[Job]:
    """Deleted jobs that have ended and whose objects may still lie in the store, by `deleted_at`."""
    ended = Job.deleted_at.is_not(None), Job.purged_at.is_(None), Job.state.in_(FINAL_STATES)
    return in_order(Job, Job.deleted_at, after, limit).where(*ended)


def in_order(
    table: type[_Row], by: InstrumentedAttribute[datetime | None], after: Place | None, limit: int
) -> Select[_Row]:
    """Rows by a time and their id, those behind `after` where that is given."""
    found = select(table).order_by(by, table.id).limit(limit)
    return found if after is None else found.where(tuple_(by, table.id) > tuple_(*map(literal, after)))


def purged_lately(*, hours: int) -> Select[Job]:
    """Deleted jobs whose objects were removed within the last hours."""
    return select(Job).where(Job.deleted_at.is_not(None), Job.purged_at > func.now() - timedelta(hours=hours))


def mark_purged(job_id: str) -> Update:
    """Record that a deleted job left nothing in the store, and forget its prompt and request.

    Where its objects went stays known: an attempt that had lost its lease may still store some.
    """
    where = case(
        (Job.request.has_key("output"), func.jsonb_build_object("output", Job.request["output"])),
        else_=text("'{}'::jsonb"),
    )
    return update(Job).where(Job.id == job_id).values(purged_at=func.now(), prompt="", request=where)


def outlived_results(*, days: int, after: Place | None = None, limit: int = 20) -> Select[Job]:
    """Completed jobs that ended more than `days` days ago and whose clips are still stored, by `finished_at`.

    Jobs with a time of their own are left to `results_past_their_time`.
    """
    is_old = Job.finished_at < func.now() - timedelta(days=days)
    return in_order(Job, Job.finished_at, after, limit).where(text(RESULT_RETAINED), is_old, Job.retain_until.is_(None))


def results_past_their_time(*, after: Place | None = None, limit: int = 20) -> Select[Job]:
    """Completed jobs whose clips are still stored after `retain_until`, by that."""
    return in_order(Job, Job.retain_until, after, limit).where(text(RESULT_RETAINED), Job.retain_until <= func.now())


def mark_result_removed(job_id: str) -> Update:
    """Record that the clip of a completed job is no longer stored."""
    removed = func.jsonb_build_object("deleted_at", func.now())
    return update(Job).where(Job.id == job_id, text(RESULT_RETAINED)).values(result=Job.result.op("||")(removed))


def owners_of_objects(
    job_ids: Sequence[str],
) -> Select[str, JobState, int | None, dict[str, Any] | None, dict[str, Any]]:
    """Id, state, fence, result and request of each of these jobs that there is."""
    return select(Job.id, Job.state, Job.fence, Job.result, Job.request).where(Job.id.in_(job_ids))


def forget_idempotency_keys(*, limit: int = 5_000) -> ReturningDelete[str]:
    """Drop keys of requests that are older than a day."""
    columns = (IdempotencyKey.project, IdempotencyKey.api_key, IdempotencyKey.route, IdempotencyKey.key)
    old = (
        select(*columns)
        .where(IdempotencyKey.created_at < func.now() - IDEMPOTENCY_KEYS_KEPT)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return delete(IdempotencyKey).where(tuple_(*columns).in_(old)).returning(IdempotencyKey.key)


MAX_EVENTS_AT_ONCE = 5_000


def forget_events(*, after: int = 0) -> TextClause:
    """Drop events of the outbox of more than `RETENTION_DAYS` ago, but for those of which a delivery is kept.

    At most `MAX_EVENTS_AT_ONCE` are looked at, in the order in which they were written, from the one behind `after` on,
    and none behind the first page with one that is young. One row: `num_forgotten`, and `after` for the next ones, null
    where these were the last.
    """
    return text("""
WITH page AS MATERIALIZED (
    SELECT id, event_id, job_id, created_at < now() - make_interval(days => :days) AS is_old FROM outbox
    WHERE id > :after ORDER BY id LIMIT :limit
), unwanted AS MATERIALIZED (
    SELECT id FROM outbox WHERE id IN (
        SELECT id FROM page WHERE is_old AND NOT EXISTS (
            SELECT FROM webhook_deliveries AS d WHERE d.job_id = page.job_id AND d.event_id = page.event_id
        )
    ) FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM outbox WHERE id IN (SELECT id FROM unwanted) RETURNING id
)
SELECT (SELECT count(*) FROM forgotten) AS num_forgotten,
    CASE WHEN count(*) = :limit AND bool_and(is_old) THEN max(id) END AS after
FROM page
""").bindparams(after=after, days=RETENTION_DAYS, limit=MAX_EVENTS_AT_ONCE)


def lock_shares() -> TextClause:
    """Keep everybody from writing shares, and so from accepting jobs, until the transaction ends."""
    return text("LOCK TABLE project_shares IN SHARE ROW EXCLUSIVE MODE")


def forget_idle_shares() -> Delete:
    """Drop the shares of projects that have no claimable job. After `lock_shares` in the same transaction.

    The clock of the shares stays: the row that holds it is kept.
    """
    busy = lanes()
    latest = select(func.max(ProjectShare.last_start)).scalar_subquery()
    return delete(ProjectShare).where(
        ProjectShare.project.not_in(select(busy.c.project)), ProjectShare.last_start < latest
    )
