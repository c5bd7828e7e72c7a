"""ends of jobs, counted, and beats of processes

Revision: c4e07b92d1a8, after 83a5c1f0d94e. Each end of a job leaves a row, which the dispatcher adds to the counts:
what a metric tells of them never falls. The processes that work without being asked say that they did. The previous
release may still be running while this one runs: its jobs are counted, and the rows stay until a dispatcher of this one
runs.
"""

from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "c4e07b92d1a8"
down_revision = "83a5c1f0d94e"
branch_labels = None
depends_on = None

# of a job that was deleted meanwhile, too
_IS_END = "    ELSIF NEW.deleted_at IS NULL THEN\n        what := 'video.' || NEW.state;\n"
_COUNTED = """    ELSE
        INSERT INTO job_ends (state, code) VALUES (
            NEW.state, CASE WHEN NEW.state = 'completed' THEN '' ELSE coalesce(NEW.error ->> 'code', '') END
        );
    END IF;
    IF NEW.state <> 'queued' AND NEW.deleted_at IS NULL THEN
        what := 'video.' || NEW.state;
"""


def upgrade() -> None:
    op.create_table(
        "job_ends",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_ends")),
    )
    op.create_table(
        "job_end_counts",
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("num_jobs", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("state", "code", name=op.f("pk_job_end_counts")),
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        "beats",
        sa.Column("process", sa.String(length=16), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("process", name=op.f("pk_beats")),
        postgresql_with={"fillfactor": 20},
    )
    history = _history()
    assert history.count(_IS_END) == 1
    op.execute(history.replace(_IS_END, _COUNTED))


def downgrade() -> None:
    op.execute(_history())
    for table in ("beats", "job_end_counts", "job_ends"):
        op.drop_table(table)


def _history() -> str:
    """The function that writes the history of jobs, as it was before."""
    revision: Any = context.script.get_revision("2f6b8d0c71ae")
    return revision.module.HISTORY
