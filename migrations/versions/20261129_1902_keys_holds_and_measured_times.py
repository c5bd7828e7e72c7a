"""projects and API keys, holds, pauses, measured times

Revision: 71c5a0e8d3f6, after b60f3d9a2e78. The previous release is still running while this one runs: its claims take
jobs that are held, which it does not know of.

Rows are read before the first lock that keeps writers out is taken; what follows it takes no time.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "71c5a0e8d3f6"
down_revision = "b60f3d9a2e78"
branch_labels = None
depends_on = None

COLUMNS = {
    "api_key": sa.Text(),
    "hold": sa.String(length=16),
    "remixed_from": sa.Text(),
    "retain_until": sa.DateTime(timezone=True),
}

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
    {holds}RETURN NEW;
END $$;
"""

# whoever moves a job on need not know why it was held
HOLDS = """IF NEW.state <> 'queued' THEN
        NEW.hold := NULL;
    END IF;
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
        SET finished_at = now(), outcome = NEW.state, error =
            CASE WHEN NEW.attempt < OLD.attempt AND NEW.error IS NOT DISTINCT FROM OLD.error THEN NULL
            ELSE NEW.error END, crashed = NEW.crash_count > OLD.crash_count
        WHERE job_id = NEW.id AND fence = NEW.fence;
    END IF;
    {usage}IF NEW.state = 'queued' THEN
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

# a layout is r, replicas, s, GPUs of each
USAGE = """IF OLD.state = 'running' AND OLD.started_at IS NOT NULL THEN
        INSERT INTO api_key_usage AS spent (api_key, day, gpu_seconds, attempts)
        SELECT id, (now() AT TIME ZONE 'UTC')::date, extract(epoch FROM now() - OLD.started_at) * coalesce(
            (SELECT substring(layout FROM 's([0-9]+)$')::int FROM replicas WHERE replicas.id = OLD.lease_owner), 1
        ), 1
        FROM api_keys WHERE id = OLD.api_key
        ON CONFLICT (api_key, day) DO UPDATE
        SET gpu_seconds = spent.gpu_seconds + excluded.gpu_seconds, attempts = spent.attempts + 1;
    END IF;
    """

# every statement in it sees what others have committed by then; that a key's open and leased jobs grow in number only
# under the lock makes the last count good until the end of the transaction
OPEN_HOLDS = """
CREATE FUNCTION open_holds(key text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    room bigint;
    closed integer;
    opened integer;
BEGIN
    PERFORM pg_advisory_xact_lock(738764375, hashtext(key));
    SELECT max_running INTO room FROM api_keys WHERE id = key;
    IF room IS NULL THEN
        WITH held AS MATERIALIZED (
            SELECT id FROM jobs WHERE state = 'queued' AND api_key = key AND hold = 'concurrency'
            ORDER BY priority, run_at, id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED
        ), changed AS (
            UPDATE jobs SET hold = NULL FROM held WHERE jobs.id = held.id RETURNING project
        ), shares AS (
            INSERT INTO project_shares (project) SELECT DISTINCT project FROM changed ON CONFLICT DO NOTHING
        )
        SELECT count(*) INTO opened FROM changed;
        RETURN opened;
    END IF;
    room := greatest(
        0, room - (SELECT count(*) FROM jobs WHERE state IN ('claimed', 'running') AND api_key = key)
    );
    WITH urgent AS MATERIALIZED (  -- places that held jobs of more urgent classes take from an open one
        SELECT class, (
            SELECT count(*) FROM (
                SELECT FROM (VALUES (0), (1)) AS urgency (more_urgent), LATERAL (
                    SELECT FROM jobs WHERE state = 'queued' AND api_key = key AND hold = 'concurrency'
                        AND priority = more_urgent AND run_at <= now()
                    LIMIT room
                ) AS held WHERE more_urgent < class
            ) AS counted
        ) AS count FROM (VALUES (0), (1), (2)) AS classes (class)
    ), open AS MATERIALIZED (
        SELECT id, priority, row_number() OVER (ORDER BY priority, run_at, id) AS place FROM (
            SELECT id, priority, run_at FROM jobs WHERE state = 'queued' AND api_key = key AND hold IS NULL
            ORDER BY priority, run_at, id LIMIT room + 1000
        ) AS first
    ), surplus AS MATERIALIZED (
        SELECT jobs.id FROM open JOIN urgent ON class = priority JOIN jobs ON jobs.id = open.id
        WHERE place + count > room AND jobs.state = 'queued'
        FOR NO KEY UPDATE OF jobs SKIP LOCKED
    )
    UPDATE jobs SET hold = 'concurrency' FROM surplus WHERE jobs.id = surplus.id AND jobs.state = 'queued';
    GET DIAGNOSTICS closed = ROW_COUNT;
    WITH free AS MATERIALIZED (
        SELECT least(1000, greatest(0, max_running - (
            SELECT count(*) FROM jobs WHERE state IN ('claimed', 'running') AND api_key = key
        ) - (
            SELECT count(*) FROM (
                SELECT FROM jobs WHERE state = 'queued' AND api_key = key AND hold IS NULL LIMIT max_running
            ) AS open
        ))) AS places FROM api_keys WHERE id = key
    ), held AS MATERIALIZED (
        SELECT first.id FROM (VALUES (0), (1), (2)) AS urgency (class), LATERAL (
            SELECT id, run_at FROM jobs WHERE state = 'queued' AND api_key = key AND hold = 'concurrency'
                AND priority = class AND run_at <= now()
            ORDER BY run_at, id LIMIT (SELECT places FROM free) FOR NO KEY UPDATE SKIP LOCKED
        ) AS first ORDER BY class, run_at, id LIMIT (SELECT places FROM free)
    ), changed AS (
        UPDATE jobs SET hold = NULL FROM held WHERE jobs.id = held.id RETURNING project
    ), shares AS (  -- the claim finds projects there
        INSERT INTO project_shares (project) SELECT DISTINCT project FROM changed ON CONFLICT DO NOTHING
    )
    SELECT count(*) INTO opened FROM changed;
    RETURN closed + opened;
END $$;
"""


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("name", sa.Text(), nullable=False),
        _now("created_at"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.execute("INSERT INTO projects (name) SELECT 'default' UNION SELECT DISTINCT project FROM jobs")
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("previous_digest", sa.LargeBinary(), nullable=True),
        sa.Column("previous_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("priorities", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("compat", sa.String(length=16), nullable=True),
        *(
            sa.Column(name, sa.BigInteger(), nullable=True)
            for name in ("requests_per_minute", "max_queued", "max_running", "daily_gpu_seconds")
        ),
        _now("created_at"),
        *(
            sa.Column(name, sa.DateTime(timezone=True), nullable=True)
            for name in ("expires_at", "revoked_at", "last_used_at")
        ),
        *(
            sa.CheckConstraint(f"{name} {rule}", name=op.f(f"ck_api_keys_{name}_{word}"))
            for name, rule, word in (
                ("requests_per_minute", "> 0", "is_positive"),
                ("max_queued", ">= 0", "is_not_negative"),
                ("max_running", "> 0", "is_positive"),
                ("daily_gpu_seconds", "> 0", "is_positive"),
            )
        ),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_api_keys_project_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
        sa.UniqueConstraint("previous_digest", name=op.f("uq_api_keys_previous_digest")),
    )
    op.create_index(op.f("ix_api_keys_project"), "api_keys", ["project"])
    op.create_table(
        "api_key_usage",
        sa.Column("api_key", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(
            ["api_key"], ["api_keys.id"], name=op.f("fk_api_key_usage_api_key_api_keys"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("api_key", "day", name=op.f("pk_api_key_usage")),
        postgresql_with={"fillfactor": 20},
    )
    op.create_table(
        "queue_pauses",
        sa.Column("project", sa.Text(), nullable=False),
        _now("paused_at"),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_queue_pauses")),
    )
    op.create_table(
        "measured_times",
        sa.Column("model", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("width", "height", "num_frames", "num_jobs")),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("run_p50", "run_p80")),
        sa.Column("phases", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        _now("updated_at"),
        sa.PrimaryKeyConstraint("model", "width", "height", "num_frames", name=op.f("pk_measured_times")),
    )
    op.add_column("replicas", sa.Column("drain_requested_at", sa.DateTime(timezone=True), nullable=True))
    for name, type_ in COLUMNS.items():
        op.add_column("jobs", sa.Column(name, type_, nullable=True))
    op.execute(GUARD.format(holds=HOLDS))
    op.execute(HISTORY.format(usage=USAGE))
    op.execute(OPEN_HOLDS)
    op.create_check_constraint(
        op.f("ck_jobs_hold_only_while_queued"), "jobs", "hold IS NULL OR state = 'queued'", postgresql_not_valid=True
    )


def downgrade() -> None:
    op.execute("DROP FUNCTION open_holds")
    op.drop_constraint(op.f("ck_jobs_hold_only_while_queued"), "jobs")
    op.execute(HISTORY.format(usage=""))
    op.execute(GUARD.format(holds=""))
    for name in reversed(COLUMNS):
        op.drop_column("jobs", name)
    op.drop_column("replicas", "drain_requested_at")
    for name in ("measured_times", "queue_pauses", "api_key_usage", "api_keys", "projects"):
        op.drop_table(name)


def _now(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)
