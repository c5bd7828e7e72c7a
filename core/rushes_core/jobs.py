"""Statements on jobs. One constructor per transition: each is a compare-and-set on state and fence.

Nothing here executes: the asynchronous API and the synchronous worker run the same values. A statement that returns no
row changed nothing: somebody else moved the job first.
"""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    Select,
    Update,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.models import Job, JobAttempt, Replica
from rushes_core.states import FINAL_STATES, LEASED_STATES, JobState, sources

FENCE_SEQUENCE = "job_fence_seq"
STALE_REPLICA = timedelta(days=1)


def _next_fence() -> ColumnElement[int]:
    return func.nextval(FENCE_SEQUENCE)


def _in(seconds: float) -> ColumnElement[Any]:
    return func.now() + timedelta(seconds=seconds)


# a literal, not a parameter: a prepared statement's generic plan could not use the partial index otherwise
_IS_QUEUED = Job.state == literal_column(f"'{JobState.QUEUED}'", Job.state.type)


def _held(job_id: str, fence: int, target: JobState) -> ColumnElement[bool]:
    return and_(Job.id == job_id, Job.fence == fence, Job.state.in_(sources(target)))


_RELEASED = {"lease_owner": None, "lease_until": None}
_NO_PROGRESS = {"phase": None, "completed_steps": 0}


def create(**values: Any) -> ReturningInsert[Job]:
    """-> QUEUED. `values` are the columns that a request decides."""
    return insert(Job).values(state=JobState.QUEUED, **values).returning(Job)


def claim(*, model: str, owner: str, lease_seconds: float) -> ReturningUpdate[Job]:
    """QUEUED -> CLAIMED for the first ready job, with a new attempt, a new fence and a lease by database time."""
    ready = (
        select(Job.id)
        .where(
            _IS_QUEUED,
            Job.model == model,
            Job.run_at <= func.now(),
            Job.cancel_requested_at.is_(None),
            or_(Job.deadline_at.is_(None), Job.deadline_at > func.now()),
        )
        .order_by(Job.priority, Job.run_at, Job.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        # materialised: a LIMIT in a sub-select may be evaluated again by the update
        .cte("ready")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return (
        update(Job)
        .where(Job.id == ready.c.id)
        .values(
            state=JobState.CLAIMED,
            attempt=Job.attempt + 1,
            fence=_next_fence(),
            lease_owner=owner,
            lease_until=_in(lease_seconds),
            **_NO_PROGRESS,
        )
        .returning(Job)
    )


def start(job_id: str, *, fence: int, lease_seconds: float) -> ReturningUpdate[Job]:
    """CLAIMED -> RUNNING: the last moment at which a cancel can win without an attempt."""
    return (
        update(Job)
        .where(_held(job_id, fence, JobState.RUNNING), Job.cancel_requested_at.is_(None), Job.lease_until > func.now())
        .values(state=JobState.RUNNING, started_at=func.now(), lease_until=_in(lease_seconds))
        .returning(Job)
    )


def renew(job_id: str, *, fence: int, lease_seconds: float) -> ReturningUpdate[bool]:
    """Extend the lease. No row: it is lost. True: a cancel was asked for."""
    return (
        update(Job)
        .where(Job.id == job_id, Job.fence == fence, Job.state.in_(LEASED_STATES))
        .values(lease_until=_in(lease_seconds))
        .returning(Job.cancel_requested_at.is_not(None))
    )


def watch(job_id: str, *, fence: int) -> Select[bool]:
    """Whether a cancel was asked for, without touching the row. No row: the lease is lost."""
    return select(Job.cancel_requested_at.is_not(None)).where(
        Job.id == job_id, Job.fence == fence, Job.state.in_(LEASED_STATES)
    )


def report(job_id: str, *, fence: int, phase: str, completed_steps: int, progress: int) -> ReturningUpdate[bool]:
    """Record where a running attempt is. `progress` never falls, whatever an earlier attempt reached.

    True: a cancel was asked for.
    """
    return (
        update(Job)
        .where(Job.id == job_id, Job.fence == fence, Job.state == JobState.RUNNING)
        .values(phase=phase, completed_steps=completed_steps, progress=func.greatest(Job.progress, min(progress, 99)))
        .returning(Job.cancel_requested_at.is_not(None))
    )


def complete(job_id: str, *, fence: int, result: dict[str, Any], timings: dict[str, float]) -> ReturningUpdate[Job]:
    """RUNNING -> COMPLETED: the commit point of the whole job. A cancel or a lost lease that came first wins."""
    return (
        update(Job)
        .where(
            _held(job_id, fence, JobState.COMPLETED),
            Job.lease_until > func.now(),
            Job.cancel_requested_at.is_(None),
        )
        .values(
            state=JobState.COMPLETED,
            result=result,
            timings=timings,
            error=None,
            progress=100,
            phase=None,
            finished_at=func.now(),
            **_RELEASED,
        )
        .returning(Job)
    )


def fail(job_id: str, *, fence: int, error: dict[str, Any]) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> FAILED, for an error that another attempt would meet again."""
    return (
        update(Job)
        .where(_held(job_id, fence, JobState.FAILED))
        .values(
            state=JobState.FAILED,
            error=error,
            error_count=Job.error_count + 1,
            phase=None,
            finished_at=func.now(),
            **_RELEASED,
        )
        .returning(Job)
    )


def retry_or_fail(job_id: str, *, fence: int, error: dict[str, Any], crashed: bool) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> QUEUED while attempts remain, else FAILED; CANCELLED if that was asked for."""
    return (
        update(Job)
        .where(_held(job_id, fence, JobState.QUEUED))
        .values(**_after_loss(error, crashed=crashed))
        .returning(Job)
    )


def release(job_id: str, *, fence: int) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> QUEUED without counting anything against the job: its worker is shutting down."""
    return (
        update(Job)
        .where(_held(job_id, fence, JobState.QUEUED))
        .values(state=JobState.QUEUED, attempt=Job.attempt - 1, run_at=func.now(), **_NO_PROGRESS, **_RELEASED)
        .returning(Job)
    )


def release_unknown(*, owner: str, fences: Collection[int]) -> ReturningUpdate[Job]:
    """CLAIMED -> QUEUED for what `owner` holds and does not know of: the reply to its claim was lost."""
    return (
        update(Job)
        .where(Job.lease_owner == owner, Job.state == JobState.CLAIMED, Job.fence.not_in(fences))
        .values(state=JobState.QUEUED, attempt=Job.attempt - 1, run_at=func.now(), **_NO_PROGRESS, **_RELEASED)
        .returning(Job)
    )


def confirm_cancel(job_id: str, *, fence: int) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> CANCELLED, by the holder, after a cancel was asked for."""
    return (
        update(Job)
        .where(_held(job_id, fence, JobState.CANCELLED), Job.cancel_requested_at.is_not(None))
        .values(state=JobState.CANCELLED, error=CANCELLED_BY_USER, phase=None, finished_at=func.now(), **_RELEASED)
        .returning(Job)
    )


def reap(*, limit: int = 50) -> ReturningUpdate[Job]:
    """End the attempts whose lease ran out over a second ago, as `retry_or_fail` would. Any number may run at once."""
    dead = (
        select(Job.id)
        .where(Job.state.in_(LEASED_STATES), Job.lease_until < func.now() - timedelta(seconds=1))
        .order_by(Job.lease_until)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("dead")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return update(Job).where(Job.id == dead.c.id).values(**_after_loss(LEASE_LOST, crashed=True)).returning(Job)


def expire(*, limit: int = 200) -> ReturningUpdate[Job]:
    """QUEUED -> EXPIRED for jobs that did not start before their deadline."""
    late = (
        select(Job.id)
        .where(_IS_QUEUED, Job.deadline_at <= func.now())
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("late")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return (
        update(Job)
        .where(Job.id == late.c.id)
        .values(state=JobState.EXPIRED, error=DEADLINE_EXCEEDED, finished_at=func.now())
        .returning(Job)
    )


def delete_job(job_id: str, *, project: str) -> ReturningUpdate[Job]:
    """Hide a job for good. A queued one is cancelled by it; of a running one the cancel is asked for."""
    queued = Job.state == JobState.QUEUED
    return (
        update(Job)
        .where(Job.id == job_id, Job.project == project, Job.deleted_at.is_(None))
        .values(
            deleted_at=func.now(),
            cancel_requested_at=case(
                (Job.state.in_(FINAL_STATES), Job.cancel_requested_at),
                else_=func.coalesce(Job.cancel_requested_at, func.now()),
            ),
            state=case((queued, literal(JobState.CANCELLED, Job.state.type)), else_=Job.state),
            error=case((queued, literal(CANCELLED_BY_USER, Job.error.type)), else_=Job.error),
            finished_at=case((queued, func.now()), else_=Job.finished_at),
        )
        .returning(Job)
    )


def unpurged(*, limit: int = 20) -> Select[Job]:
    """Deleted jobs that have ended and whose objects may still lie in the store."""
    return (
        select(Job)
        .where(Job.deleted_at.is_not(None), Job.purged_at.is_(None), Job.state.in_(FINAL_STATES))
        .order_by(Job.deleted_at)
        .limit(limit)
    )


def mark_purged(job_id: str) -> Update:
    """Record that a deleted job left nothing in the store, and forget its prompt."""
    return update(Job).where(Job.id == job_id).values(purged_at=func.now(), prompt="", request={})


def get(job_id: str, *, project: str) -> Select[Job]:
    return select(Job).where(Job.id == job_id, Job.project == project, Job.deleted_at.is_(None))


def page(
    *, project: str, after: str | None, limit: int, descending: bool, states: tuple[JobState, ...] | None = None
) -> Select[Job]:
    """One page of a project's jobs by id, `limit` + 1 of them: the extra row tells that there are more."""
    statement = select(Job).where(Job.project == project, Job.deleted_at.is_(None))
    if states is not None:
        statement = statement.where(Job.state.in_(states))
    if after is not None:
        statement = statement.where(Job.id < after if descending else Job.id > after)
    return statement.order_by(Job.id.desc() if descending else Job.id.asc()).limit(limit + 1)


def num_ahead(job: Job) -> Select[int]:
    """How many queued jobs the claim would take before `job`."""
    return select(func.count()).where(
        _IS_QUEUED,
        Job.model == job.model,
        Job.run_at <= func.now(),
        or_(
            Job.priority < job.priority,
            and_(
                Job.priority == job.priority,
                or_(Job.run_at < job.run_at, and_(Job.run_at == job.run_at, Job.id < job.id)),
            ),
        ),
    )


def num_ready(*, limit: int) -> Select[int]:
    """Jobs that could be claimed now, counted up to `limit`."""
    ready = (
        select(literal(1))
        .where(_IS_QUEUED, Job.run_at <= func.now(), Job.cancel_requested_at.is_(None))
        .limit(limit)
        .subquery()
    )
    return select(func.count()).select_from(ready)


def attempts(job_id: str) -> Select[JobAttempt]:
    return select(JobAttempt).where(JobAttempt.job_id == job_id).order_by(JobAttempt.fence)


def upsert_replica(replica_id: str, **values: Any) -> Any:
    """Record a replica's state and that it was seen now."""
    statement = upsert(Replica).values(id=replica_id, **values)
    return statement.on_conflict_do_update(index_elements=[Replica.id], set_={**values, "last_seen": func.now()})


def live_replicas(*, seen_within_seconds: float) -> Select[Replica]:
    """Replicas that have been heard of within the last `seen_within_seconds`."""
    return select(Replica).where(
        Replica.last_seen > func.now() - timedelta(seconds=seen_within_seconds), Replica.state != "stopped"
    )


def forget_stale_replicas() -> ReturningDelete[str]:
    """Drop replicas that have been silent for a day and hold no job."""
    holds_a_job = exists().where(Job.lease_owner == Replica.id, Job.state.in_(LEASED_STATES))
    return delete(Replica).where(Replica.last_seen < func.now() - STALE_REPLICA, ~holds_a_job).returning(Replica.id)


CANCELLED_BY_USER: dict[str, Any] = {"code": "cancelled_by_user", "message": "The job was cancelled."}
DEADLINE_EXCEEDED: dict[str, Any] = {
    "code": "deadline_exceeded",
    "message": "The job did not start before its deadline.",
}
LEASE_LOST: dict[str, Any] = {
    "code": "worker_lost",
    "message": "The worker that ran the job stopped renewing its lease.",
}


def _after_loss(error: dict[str, Any], *, crashed: bool) -> dict[str, Any]:
    cancel = Job.cancel_requested_at.is_not(None)
    spent = Job.attempt >= Job.max_attempts
    count = Job.crash_count if crashed else Job.error_count
    backoff = func.make_interval(0, 0, 0, 0, 0, 0, func.least(30, func.power(2, count)))
    state = case((cancel, JobState.CANCELLED.value), (spent, JobState.FAILED.value), else_=JobState.QUEUED.value)
    return {
        "state": state,
        # a claimed job was not running: its worker's end says nothing about it
        "crash_count" if crashed else "error_count": count + case((Job.state == JobState.RUNNING, 1), else_=0),
        "error": case((cancel, literal(CANCELLED_BY_USER, Job.error.type)), else_=literal(error, Job.error.type)),
        "run_at": func.now() + backoff,
        "finished_at": case((or_(cancel, spent), func.now()), else_=None),
        **_NO_PROGRESS,
        **_RELEASED,
    }
