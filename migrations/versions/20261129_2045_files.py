"""files that clients upload

Revision ID: 8d3f27a95c1e
Revises: c2d8e41f07b5
Create Date: 2026-11-29 20:45:00+00:00
"""

import sqlalchemy as sa
from alembic import op

revision = "8d3f27a95c1e"
down_revision = "c2d8e41f07b5"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("purged_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("bytes > 0", name=op.f("ck_files_bytes_is_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    for name, columns, where in (
        ("visible", ["project", "id"], "deleted_at IS NULL"),
        ("expires_at", ["expires_at"], "deleted_at IS NULL AND expires_at IS NOT NULL"),
        ("unpurged", ["deleted_at"], "deleted_at IS NOT NULL AND purged_at IS NULL"),
    ):
        op.create_index(f"ix_files_{name}", "files", columns, postgresql_where=sa.text(where))


def downgrade() -> None:
    op.drop_table("files")
