"""retries in place, shares of projects, outbox, idempotency keys

Revision: 9c1f0e5d7a42. The previous release is still running while this one runs:
it must go on working on the new schema.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "9c1f0e5d7a42"
down_revision = "5148ce10a63d"
branch_labels = None
depends_on = None


GUARD = """
CREATE OR REPLACE FUNCTION jobs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    retried CONSTANT boolean := NEW.state = 'queued' AND OLD.state IN ('failed', 'cancelled', 'expired');
BEGIN
    IF NEW.state <> OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('queued', 'claimed'), ('queued', 'cancelled'), ('queued', 'expired'), ('queued', 'failed'),
        ('claimed', 'running'), ('claimed', 'queued'), ('claimed', 'cancelled'), ('claimed', 'failed'),
        ('claimed', 'expired'),
        ('running', 'completed'), ('running', 'failed'), ('running', 'cancelled'), ('running', 'queued'),
        ('failed', 'queued'), ('cancelled', 'queued'), ('expired', 'queued')
    ) THEN
        RAISE EXCEPTION 'illegal transition of job %: % -> %', OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.generation <> OLD.generation + retried::int THEN
        RAISE EXCEPTION 'generation of job % must rise by one with a retry and stay otherwise: % -> %',
            OLD.id, OLD.generation, NEW.generation USING ERRCODE = 'check_violation';
    END IF;
    IF retried AND (OLD.deleted_at IS NOT NULL OR NEW.deleted_at IS NOT NULL) THEN
        RAISE EXCEPTION 'job % is deleted: it cannot be retried', OLD.id USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.state <> OLD.state AND NEW.state IN ('claimed', 'running', 'completed')
        AND NEW.cancel_requested_at IS NOT NULL THEN
        RAISE EXCEPTION 'job % is to be cancelled: it cannot become %', OLD.id, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.state = 'claimed' AND OLD.state <> 'claimed' AND NEW.fence <= coalesce(OLD.fence, 0) THEN
        RAISE EXCEPTION 'fence of job % must rise: % -> %', OLD.id, OLD.fence, NEW.fence
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.progress < OLD.progress AND NOT retried THEN
        RAISE EXCEPTION 'progress of job % must not fall: % -> %', OLD.id, OLD.progress, NEW.progress
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
"""

# renewals and progress reports, most of all updates, call no function
GUARD_TRIGGER = """
CREATE OR REPLACE TRIGGER guard BEFORE UPDATE ON jobs FOR EACH ROW
WHEN (NEW.state <> OLD.state OR NEW.generation <> OLD.generation OR NEW.progress < OLD.progress)
EXECUTE FUNCTION jobs_guard()
"""

HISTORY = """
CREATE OR REPLACE FUNCTION jobs_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
    VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence);
    IF NEW.state = 'claimed' THEN
        INSERT INTO job_attempts (job_id, fence, generation, attempt, lease_owner)
        VALUES (NEW.id, NEW.fence, NEW.generation, NEW.attempt, NEW.lease_owner);
        RETURN NULL;
    END IF;
    IF NEW.state = 'running' THEN
        UPDATE job_attempts SET started_at = now() WHERE job_id = NEW.id AND fence = NEW.fence;
        RETURN NULL;
    END IF;
    IF OLD.state IN ('claimed', 'running') THEN
        UPDATE job_attempts
        SET finished_at = now(), outcome = NEW.state, error = NEW.error, crashed = NEW.crash_count > OLD.crash_count
        WHERE job_id = NEW.id AND fence = NEW.fence;
    END IF;
    IF NEW.state = 'queued' THEN
        INSERT INTO project_shares (project) VALUES (NEW.project) ON CONFLICT DO NOTHING;
    ELSIF NEW.deleted_at IS NULL THEN
        INSERT INTO outbox (event_id, job_id, project, generation, type)
        VALUES (
            'evt_' || split_part(NEW.id, '_', 2) || '_' || NEW.generation,
            NEW.id, NEW.project, NEW.generation, 'video.' || NEW.state
        );
    END IF;
    RETURN NULL;
END $$;
"""

HISTORY_TRIGGER = """
CREATE TRIGGER history AFTER UPDATE ON jobs FOR EACH ROW WHEN (NEW.state <> OLD.state)
EXECUTE FUNCTION jobs_history()
"""

# once a statement, whatever number of jobs it accepts
ACCEPTED = """
CREATE FUNCTION jobs_accepted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
    SELECT id, NULL, state, generation, attempt, fence FROM accepted;
    INSERT INTO project_shares (project) SELECT DISTINCT project FROM accepted ORDER BY project ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
"""

ACCEPTED_TRIGGER = """
CREATE TRIGGER accepted AFTER INSERT ON jobs REFERENCING NEW TABLE AS accepted FOR EACH STATEMENT
EXECUTE FUNCTION jobs_accepted()
"""

OLD_GUARD = """
CREATE OR REPLACE FUNCTION jobs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
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

OLD_HISTORY = """
CREATE OR REPLACE FUNCTION jobs_history() RETURNS trigger LANGUAGE plpgsql AS $$
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
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("event_id", name=op.f("uq_outbox_event_id")),
        sa.UniqueConstraint("job_id", "generation", name=op.f("uq_outbox_job_id")),
    )
    op.create_table(
        "project_shares",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("virtual_time", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_start", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_project_shares")),
        postgresql_with={"fillfactor": 20},
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=True),
        sa.Column("body", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("project", "route", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"])

    op.add_column("jobs", _generation())
    op.add_column(
        "jobs",
        sa.Column("crashed_on", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'::text[]"), nullable=False),
    )
    op.add_column("jobs", sa.Column("low_memory", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("job_attempts", _generation())
    op.add_column("job_attempts", sa.Column("crashed", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("job_events", _generation())
    op.execute(GUARD)
    op.execute(GUARD_TRIGGER)
    op.execute(HISTORY)
    op.execute(ACCEPTED)
    op.execute("DROP TRIGGER history ON jobs")
    op.execute(HISTORY_TRIGGER)
    op.execute(ACCEPTED_TRIGGER)


def downgrade() -> None:
    op.execute(OLD_GUARD)
    op.execute("CREATE OR REPLACE TRIGGER guard BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_guard()")
    op.execute("DROP TRIGGER accepted ON jobs")
    op.execute("DROP TRIGGER history ON jobs")
    op.execute("DROP FUNCTION jobs_accepted()")
    op.execute(OLD_HISTORY)
    op.execute("CREATE TRIGGER history AFTER INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_history()")
    op.drop_column("job_events", "generation")
    op.drop_column("job_attempts", "crashed")
    op.drop_column("job_attempts", "generation")
    op.drop_column("jobs", "low_memory")
    op.drop_column("jobs", "crashed_on")
    op.drop_column("jobs", "generation")
    op.drop_index(op.f("ix_idempotency_keys_created_at"), table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_table("project_shares")
    op.drop_table("outbox")


def _generation() -> sa.Column[int]:
    return sa.Column("generation", sa.BigInteger(), server_default=sa.text("1"), nullable=False)
