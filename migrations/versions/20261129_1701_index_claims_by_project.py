"""index claims by project

Revision: d27b6c8e41f0, after 9c1f0e5d7a42. The previous release is still running while this one runs:
it must go on working on the new schema. Its claims only become slower: they keep their order and lose their index.

Indexes are built without keeping writers out. A run that was broken off leaves an invalid one: the next run begins
by dropping it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

revision = "d27b6c8e41f0"
down_revision = "9c1f0e5d7a42"
branch_labels = None
depends_on = None

RETAINED = "state = 'completed' AND deleted_at IS NULL AND NOT (result ? 'deleted_at')"


def upgrade() -> None:
    op.execute(
        "INSERT INTO project_shares (project) SELECT DISTINCT project FROM jobs WHERE state = 'queued' "
        "ON CONFLICT DO NOTHING"
    )
    _build_index("ix_jobs_deadline", ["deadline_at"], "deadline_at IS NOT NULL AND state = 'queued'")
    _build_index("ix_jobs_retained", ["finished_at"], RETAINED)
    _build_index("ix_jobs_claim", ["model", "priority", "project", "run_at", "id"], "state = 'queued'")
    _drop_index("ix_jobs_ready")


def downgrade() -> None:
    _build_index("ix_jobs_ready", ["model", "priority", "run_at", "id"], "state = 'queued'")
    for name in ("ix_jobs_claim", "ix_jobs_retained", "ix_jobs_deadline"):
        _drop_index(name)


def _build_index(name: str, columns: Sequence[str], where: str) -> None:
    _drop_index(name)
    with _patience():
        op.create_index(name, "jobs", columns, postgresql_where=sa.text(where), postgresql_concurrently=True)


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
