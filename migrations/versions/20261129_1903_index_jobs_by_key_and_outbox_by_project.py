"""index jobs by key and state, the outbox by project

Revision: 3be7f1c94a20, after 71c5a0e8d3f6. The previous release is still running while this one runs: its claims only
become slower.

Indexes are built without keeping writers out. A run that was broken off leaves an invalid one: the next run begins
by dropping it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "3be7f1c94a20"
down_revision = "71c5a0e8d3f6"
branch_labels = None
depends_on = None

RETAINED = "state = 'completed' AND deleted_at IS NULL AND NOT (result ? 'deleted_at')"
CLAIM_COLUMNS = ["model", "priority", "project", "run_at", "id"]


def upgrade() -> None:
    with _patience():
        op.execute("ALTER TABLE jobs VALIDATE CONSTRAINT ck_jobs_hold_only_while_queued")
    _build_index("ix_jobs_project_state", "jobs", ["project", "state", "id"], "deleted_at IS NULL")
    _build_index(
        "ix_jobs_metadata",
        "jobs",
        [sa.text("(request -> 'metadata')")],
        "deleted_at IS NULL AND (request -> 'metadata') <> '{}'::jsonb",
        postgresql_using="gin",
    )
    _build_index("ix_jobs_queued_by_key", "jobs", ["api_key", "hold", "priority", "run_at", "id"], "state = 'queued'")
    _build_index("ix_jobs_retain_until", "jobs", ["retain_until"], f"retain_until IS NOT NULL AND {RETAINED}")
    _build_index("ix_jobs_claimable", "jobs", CLAIM_COLUMNS, "state = 'queued' AND hold IS NULL")
    _drop_index("ix_jobs_claim")
    _build_index(
        "uq_outbox_end",
        "outbox",
        ["job_id", "generation"],
        "type NOT IN ('video.started', 'video.progress')",
        unique=True,
    )
    _build_index("ix_outbox_project", "outbox", ["project", "created_at", "id"])
    _build_index("ix_outbox_job_id", "outbox", ["job_id", "created_at"])


def downgrade() -> None:
    for name in ("ix_outbox_job_id", "ix_outbox_project", "uq_outbox_end"):
        _drop_index(name)
    _build_index("ix_jobs_claim", "jobs", CLAIM_COLUMNS, "state = 'queued'")
    for name in ("claimable", "retain_until", "queued_by_key", "metadata", "project_state"):
        _drop_index(f"ix_jobs_{name}")


def _build_index(name: str, table: str, columns: Sequence[Any], where: str | None = None, **options: Any) -> None:
    _drop_index(name)
    predicate = None if where is None else sa.text(where)
    with _patience():
        op.create_index(name, table, columns, postgresql_where=predicate, postgresql_concurrently=True, **options)


def _drop_index(name: str) -> None:
    with _patience():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")


@contextmanager
def _patience() -> Iterator[None]:
    """No transaction and no time limits: what is done concurrently waits for older ones and holds up nobody."""
    with op.get_context().autocommit_block():
        limits = {name: op.get_bind().scalar(sa.text(f"SHOW {name}")) for name in ("lock_timeout", "statement_timeout")}
        for name in limits:
            op.execute(f"SET {name} = 0")
        try:
            yield
        finally:
            for name, limit in limits.items():
                op.execute(f"SET {name} = '{limit}'")
