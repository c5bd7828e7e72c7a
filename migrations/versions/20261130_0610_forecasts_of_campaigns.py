"""forecasts of campaigns

Revision: 5d0c7be2a914, after 2f6b8d0c71ae. How fast each campaign goes is kept beside it, and what was foreseen of
those that have ended. The previous release may still be running while this one runs.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "5d0c7be2a914"
down_revision = "2f6b8d0c71ae"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "campaign_forecasts",
        sa.Column("campaign_id", sa.Text(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_ended", sa.BigInteger(), nullable=False),
        sa.Column("num_dropped", sa.BigInteger(), nullable=False),
        sa.Column("work_left", sa.Double(), nullable=False),
        sa.Column("may_run", sa.Boolean(), nullable=False),
        sa.Column("pace", postgresql.JSONB(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=True),
        sa.Column("seconds_p50", sa.Double(), nullable=True),
        sa.Column("seconds_p90", sa.Double(), nullable=True),
        sa.Column("basis", sa.Text(), nullable=True),
        sa.Column("told", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_campaign_forecasts_campaign_id_campaigns"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", name=op.f("pk_campaign_forecasts")),
        postgresql_with={"fillfactor": 20},
    )
    op.create_index("ix_campaign_forecasts_ended_at", "campaign_forecasts", ["ended_at"])


def downgrade() -> None:
    op.drop_table("campaign_forecasts")
