"""where webhooks went, and until when endpoints asked to be left alone

Revision: 7be1d04a93f6, after c4e07b92d1a8. An attempt at a delivery knows the URL that it was made at, which an
endpoint may have changed since. Endpoints keep the wait that they asked for apart from pauses, which a success ends.
The previous release may still be running while this one runs: its attempts have no URL, and its senders end such
waits with pauses.
"""

import sqlalchemy as sa
from alembic import op

revision = "7be1d04a93f6"
down_revision = "c4e07b92d1a8"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook_attempts", sa.Column("url", sa.Text()))
    op.add_column("webhook_endpoints", sa.Column("held_until", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("webhook_endpoints", "held_until")
    op.drop_column("webhook_attempts", "url")
