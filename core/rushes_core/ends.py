"""Statements that count how jobs end, by state and code of the error. What was counted stays when the jobs are gone.

A trigger writes a row for each end, as fast as many may at once; the dispatcher adds them to the counts.
"""

from sqlalchemy import Select, TextClause, func, literal, select, text, union_all

from rushes_core.models import JobEnd, JobEndCount
from rushes_core.states import JobState
from rushes_core.video import RETRYABLE_ERRORS

COUNT_SECONDS = 10.0
"""How often `count` is run."""
MAX_AT_ONCE = 10_000

_NOT_FAILED = {
    "cancelled_by_user": (JobState.CANCELLED,),
    "budget_reached": (JobState.CANCELLED,),
    "max_failures_reached": (JobState.CANCELLED,),
    "deadline_exceeded": (JobState.CANCELLED, JobState.EXPIRED),
    "batch_expired": (JobState.EXPIRED,),
}
KNOWN: tuple[tuple[str, str], ...] = (
    (JobState.COMPLETED, ""),
    *((state, code) for code in RETRYABLE_ERRORS for state in _NOT_FAILED.get(code, (JobState.FAILED,))),
)
"""States and codes that jobs of this release end with."""


def count() -> TextClause:
    """Add some of the ends that were written to the counts: how many. Any number may run at once."""
    return text("""
WITH written AS (
    DELETE FROM job_ends WHERE id IN (SELECT id FROM job_ends ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING state, code
), counted AS (
    INSERT INTO job_end_counts AS known (state, code, num_jobs)
    SELECT state, code, count(*) FROM written GROUP BY state, code ORDER BY state, code
    ON CONFLICT (state, code) DO UPDATE SET num_jobs = known.num_jobs + excluded.num_jobs
)
SELECT count(*) FROM written
""").bindparams(limit=MAX_AT_ONCE)


def counts() -> Select[str, str, int]:
    """How many jobs ended, by state and code; those whose counts are still to be made, too."""
    counted = select(JobEndCount.state, JobEndCount.code, JobEndCount.num_jobs)
    written = select(JobEnd.state, JobEnd.code, literal(1).label("num_jobs"))
    every = union_all(counted, written).subquery()
    return select(every.c.state, every.c.code, func.sum(every.c.num_jobs)).group_by(every.c.state, every.c.code)
