"""index webhook deliveries by project and state

Revision: a47d90be6c13, after 8d3f27a95c1e. Indexes are built without keeping writers out. A run that was broken off
leaves an invalid one: the next run begins by dropping it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

revision = "a47d90be6c13"
down_revision = "8d3f27a95c1e"
branch_labels = None
depends_on = None

NAME = "ix_webhook_deliveries_project_state"


def upgrade() -> None:
    _drop_index()
    with _patience():
        op.create_index(
            NAME,
            "webhook_deliveries",
            ["project", "state", "id"],
            postgresql_where=sa.text("state IN ('pending', 'delivering', 'failed', 'cancelled')"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    _drop_index()


def _drop_index() -> None:
    with _patience():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {NAME}")


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
