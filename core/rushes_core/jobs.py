"""Statements on jobs. One constructor per transition: each is a compare-and-set on state and fence.

Nothing here executes: the asynchronous API and the synchronous worker run the same values. A statement that returns no
row changed nothing: somebody else moved the job first. What runs for every job takes bound parameters too, so that one
compilation serves them all.
"""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    CTE,
    BindParameter,
    Select,
    Update,
    and_,
    case,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.orm import aliased
from sqlalchemy.sql.dml import ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.campaigns.tables import CANCEL_ERROR, Campaign
from rushes_core.holds import CAMPAIGN, initial_hold
from rushes_core.models import Job, JobAttempt, Replica
from rushes_core.predicates import IS_LEASED, IS_QUEUED, in_states
from rushes_core.states import FINAL_STATES, LEASED_STATES, RETRYABLE_STATES, JobState, sources
from rushes_core.webhooks.deliveries import NOT_TOLD_YET

RESTART_GRACE = timedelta(seconds=5)
"""How long after the database's start holders may still give back leases that ran out while it was down."""
IDEMPOTENCY_KEYS_KEPT = timedelta(hours=24)
MAX_CRASHES = 3
"""Crashes after which a job is quarantined."""
MAX_CRASHED_REPLICAS = 2
"""Different replicas that a job may crash before it is quarantined."""

_Id = str | BindParameter[str]
_Fence = int | BindParameter[int]
_Json = dict[str, Any] | BindParameter[dict[str, Any]]


def _in(seconds: float) -> ColumnElement[Any]:
    return func.now() + timedelta(seconds=seconds)


def _update_jobs() -> Update:
    # a session that holds a row takes what comes back instead of working out what it would be
    return update(Job).execution_options(synchronize_session=False, populate_existing=True)


_IS_CANCELLED = Job.cancel_requested_at.is_not(None)
_IS_LATE = func.coalesce(Job.deadline_at <= func.now(), False)
_IS_CALLED_BACK = or_(
    func.coalesce(Job.stop_at <= func.now(), False),
    and_(in_states(JobState.CLAIMED), func.coalesce(Job.start_by <= func.now(), False)),
)
_MUST_STOP = or_(_IS_CANCELLED, _IS_LATE, _IS_CALLED_BACK)


def _held(job_id: _Id, fence: _Fence, target: JobState) -> ColumnElement[bool]:
    held_in = [state for state in sources(target) if state in LEASED_STATES]
    return and_(Job.id == job_id, Job.fence == fence, or_(*(Job.state == state for state in held_in)))


_RELEASED = {"lease_owner": None, "lease_until": None}
_NO_PROGRESS = {"phase": None, "completed_steps": 0}
# a trigger clears the hold of what is not queued
_TO_CAMPAIGN: dict[str, Any] = {
    "hold": case((Job.campaign_id.is_not(None), literal(CAMPAIGN, Job.hold.type)), else_=Job.hold),
    "start_by": None,
    "stop_at": None,
}
"""Whether a job of a campaign may be claimed again is the campaign's to decide."""


def start(job_id: _Id, *, fence: _Fence, lease_seconds: float) -> ReturningUpdate[Job]:
    """CLAIMED -> RUNNING: the last moment at which a cancel, a deadline or its campaign can win without an attempt."""
    return _start(job_id, fence, lease_seconds).returning(Job)


def started(job_id: _Id, *, fence: _Fence, lease_seconds: float) -> CTE:
    """`start` as a part of another statement, with the `state` that it led to."""
    return _start(job_id, fence, lease_seconds).returning(Job.state).cte("started")


def _start(job_id: _Id, fence: _Fence, lease_seconds: float) -> Update:
    return (
        _update_jobs()
        .where(_held(job_id, fence, JobState.RUNNING), ~_MUST_STOP, Job.lease_until > func.now())
        .values(state=JobState.RUNNING, started_at=func.now(), lease_until=_in(lease_seconds))
    )


def renew(job_id: str, *, fence: int, lease_seconds: float) -> ReturningUpdate[bool]:
    """Extend the lease. No row: it is lost. True: a cancel was asked for, the deadline has passed, or the job is to go
    back to its campaign."""
    return (
        _update_jobs()
        .where(Job.id == job_id, Job.fence == fence, IS_LEASED)
        .values(lease_until=_in(lease_seconds))
        .returning(_MUST_STOP)
    )


def watch(job_id: str, *, fence: int) -> Select[bool]:
    """Whether the attempt is to stop, as `renew` tells, without touching the row. No row: the lease is lost."""
    return select(_MUST_STOP).where(Job.id == job_id, Job.fence == fence, IS_LEASED)


def report(
    job_id: str, *, fence: int, phase: str, completed_steps: int, progress: int, started_ahead: bool = False
) -> ReturningUpdate[bool]:
    """Record where a running attempt is. `progress` never falls, whatever an earlier attempt reached.

    True as for `renew`.

    Args:
        started_ahead: it was started while another one was on its GPUs. Its turn comes with its first report, from
            which its run is counted then.
    """
    values: dict[str, Any] = {"phase": phase, "completed_steps": completed_steps}
    if started_ahead:
        values["started_at"] = case((Job.phase.is_(None), func.now()), else_=Job.started_at)
    return (
        _update_jobs()
        .where(Job.id == job_id, Job.fence == fence, Job.state == JobState.RUNNING)
        .values(progress=func.greatest(Job.progress, min(progress, 99)), **values)
        .returning(_MUST_STOP)
    )


def complete(job_id: _Id, *, fence: _Fence, result: _Json, timings: _Json) -> ReturningUpdate[Job]:
    """RUNNING -> COMPLETED: the commit point of the whole job.

    A cancel or a lost lease that came first wins. A deadline that nobody has acted on yet does not.
    """
    return (
        _update_jobs()
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
        _update_jobs()
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
    """CLAIMED or RUNNING -> QUEUED while attempts remain, else FAILED; CANCELLED if that was asked for.

    A job that crashes its workers is quarantined, attempts left or not: FAILED with code `worker_crash`.
    """
    return (
        _update_jobs()
        .where(_held(job_id, fence, JobState.QUEUED))
        .values(**_after_loss(error, crashed=crashed))
        .returning(Job)
    )


def out_of_memory(job_id: str, *, fence: int, stage: str) -> ReturningUpdate[Job]:
    """RUNNING -> QUEUED for the plan that needs less device memory; FAILED if that was the one that ran out of it.

    Args:
        stage: what the ranks were doing, a `Phase`.
    """
    spent = or_(Job.low_memory, Job.attempt >= Job.max_attempts)
    error = literal(OUT_OF_MEMORY | {"stage": stage}, Job.error.type)
    return (
        _update_jobs()
        .where(Job.id == job_id, Job.fence == fence, in_states(JobState.RUNNING))
        .values(
            state=case((_IS_CANCELLED, _CANCELLED), (spent, _FAILED), else_=_QUEUED),
            low_memory=True,
            error_count=Job.error_count + 1,
            error=case((_IS_CANCELLED, _BY_USER), else_=error),
            run_at=func.now(),
            finished_at=case((or_(_IS_CANCELLED, spent), func.now()), else_=None),
            **_TO_CAMPAIGN,
            **_NO_PROGRESS,
            **_RELEASED,
        )
        .returning(Job)
    )


def release(job_id: str, *, fence: int) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> QUEUED, at the place that it had, without counting anything against the job: its worker is
    shutting down, or has something more urgent.

    CANCELLED if that was asked for: no claim would take it again.
    """
    return _update_jobs().where(_held(job_id, fence, JobState.QUEUED)).values(**_given_back()).returning(Job)


def _given_back() -> dict[str, Any]:
    return {
        "state": case((_IS_CANCELLED, _CANCELLED), else_=_QUEUED),
        "error": case((_IS_CANCELLED, _WHY_CANCELLED), else_=Job.error),
        "finished_at": case((_IS_CANCELLED, func.now()), else_=None),
        "attempt": Job.attempt - 1,
        **_TO_CAMPAIGN,
        **_NO_PROGRESS,
        **_RELEASED,
    }


def release_unknown(*, owner: str, fences: Collection[int]) -> ReturningUpdate[Job]:
    """CLAIMED -> QUEUED for what `owner` holds and does not know of: the reply to its claim was lost."""
    return (
        _update_jobs()
        .where(Job.lease_owner == owner, IS_LEASED, in_states(JobState.CLAIMED), Job.fence.not_in(fences))
        .values(**_given_back())
        .returning(Job)
    )


def confirm_cancel(job_id: str, *, fence: int) -> ReturningUpdate[Job]:
    """CLAIMED or RUNNING -> CANCELLED, by the holder, after a cancel was asked for or the deadline has passed.

    CLAIMED -> EXPIRED for the deadline of a job of which no attempt has started. CLAIMED or RUNNING -> QUEUED, with
    nothing counted, when its campaign wants it back.
    """
    called_back = and_(~_IS_CANCELLED, ~_IS_LATE)
    never_started = and_(~_IS_CANCELLED, Job.started_at.is_(None))
    return (
        _update_jobs()
        .where(_held(job_id, fence, JobState.CANCELLED), _MUST_STOP)
        .values(
            state=case(
                (called_back, _QUEUED),
                (never_started, literal(JobState.EXPIRED, Job.state.type)),
                else_=_CANCELLED,
            ),
            error=case(
                (called_back, Job.error),
                (_IS_CANCELLED, _WHY_CANCELLED),
                (never_started, literal(DEADLINE_EXCEEDED, Job.error.type)),
                else_=literal(DEADLINE_PASSED, Job.error.type),
            ),
            attempt=Job.attempt - case((called_back, 1), else_=0),
            phase=None,
            completed_steps=case((called_back, 0), else_=Job.completed_steps),
            finished_at=case((called_back, None), else_=func.now()),
            **_TO_CAMPAIGN,
            **_RELEASED,
        )
        .returning(Job)
    )


def reap(*, limit: int = 50) -> ReturningUpdate[Job]:
    """End the attempts whose lease ran out over a second ago, as `retry_or_fail` would. Any number may run at once.

    A replica that was heard of after its lease had run out could not renew it, but has not crashed. A lease that ran
    out while the database was down is left to its holder for a few seconds, who may be about to say the same.
    """
    up_at = func.pg_postmaster_start_time()
    dead = (
        select(Job.id, Job.api_key, Job.campaign_id)
        .where(
            IS_LEASED,
            Job.lease_until < func.now() - timedelta(seconds=1),
            or_(Job.lease_until > up_at, func.now() > up_at + RESTART_GRACE),
        )
        .order_by(Job.lease_until)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("dead")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    # several at once lock the usage of keys, and counts of campaigns, in one order
    in_order = (
        select(dead.c.id)
        .order_by(dead.c.api_key, dead.c.campaign_id, dead.c.id)
        .cte("in_order")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    was_heard_of = exists().where(Replica.id == Job.lease_owner, Replica.last_seen > Job.lease_until)
    values = _after_loss(LEASE_LOST, crashed=~was_heard_of)
    return _update_jobs().where(Job.id == in_order.c.id).values(**values).returning(Job)


def expire(*, limit: int = 200) -> ReturningUpdate[Job]:
    """QUEUED -> EXPIRED for jobs that did not start before their deadline; CANCELLED if an attempt had started."""
    late = (
        select(Job.id)
        .where(IS_QUEUED, Job.deadline_at <= func.now())
        .order_by(Job.deadline_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .cte("late")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return (
        _update_jobs()
        .where(Job.id == late.c.id)
        .values(
            state=case(
                (Job.started_at.is_(None), literal(JobState.EXPIRED, Job.state.type)),
                else_=_CANCELLED,
            ),
            error=case(
                (Job.started_at.is_(None), literal(DEADLINE_EXCEEDED, Job.error.type)),
                else_=literal(DEADLINE_PASSED, Job.error.type),
            ),
            finished_at=func.now(),
        )
        .returning(Job)
    )


def cancel(job_id: str, *, project: str) -> ReturningUpdate[Job]:
    """QUEUED -> CANCELLED at once; of a claimed or running job the cancel is asked for; one that ended stays as it is.

    No row: the project has no such job.
    """
    return _update_jobs().where(*_visible(job_id, project)).values(**_to_cancel()).returning(Job)


def delete_job(job_id: str, *, project: str) -> ReturningUpdate[Job]:
    """Hide a job for good, and cancel it as `cancel` does. No row: there is none to hide, not any more or never."""
    return _update_jobs().where(*_visible(job_id, project)).values(deleted_at=func.now(), **_to_cancel()).returning(Job)


def retry(job_id: str, *, project: str) -> ReturningUpdate[Job]:
    """FAILED, CANCELLED or EXPIRED -> QUEUED as a new generation, which starts from nothing.

    It still waits for its `not_before`; a deadline that has passed is dropped. A row with a hold is to be followed by
    `holds.open_holds` in the same transaction. No row: there is no such job, it is in another state, or its campaign
    was deleted.
    """
    goes_away = exists().where(Campaign.id == Job.campaign_id, Campaign.deleted_at.is_not(None))
    return (
        _update_jobs()
        .where(*_visible(job_id, project), in_states(*RETRYABLE_STATES), ~goes_away)
        .values(
            state=JobState.QUEUED,
            hold=case(
                (Job.campaign_id.is_not(None), literal(CAMPAIGN, Job.hold.type)), else_=initial_hold(Job.api_key)
            ),
            start_by=None,
            stop_at=None,
            generation=Job.generation + 1,
            attempt=0,
            crash_count=0,
            crashed_on=[],
            error_count=0,
            low_memory=False,
            progress=0,
            error=None,
            timings={},
            # GREATEST leaves out a null
            run_at=func.greatest(func.now(), func.to_timestamp(Job.request["not_before"].as_float())),
            deadline_at=case((_IS_LATE, None), else_=Job.deadline_at),
            started_at=None,
            finished_at=None,
            cancel_requested_at=None,
            webhook=case((Job.webhook.is_not(None), literal(NOT_TOLD_YET, Job.webhook.type))),
            **_NO_PROGRESS,
        )
        .returning(Job)
    )


def _visible(job_id: str, project: str) -> tuple[ColumnElement[bool], ...]:
    return Job.id == job_id, Job.project == project, Job.deleted_at.is_(None)


def _to_cancel() -> dict[str, Any]:
    return {
        "cancel_requested_at": case(
            (in_states(*FINAL_STATES), Job.cancel_requested_at),
            else_=func.coalesce(Job.cancel_requested_at, func.now()),
        ),
        "state": case((IS_QUEUED, _CANCELLED), else_=Job.state),
        "error": case((IS_QUEUED, _BY_USER), else_=Job.error),
        "finished_at": case((IS_QUEUED, func.now()), else_=Job.finished_at),
    }


def get(job_id: str, *, project: str) -> Select[Job]:
    """The job, or the tombstone that is left of it."""
    return select(Job).where(Job.id == job_id, Job.project == project)


def attempts(job_id: str) -> Select[JobAttempt]:
    return select(JobAttempt).where(JobAttempt.job_id == job_id).order_by(JobAttempt.fence)


def numbered_attempts(job_id: str) -> tuple[Select[JobAttempt, int], ColumnElement[int]]:
    """Each attempt of a job with its number among them, from 1, and that number as a column. A fence also counts the
    attempts at everybody else's jobs."""
    number = func.row_number().over(order_by=JobAttempt.fence).label("number")
    rows = select(JobAttempt, number).where(JobAttempt.job_id == job_id).subquery()
    return select(aliased(JobAttempt, rows), rows.c.number), rows.c.number


CANCELLED_BY_USER: dict[str, Any] = {"code": "cancelled_by_user", "message": "The job was cancelled."}
DEADLINE_EXCEEDED: dict[str, Any] = {
    "code": "deadline_exceeded",
    "message": "The job did not start before its deadline.",
}
DEADLINE_PASSED: dict[str, Any] = {
    "code": "deadline_exceeded",
    "message": "The job was still running at its deadline.",
}
LEASE_LOST: dict[str, Any] = {
    "code": "worker_lost",
    "message": "The worker that ran the job stopped renewing its lease.",
}
WORKER_CRASH: dict[str, Any] = {
    "code": "worker_crash",
    "message": f"The job is quarantined: it crashed {MAX_CRASHED_REPLICAS} different replicas, "
    f"or replicas {MAX_CRASHES} times.",
}
OUT_OF_MEMORY: dict[str, Any] = {
    "code": "out_of_memory",
    "message": "The job ran out of device memory.",
}

_QUEUED, _FAILED, _CANCELLED = (
    literal(state, Job.state.type) for state in (JobState.QUEUED, JobState.FAILED, JobState.CANCELLED)
)
_BY_USER = literal(CANCELLED_BY_USER, Job.error.type)
_WHY_CANCELLED = func.coalesce(
    select(literal_column(CANCEL_ERROR, Job.error.type))
    .where(Campaign.id == Job.campaign_id)
    .correlate(Job)
    .scalar_subquery(),
    _BY_USER,
    type_=Job.error.type,
)


def _after_loss(error: dict[str, Any], *, crashed: bool | ColumnElement[bool]) -> dict[str, Any]:
    # a claimed job was not running: its worker's end says nothing about it
    ran = in_states(JobState.RUNNING)
    one_more = case((ran, 1), else_=0)
    spent = Job.attempt >= Job.max_attempts
    if crashed is False:
        ended = spent
        counts = {"error_count": Job.error_count + one_more}
        count = Job.error_count
        reasons = [(_IS_CANCELLED, _WHY_CANCELLED)]
    else:
        crash = ran if crashed is True else and_(ran, crashed)
        crash_count = Job.crash_count + case((crash, 1), else_=0)
        name = func.split_part(Job.lease_owner, "#", 1)
        crashed_on = case(
            (and_(crash, name != Job.crashed_on.all_()), func.array_append(Job.crashed_on, name)), else_=Job.crashed_on
        )
        quarantined = and_(crash, or_(crash_count >= MAX_CRASHES, func.cardinality(crashed_on) >= MAX_CRASHED_REPLICAS))
        ended = or_(quarantined, and_(ran, spent))
        counts = {"crash_count": crash_count, "crashed_on": crashed_on, "attempt": Job.attempt - 1 + one_more}
        count = Job.crash_count
        why = func.jsonb_build_object(
            "code", WORKER_CRASH["code"], "message", WORKER_CRASH["message"], "stage", Job.phase
        )
        reasons = [(_IS_CANCELLED, _WHY_CANCELLED), (quarantined, why)]
    return {
        "state": case((_IS_CANCELLED, _CANCELLED), (ended, _FAILED), else_=_QUEUED),
        **counts,
        "error": case(*reasons, else_=literal(error, Job.error.type)),
        "run_at": func.now() + func.make_interval(0, 0, 0, 0, 0, 0, func.least(30, func.power(2, count))),
        "finished_at": case((or_(_IS_CANCELLED, ended), func.now()), else_=None),
        **_TO_CAMPAIGN,
        **_NO_PROGRESS,
        **_RELEASED,
    }
