"""scope idempotency keys to API keys, keep answers as text

Revision: 4e7d20c3b915, after d27b6c8e41f0. The previous release is still running while this one runs:
it only ever drops keys, which goes on working.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "4e7d20c3b915"
down_revision = "d27b6c8e41f0"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # nobody has written one yet
    op.execute("DELETE FROM idempotency_keys")
    op.add_column("idempotency_keys", sa.Column("api_key", sa.Text(), nullable=False))
    op.drop_constraint("pk_idempotency_keys", "idempotency_keys")
    op.create_primary_key("pk_idempotency_keys", "idempotency_keys", ["project", "api_key", "route", "key"])
    op.alter_column("idempotency_keys", "body", type_=sa.Text(), postgresql_using="body::text")


def downgrade() -> None:
    op.execute("DELETE FROM idempotency_keys")
    op.alter_column(
        "idempotency_keys", "body", type_=postgresql.JSONB(none_as_null=True), postgresql_using="body::jsonb"
    )
    op.drop_constraint("pk_idempotency_keys", "idempotency_keys")
    op.drop_column("idempotency_keys", "api_key")
    op.create_primary_key("pk_idempotency_keys", "idempotency_keys", ["project", "route", "key"])
