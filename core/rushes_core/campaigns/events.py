"""What is told of a campaign. Every statement belongs into the transaction of what it tells; nothing here executes.

Triggers of the outbox write down how the campaign stands at that moment, and one delivery for everybody who is to be
told (`rushes_core.webhooks`).
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import TextClause, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from rushes_core.webhooks.events import BATCH_PROGRESS, BATCH_TYPES

PROGRESS_SECONDS = 60
"""At most one progress event of a campaign in this time."""
PROGRESS_STEP = 10
"""Percent between two of them."""
MAX_AT_ONCE = 200
"""Campaigns that one call of `tell_progress` tells of."""

_TELL = text("""
WITH told AS (
    UPDATE campaigns SET num_events = num_events + 1 WHERE id = :campaign_id AND deleted_at IS NULL
    RETURNING id, project, num_events
)
INSERT INTO outbox (event_id, job_id, project, generation, type, data)
SELECT 'evt_' || split_part(id, '_', 2) || '_' || num_events, id, project, num_events, :type, :data FROM told
RETURNING event_id
""").bindparams(bindparam("data", type_=JSONB))

# a campaign that nobody wants to follow costs one look at its own row
_TELL_PROGRESS = text("""
WITH followed AS (
    SELECT id FROM campaigns AS c
    WHERE state = 'in_progress' AND loaded_at IS NOT NULL AND deleted_at IS NULL
        AND (told_progress_at IS NULL OR told_progress_at <= now() - make_interval(secs => :seconds))
        AND (
            coalesce(jsonb_exists(webhook -> 'events', :type), false) OR EXISTS (
                SELECT FROM webhook_endpoints AS e WHERE e.project = c.project AND e.origin IS NULL
                    AND e.deleted_at IS NULL AND e.state = 'enabled' AND :type = ANY (e.event_types)
            )
        )
), standing AS (
    SELECT campaign_id AS id, sum(completed + failed + cancelled + expired + invalid) AS ended,
        sum(queued + in_progress) AS open
    FROM campaign_counts WHERE campaign_id IN (SELECT id FROM followed) GROUP BY campaign_id
), risen AS (
    SELECT id, :step * div(100 * ended, :step * (ended + open)) AS percent
    FROM standing WHERE ended > 0 AND open > 0
), due AS MATERIALIZED (
    SELECT c.id, percent FROM campaigns AS c JOIN risen ON risen.id = c.id WHERE percent > c.told_progress
    ORDER BY c.id LIMIT :limit FOR NO KEY UPDATE OF c SKIP LOCKED
), told AS (
    UPDATE campaigns AS c SET told_progress = percent, told_progress_at = now(), num_events = num_events + 1
    FROM due
    WHERE c.id = due.id AND c.state = 'in_progress' AND percent > c.told_progress
        AND (c.told_progress_at IS NULL OR c.told_progress_at <= now() - make_interval(secs => :seconds))
    RETURNING c.id, c.project, c.num_events
)
INSERT INTO outbox (event_id, job_id, project, generation, type)
SELECT 'evt_' || split_part(id, '_', 2) || '_' || num_events, id, project, num_events, :type FROM told
RETURNING job_id
""")


def tell(campaign_id: str, type: str, data: Mapping[str, Any] | None = None) -> TextClause:
    """Write an event of one of `BATCH_TYPES`, after what it tells of was written. Its id; no row: deleted.

    Args:
        data: members of the event's `data` beside those that every event of a campaign has.
    """
    if type not in BATCH_TYPES:
        raise ValueError(f"{type} is no event of a campaign")
    return _TELL.bindparams(campaign_id=campaign_id, type=type, data=dict(data or {}))


def tell_progress() -> TextClause:
    """Write `batch.progress` for campaigns that have risen by a step and that somebody follows. Their ids.

    Any number of callers may run: each event is written by one of them.
    """
    return _TELL_PROGRESS.bindparams(
        seconds=PROGRESS_SECONDS, step=PROGRESS_STEP, limit=MAX_AT_ONCE, type=BATCH_PROGRESS
    )
