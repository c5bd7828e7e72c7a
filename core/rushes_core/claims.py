"""The statement that claims a job, and the one that looks for a more urgent one. Nothing here executes.

Written out, because it is the hot path of the whole queue and depends on the plan: nested loops in this order, each job
looked for in `ix_jobs_claimable`. The server sets up all that a statement may come to before it runs it, which is a
third of what a claim costs: what is asked in few cases alone is in functions of the schema.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import CTE, BindParameter, Integer, select, text
from sqlalchemy.sql.elements import KeyedColumnElement
from sqlalchemy.sql.selectable import TextualSelect, TypedReturnsRows

from rushes_core.models import Job
from rushes_core.replicas import name_of

CRASHED_ON_WAIT = timedelta(seconds=30)
"""How long a job that crashed a replica waits for another one before that one may take it again."""
OVERDUE_EVERY = 20
"""One in so many claims of a replica looks for jobs that have waited for too long before it looks for others."""

_READY = """state = 'queued' AND hold IS NULL
                AND model = :model AND priority = urgency.priority AND project = share.project
                AND run_at <= now() AND cancel_requested_at IS NULL
                AND (deadline_at IS NULL OR deadline_at > now()) AND (start_by IS NULL OR start_by > now())
                AND (:name <> ALL (crashed_on) OR run_at < now() - make_interval(secs => :crashed_on_wait)
                    OR NOT other_replica_is_up(model, crashed_on, :crashed_on_wait))"""
_CLOCK = "coalesce(least(max(last_start), min(virtual_time) FILTER (WHERE virtual_time > 0)), 0) AS clock"
_CANDIDATE = f"""
    SELECT first.* FROM (VALUES (0), (1), (2)) AS urgency (priority), LATERAL (
        (SELECT oldest.*, share.clock FROM (
            SELECT project, clock FROM project_shares, (
                SELECT {_CLOCK}, ARRAY(SELECT project FROM queue_pauses) AS paused FROM project_shares
            ) AS shared
            -- a CASE: of two conditions each would look for the pauses by itself
            WHERE CASE WHEN '*' = ANY (paused) THEN false ELSE project <> ALL (paused) END
            -- what a project lags behind stays its due; one that has none begins where the others are
            ORDER BY CASE WHEN virtual_time > 0 THEN virtual_time ELSE clock END, virtual_time > 0, project
        ) AS {{share}}, LATERAL (
            SELECT id, project, priority, width, height, num_frames FROM jobs WHERE {_READY}
            ORDER BY run_at, id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
        ) AS oldest
        LIMIT 1){{otherwise}}
    ) AS first
    -- no EXISTS, which would become a join of all queued jobs; and an order that only the index has
    WHERE (
        SELECT 1 FROM jobs WHERE state = 'queued' AND hold IS NULL AND model = :model AND priority = urgency.priority
        ORDER BY project LIMIT 1
    ) IS NOT NULL
    LIMIT 1
"""
# before a job is locked, and only where there is one: what a claim passes over stays free for the next
_LOCKED_SHARE = """turn, LATERAL (
            SELECT project FROM jobs WHERE state = 'queued' AND hold IS NULL
                AND model = :model AND priority = urgency.priority AND project = turn.project AND run_at <= now()
            LIMIT 1
        ) AS waiting, LATERAL (
            SELECT project, turn.clock FROM project_shares WHERE project = waiting.project
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS share"""
# in place of a job: all that is ready in the class is of locked shares, and no less urgent one goes before it.
# `class_is_ready` asks of every project what `_READY` does, and says it again: planned with each claim, that would take
# a quarter more time, and a function that both call a tenth
_NOT_FREE = """
        UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL
        WHERE class_is_ready(:model, urgency.priority, :name, :crashed_on_wait)
        LIMIT 1"""
_OVERDUE = f"""
    SELECT id, project, priority, width, height, num_frames,
        (SELECT {_CLOCK} FROM project_shares)
    FROM jobs WHERE state = 'queued' AND hold IS NULL AND id = (
        SELECT first.id FROM (VALUES (1), (2)) AS urgency (priority), project_shares AS share, LATERAL (
            SELECT id, run_at FROM jobs WHERE {_READY} AND run_at < now() - make_interval(secs => :patience)
            ORDER BY run_at, id LIMIT 1
        ) AS first
        WHERE share.project <> ALL (ARRAY(SELECT project FROM queue_pauses))
            AND '*' <> ALL (ARRAY(SELECT project FROM queue_pauses))
        ORDER BY first.run_at, first.id LIMIT 1
    )
    FOR NO KEY UPDATE SKIP LOCKED
"""
_MORE_URGENT = text(f"""
SELECT 1 AS waits FROM (VALUES (0), (1)) AS urgency (priority), project_shares AS share, LATERAL (
    SELECT id FROM jobs WHERE {_READY} ORDER BY run_at, id LIMIT 1
) AS first
WHERE urgency.priority < :than AND share.project <> ALL (ARRAY(SELECT project FROM queue_pauses))
    AND '*' <> ALL (ARRAY(SELECT project FROM queue_pauses))
LIMIT 1
""")
_CLAIM = """\
ready AS MATERIALIZED (  -- a LIMIT in a sub-select may be evaluated again by the update
    {ready}
), charge AS MATERIALIZED (
    -- who waits alone has nobody to share with; a share that another one still has is of a project that comes again
    SELECT ready.*, CASE WHEN EXISTS (
        SELECT FROM project_shares AS other WHERE other.virtual_time > 0 AND other.project <> ready.project
    ) OR others_wait(:model, ready.priority, ready.project) THEN coalesce(
        (SELECT run_p50 FROM measured_times AS times WHERE times.model = :model
            AND times.width = ready.width AND times.height = ready.height AND times.num_frames = ready.num_frames),
        -- as other shapes take, in proportion; of which nothing is known, the work itself
        ready.num_frames * ready.width * ready.height / 1e8::float * coalesce(measured_pace(:model), 1)
    ) * coalesce((SELECT substring(layout FROM 's([0-9]+)$')::int FROM replicas WHERE replicas.id = :owner), 1)
        / coalesce((SELECT weight FROM projects WHERE name = ready.project), 1)
    END AS amount FROM ready
), claimed AS (
    UPDATE jobs SET state = 'claimed', attempt = attempt + 1, fence = nextval('job_fence_seq'),
        lease_owner = :owner, lease_until = now() + make_interval(secs => :lease_seconds),
        phase = NULL, completed_steps = 0, charged = charge.amount
    FROM charge WHERE jobs.id = charge.id
    RETURNING {columns}
), charged AS (  -- read by nothing, so run last: a claim that has to wait for another waits only for its commit
    UPDATE project_shares
    SET last_start = CASE WHEN virtual_time > 0 THEN virtual_time ELSE charge.clock END,
        virtual_time = CASE WHEN virtual_time > 0 THEN virtual_time ELSE charge.clock END + charge.amount
    FROM charge WHERE project_shares.project = charge.project AND charge.amount IS NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """What the replica that claimed a job needs to know of it; each a column of `Job`."""

    id: str
    project: str
    model: str
    prompt: str
    seed: int
    width: int
    height: int
    num_frames: int
    request: dict[str, Any]
    attempt: int
    low_memory: bool
    fence: int
    priority: int = 1


def more_urgent(*, model: str, owner: str, than: int | BindParameter[int]) -> TextualSelect:
    """One row, if a job of a more urgent class than `than` could be claimed now."""
    values = {"model": model, "name": name_of(owner), "crashed_on_wait": CRASHED_ON_WAIT.total_seconds()}
    found = _MORE_URGENT.bindparams(**values)
    found = found.bindparams(than) if isinstance(than, BindParameter) else found.bindparams(than=than)
    return found.columns(waits=Integer)


def claim(
    *,
    model: str,
    owner: str,
    lease_seconds: float,
    only: Collection[str] | None = None,
    patience_seconds: float | None = None,
    may_wait: bool = True,
) -> TypedReturnsRows[Job]:
    """QUEUED -> CLAIMED for one ready job, with a new attempt, a new fence and a lease by database time.

    Of the most urgent class that has ready work, of the project that has had least of the GPUs, the oldest job.
    Projects are compared on a shared clock (start-time fair queueing): a claim moves its project's time on by the GPU
    seconds that clips of the job's shape took lately, divided by the project's weight; the end of the attempt puts that
    right by what it really took. A project that comes back from idle starts at the time of the busy one that has had
    least, and is owed no more than that one: `shares` says which do.
    A job that crashed on this replica is left to others for a while, if there are others. Projects that are paused are
    passed over.

    Args:
        only: names of the columns that are wanted; all without it.
        patience_seconds: take the job that has waited longest of all projects and of all classes but the most urgent,
            if it has waited for longer than this; else none. What every claim of the usual kind passes over.
        may_wait: without it, projects whose share another claim is changing are passed over, for others of the same
            class. One that is to find a job wherever there is one waits for the other's commit.
    """
    columns = _columns(only)
    next_job = _CANDIDATE.format(share="share" if may_wait else _LOCKED_SHARE, otherwise="" if may_wait else _NOT_FREE)
    values = _values(model, owner, lease_seconds)
    if patience_seconds is not None:
        values["patience"] = patience_seconds
    statement = _claim(next_job if patience_seconds is None else _OVERDUE, columns)
    statement = text(f"WITH {statement} SELECT * FROM claimed").columns(*columns).bindparams(**values)
    return cast("TypedReturnsRows[Job]", select(Job).from_statement(statement))


def claim_along(
    started: CTE, *, model: str, owner: str, lease_seconds: float, only: Collection[str] | None = None
) -> TextualSelect:
    """`claim` in one statement with the start of another job: the same transaction, and one trip to the server.

    It waits for no other claim. One row: `started`, the state that the other job went to or null, and the columns of
    the job that was claimed, all null if none was.

    Args:
        started: `jobs.started`.
    """
    columns = _columns(only)
    statement = _claim(_CANDIDATE.format(share=_LOCKED_SHARE, otherwise=_NOT_FREE), columns)
    # the start first: what waits for its row holds nothing yet that other claims wait for
    found = "SELECT state AS started, claimed.* FROM (VALUES (1)) LEFT JOIN started ON true LEFT JOIN claimed ON true"
    # goes on where the WITH of the start ends
    along = text(f", {statement} {found}").bindparams(**_values(model, owner, lease_seconds))
    return along.columns(started.c.state.label("started"), *columns).add_cte(started)


def _columns(only: Collection[str] | None) -> list[KeyedColumnElement[Any]]:
    return [column for column in Job.__table__.columns if only is None or column.name in only]


def _claim(ready: str, columns: list[KeyedColumnElement[Any]]) -> str:
    return _CLAIM.format(ready=ready, columns=", ".join(f"jobs.{column.name}" for column in columns))


def _values(model: str, owner: str, lease_seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "owner": owner,
        "name": name_of(owner),
        "lease_seconds": lease_seconds,
        "crashed_on_wait": CRASHED_ON_WAIT.total_seconds(),
    }
