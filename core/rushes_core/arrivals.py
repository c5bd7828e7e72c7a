"""New jobs: one statement inserts as many as there are.

As text: SQLAlchemy takes longer to build such a statement than Postgres to run it.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import class_mapper

from rushes_core.models import Job

JOB_COLUMNS = tuple(column.key for column in class_mapper(Job).column_attrs)
"""What `insert_jobs` returns of each job, in this order."""


def insert_jobs(parameter: str) -> str:
    """-> QUEUED, of the jobs that `parameter` holds, as `together` makes it. One whose id there is already is left out.

    Those of a key with `max_running` are held, whatever a process remembers of the key: `holds.open_holds` is to follow
    in the same transaction.
    """
    return f"""
    INSERT INTO jobs (
        id, project, api_key, state, hold, priority, model, prompt, seed, width, height, num_frames, request,
        remixed_from, max_attempts, run_at, deadline_at, retain_until, webhook
    )
    SELECT id, project, api_key, 'queued',
        (SELECT 'concurrency' FROM api_keys WHERE api_keys.id = new.api_key AND max_running IS NOT NULL),
        priority, model, prompt, seed, width, height, num_frames, request, remixed_from, max_attempts,
        coalesce(run_at, now()), deadline_at, now() + make_interval(secs => retention_seconds), webhook
    FROM json_to_recordset(CAST({parameter} AS json)) AS new (
        id text, project text, api_key text, priority smallint, model text, prompt text, seed bigint, width bigint,
        height bigint, num_frames bigint, request jsonb, remixed_from text, max_attempts bigint, run_at timestamptz,
        deadline_at timestamptz, retention_seconds bigint, webhook jsonb
    )
    ON CONFLICT (id) DO NOTHING
    RETURNING {", ".join(JOB_COLUMNS)}
    """


CREATE = select(Job).from_statement(text(insert_jobs(":jobs")))
"""`insert_jobs` for a session, with the parameter `jobs`."""


def encoded(job: Mapping[str, Any]) -> str:
    """A job by the columns that a request decides, times with their zone; what is absent is null."""
    return json.dumps(job, default=datetime.isoformat, ensure_ascii=False)


def together(jobs: Iterable[str]) -> str:
    """Jobs that are `encoded`, as one parameter."""
    return f"[{','.join(jobs)}]"
