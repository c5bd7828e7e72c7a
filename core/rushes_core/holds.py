"""Statements on holds: jobs whose key may not run more of them at once wait without being claimable.

A key's jobs that are leased, or queued and not held, are never more than its `max_running`. A job of such a key is
inserted and retried held; `open_holds` alone opens it, one transaction of a key at a time.
"""

from sqlalchemy import ScalarSelect, TextClause, case, literal, select, text
from sqlalchemy.sql.elements import SQLColumnExpression
from sqlalchemy.sql.selectable import TextualSelect

from rushes_core.models import ApiKey, Job

CONCURRENCY = "concurrency"
"""Value of `jobs.hold`: the key has as many jobs that run, or may, as `max_running` allows."""

CAMPAIGN = "campaign"
"""Value of `jobs.hold`: the job's campaign has not opened it. `open_holds` leaves it alone."""

CHANGED_AT_ONCE = 1_000
"""Jobs that one `open_holds` holds, or opens, at most; one that changed so many is to be repeated."""


# made once: SQLAlchemy takes longer to build it than Postgres to run it
_LIMITED = select(case((ApiKey.max_running.is_not(None), literal(CONCURRENCY, Job.hold.type))))


def initial_hold(api_key: str | SQLColumnExpression[str | None]) -> ScalarSelect[str | None]:
    """The hold that a job of this key begins with, whatever a process remembers of the key."""
    return _LIMITED.where(ApiKey.id == api_key).scalar_subquery()


def open_holds(api_key: str) -> TextClause:
    """Open as many held jobs of a key as there is room for, and hold those that a smaller limit or more urgent ones
    push out; all of them without a limit. The number of jobs that changed.

    Which: by class, time and id; a job that is open keeps its place but for one of a more urgent class. A job whose
    time has not come takes no place. To be run after an insert or a retry that left a job held, in its transaction,
    and for each of `keys_to_open` again and again.
    """
    return text("SELECT open_holds(:api_key)").bindparams(api_key=api_key)


_KEYS_TO_OPEN = text("""
WITH RECURSIVE waiting AS (  -- every key with queued jobs: one probe of the index for each
    (SELECT api_key FROM jobs WHERE state = 'queued' AND api_key IS NOT NULL ORDER BY api_key LIMIT 1)
    UNION ALL
    SELECT (
        SELECT jobs.api_key FROM jobs WHERE state = 'queued' AND jobs.api_key > waiting.api_key
        ORDER BY jobs.api_key LIMIT 1
    ) FROM waiting WHERE waiting.api_key IS NOT NULL
), running AS (
    SELECT api_key, count(*) AS count FROM jobs WHERE state IN ('claimed', 'running') GROUP BY api_key
), room AS (
    SELECT id,
        CASE WHEN max_running IS NOT NULL THEN greatest(0, max_running - coalesce(running.count, 0)) END AS places
    FROM waiting JOIN api_keys ON id = waiting.api_key LEFT JOIN running ON running.api_key = id
)
SELECT id FROM room, LATERAL (
    SELECT count(*) AS count, max(priority) AS least_urgent FROM (
        SELECT priority FROM jobs WHERE state = 'queued' AND api_key = room.id AND hold IS NULL
        ORDER BY priority DESC, run_at DESC, id DESC LIMIT coalesce(places, 0) + 1
    ) AS last
) AS open, LATERAL (
    SELECT min(urgency) AS most_urgent FROM (VALUES (0), (1), (2)) AS urgencies (urgency)
    WHERE EXISTS (
        SELECT FROM jobs WHERE state = 'queued' AND api_key = room.id AND hold = 'concurrency' AND priority = urgency
            AND (run_at <= now() OR places IS NULL)
    )
) AS held
WHERE open.count > places OR most_urgent IS NOT NULL AND (places IS NULL OR open.count < places)
    OR most_urgent < least_urgent
""").columns(ApiKey.id)


def keys_to_open() -> TextualSelect:
    """Ids of the keys for which `open_holds` would change something now."""
    return _KEYS_TO_OPEN
