"""create jobs

Revision: 5148ce10a63d, the first. The previous release is still running while this one runs:
it must go on working on the new schema.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "5148ce10a63d"
down_revision = None
branch_labels = None
depends_on = None


GUARD = """
CREATE FUNCTION jobs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('queued', 'claimed'), ('queued', 'cancelled'), ('queued', 'expired'), ('queued', 'failed'),
        ('claimed', 'running'), ('claimed', 'queued'), ('claimed', 'cancelled'), ('claimed', 'failed'),
        ('running', 'completed'), ('running', 'failed'), ('running', 'cancelled'), ('running', 'queued')
    ) THEN
        RAISE EXCEPTION 'illegal transition of job %: % -> %', OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.state = 'claimed' AND OLD.state <> 'claimed' AND NEW.fence <= coalesce(OLD.fence, 0) THEN
        RAISE EXCEPTION 'fence of job % must rise: % -> %', OLD.id, OLD.fence, NEW.fence
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
"""

HISTORY = """
CREATE FUNCTION jobs_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO job_events (job_id, old_state, new_state, attempt, fence)
        VALUES (NEW.id, NULL, NEW.state, NEW.attempt, NEW.fence);
        RETURN NULL;
    END IF;
    IF NEW.state = OLD.state THEN
        RETURN NULL;
    END IF;
    INSERT INTO job_events (job_id, old_state, new_state, attempt, fence)
    VALUES (NEW.id, OLD.state, NEW.state, NEW.attempt, NEW.fence);
    IF NEW.state = 'claimed' THEN
        INSERT INTO job_attempts (job_id, fence, attempt, lease_owner)
        VALUES (NEW.id, NEW.fence, NEW.attempt, NEW.lease_owner);
    ELSIF NEW.state = 'running' THEN
        UPDATE job_attempts SET started_at = now() WHERE job_id = NEW.id AND fence = NEW.fence;
    ELSIF OLD.state IN ('claimed', 'running') THEN
        UPDATE job_attempts SET finished_at = now(), outcome = NEW.state, error = NEW.error
        WHERE job_id = NEW.id AND fence = NEW.fence;
    END IF;
    RETURN NULL;
END $$;
"""


def upgrade() -> None:
    op.execute("CREATE SEQUENCE job_fence_seq AS bigint")
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "queued",
                "claimed",
                "running",
                "completed",
                "failed",
                "cancelled",
                "expired",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            server_default="queued",
            nullable=False,
        ),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("width", sa.BigInteger(), nullable=False),
        sa.Column("height", sa.BigInteger(), nullable=False),
        sa.Column("num_frames", sa.BigInteger(), nullable=False),
        sa.Column("request", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("attempt", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.BigInteger(), nullable=False),
        sa.Column("crash_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("error_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("phase", sa.String(length=16), nullable=True),
        sa.Column("completed_steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("progress", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("result", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("error", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column(
            "timings",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("run_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("purged_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled', 'expired'))",
            name=op.f("ck_jobs_finished_at_iff_final"),
        ),
        sa.CheckConstraint(
            "(lease_until IS NOT NULL AND lease_owner IS NOT NULL AND fence IS NOT NULL) "
            "OR state NOT IN ('claimed', 'running')",
            name=op.f("ck_jobs_leased_states_hold_a_lease"),
        ),
        sa.CheckConstraint("(result IS NOT NULL) = (state = 'completed')", name=op.f("ck_jobs_result_iff_completed")),
        sa.CheckConstraint("error IS NULL OR state <> 'completed'", name=op.f("ck_jobs_no_error_when_completed")),
        sa.CheckConstraint(
            "lease_until IS NULL OR state IN ('claimed', 'running')", name=op.f("ck_jobs_lease_only_in_leased_states")
        ),
        sa.CheckConstraint("progress < 100 OR state = 'completed'", name=op.f("ck_jobs_progress_100_iff_completed")),
        sa.CheckConstraint("priority BETWEEN 0 AND 2", name=op.f("ck_jobs_priority_is_a_class")),
        sa.CheckConstraint("progress BETWEEN 0 AND 100", name=op.f("ck_jobs_progress_is_percent")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        postgresql_with={"fillfactor": 80},
    )
    op.create_index(
        "ix_jobs_leased",
        "jobs",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("state IN ('claimed', 'running')"),
    )
    op.create_index(
        "ix_jobs_project_id", "jobs", ["project", "id"], unique=False, postgresql_where=sa.text("deleted_at IS NULL")
    )
    op.create_index(
        "ix_jobs_ready",
        "jobs",
        ["model", "priority", "run_at", "id"],
        unique=False,
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_jobs_unpurged",
        "jobs",
        ["deleted_at"],
        unique=False,
        postgresql_where=sa.text("deleted_at IS NOT NULL AND purged_at IS NULL"),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("pool", sa.String(length=32), nullable=False),
        sa.Column("layout", sa.String(length=16), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column(
            "detail",
            postgresql.JSONB(none_as_null=True, astext_type=sa.Text()),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_index("ix_replicas_last_seen", "replicas", ["last_seen"], unique=False)
    op.create_table(
        "job_attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("error", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_attempts_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "fence", name=op.f("pk_job_attempts")),
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("old_state", sa.String(length=16), nullable=True),
        sa.Column("new_state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_events_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_events")),
    )
    op.create_index(op.f("ix_job_events_job_id"), "job_events", ["job_id"], unique=False)
    op.execute(GUARD)
    op.execute(HISTORY)
    op.execute("CREATE TRIGGER guard BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_guard()")
    op.execute("CREATE TRIGGER history AFTER INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_history()")


def downgrade() -> None:
    op.drop_index(op.f("ix_job_events_job_id"), table_name="job_events")
    op.drop_table("job_events")
    op.drop_table("job_attempts")
    op.drop_index("ix_replicas_last_seen", table_name="replicas")
    op.drop_table("replicas")
    op.drop_index(
        "ix_jobs_unpurged", table_name="jobs", postgresql_where=sa.text("deleted_at IS NOT NULL AND purged_at IS NULL")
    )
    op.drop_index("ix_jobs_ready", table_name="jobs", postgresql_where=sa.text("state = 'queued'"))
    op.drop_index("ix_jobs_project_id", table_name="jobs", postgresql_where=sa.text("deleted_at IS NULL"))
    op.drop_index("ix_jobs_leased", table_name="jobs", postgresql_where=sa.text("state IN ('claimed', 'running')"))
    op.drop_table("jobs")
    op.execute("DROP FUNCTION jobs_history()")
    op.execute("DROP FUNCTION jobs_guard()")
    op.execute("DROP SEQUENCE job_fence_seq")
