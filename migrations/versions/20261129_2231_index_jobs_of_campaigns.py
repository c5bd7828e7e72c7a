"""index jobs of campaigns

Revision: e8c3417f9b60, after 5b1e9c07d2a4. Indexes are built without keeping writers out. A run that was broken off
leaves an invalid one: the next run begins by dropping it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

revision = "e8c3417f9b60"
down_revision = "5b1e9c07d2a4"
branch_labels = None
depends_on = None

OF_CAMPAIGNS = "campaign_id IS NOT NULL"
OPEN = "state IN ('queued', 'claimed', 'running') AND hold IS DISTINCT FROM 'campaign'"
INDEXES = {
    "uq_jobs_campaign_line": (["campaign_id", "line"], True, OF_CAMPAIGNS),
    "uq_jobs_campaign_custom_id": (["campaign_id", "custom_id"], True, OF_CAMPAIGNS),
    "ix_jobs_campaign_state": (["campaign_id", "state", "line"], False, OF_CAMPAIGNS),
    "ix_jobs_campaign_open": (["campaign_id", "state"], False, f"{OF_CAMPAIGNS} AND {OPEN}"),
}


def upgrade() -> None:
    for name, (columns, unique, where) in INDEXES.items():
        _drop_index(name)
        with _patience():
            op.create_index(
                name,
                "jobs",
                columns,
                unique=unique,
                postgresql_where=sa.text(where),
                postgresql_concurrently=True,
            )


def downgrade() -> None:
    for name in reversed(INDEXES):
        _drop_index(name)


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
