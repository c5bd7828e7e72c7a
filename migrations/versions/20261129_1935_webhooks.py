"""webhooks: endpoints, deliveries, and events that find their endpoints by themselves

Revision ID: c2d8e41f07b5
Revises: 3be7f1c94a20
Create Date: 2026-11-29 19:35:00+00:00
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "c2d8e41f07b5"
down_revision = "3be7f1c94a20"
branch_labels = None
depends_on = None

DELIVERY_ID = """
CREATE FUNCTION new_webhook_delivery_id() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT 'whd_' || lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
        || left(replace(gen_random_uuid()::text, '-', ''), 20)
$$;
"""

# who is to be told of an event
TARGETS = """
CREATE FUNCTION webhook_targets(event outbox) RETURNS TABLE (endpoint_id text, url text) LANGUAGE sql STABLE AS $$
    SELECT id, NULL FROM webhook_endpoints
    WHERE project = event.project AND origin IS NULL AND deleted_at IS NULL AND state = 'enabled'
        AND event.type = ANY (event_types)
    UNION ALL
    SELECT request -> 'webhook' ->> 'endpoint', request -> 'webhook' ->> 'url' FROM jobs
    WHERE id = event.job_id AND jsonb_exists(request -> 'webhook' -> 'events', event.type)
$$;
"""

# every event adds an entry to the job's history but progress, which rises between two of them
DESCRIBE = """
CREATE FUNCTION outbox_describe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    SELECT jsonb_build_object(
        'status', CASE WHEN state = 'running' THEN 'in_progress' ELSE state END,
        'attempt', attempt,
        'progress', progress,
        'error', CASE WHEN state IN ('failed', 'cancelled', 'expired') THEN error END,
        'sequence', 1000 * (SELECT count(*) FROM job_events WHERE job_events.job_id = jobs.id) + progress
    ) INTO NEW.data FROM jobs WHERE id = NEW.job_id;
    RETURN NEW;
END $$;
"""

FAN_OUT = """
CREATE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_endpoints (id, project, origin)
    SELECT request -> 'webhook' ->> 'endpoint', NEW.project, request -> 'webhook' ->> 'origin' FROM jobs
    WHERE id = NEW.job_id AND jsonb_exists(request -> 'webhook' -> 'events', NEW.type)
    ON CONFLICT (id) DO NOTHING;
    INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, job_id, type, sequence, url)
    SELECT new_webhook_delivery_id(), NEW.project, endpoint_id, NEW.event_id, NEW.job_id, NEW.type,
        coalesce((NEW.data ->> 'sequence')::bigint, 0), url
    FROM webhook_targets(NEW);
    RETURN NULL;
END $$;
"""

TELL = """
CREATE FUNCTION jobs_tell() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    what CONSTANT text := CASE WHEN OLD.state = 'running' THEN 'video.progress' ELSE 'video.started' END;
BEGIN
    IF NEW.deleted_at IS NOT NULL OR NOT (
        coalesce(jsonb_exists(NEW.request -> 'webhook' -> 'events', what), false) OR EXISTS (
            SELECT FROM webhook_endpoints WHERE project = NEW.project AND origin IS NULL AND deleted_at IS NULL
                AND state = 'enabled' AND what = ANY (event_types)
        )
    ) THEN
        RETURN NULL;
    END IF;
    IF what = 'video.progress' AND EXISTS (
        SELECT FROM outbox WHERE job_id = NEW.id AND type = what AND created_at > now() - interval '10 s'
    ) THEN
        RETURN NULL;
    END IF;
    INSERT INTO outbox (event_id, job_id, project, generation, type)
    VALUES (
        'evt_' || split_part(NEW.id, '_', 2) || '_' || NEW.generation
            || CASE what WHEN 'video.progress' THEN '_p' || NEW.progress ELSE '_s' || NEW.fence END,
        NEW.id, NEW.project, NEW.generation, what
    ) ON CONFLICT (event_id) DO NOTHING;
    RETURN NULL;
END $$;
"""

TRIGGERS = (
    "CREATE TRIGGER describe BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_describe()",
    "CREATE TRIGGER fan_out AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_fan_out()",
    # after the trigger `history`: triggers of one kind run in the order of their names
    "CREATE TRIGGER tell AFTER UPDATE ON jobs FOR EACH ROW WHEN ("
    "NEW.state = 'running' AND (OLD.state <> 'running' OR NEW.progress > OLD.progress)"
    ") EXECUTE FUNCTION jobs_tell()",
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("webhook", _jsonb(), nullable=True))
    op.add_column("outbox", sa.Column("data", _jsonb(), nullable=True))
    op.drop_constraint(op.f("uq_outbox_job_id"), "outbox")
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("event_types", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'::text[]"), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=True),
        sa.Column("secret_hint", sa.Text(), nullable=True),
        sa.Column("previous_secret", sa.LargeBinary(), nullable=True),
        _time("previous_until"),
        sa.Column("state", sa.String(length=16), server_default=sa.text("'enabled'"), nullable=False),
        sa.Column("disabled_reason", sa.String(length=32), nullable=True),
        sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        _time("failing_since"),
        _time("open_until"),
        _now("created_at"),
        _now("updated_at"),
        _time("deleted_at"),
        _check("webhook_endpoints", "state", "state IN ('enabled', 'disabled')"),
        _check(
            "webhook_endpoints",
            "registered_or_origin",
            "(origin IS NULL) = (url IS NOT NULL AND secret IS NOT NULL)",
        ),
        _check("webhook_endpoints", "previous_secret_ends", "(previous_secret IS NULL) = (previous_until IS NULL)"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(
        "ix_webhook_endpoints_registered",
        "webhook_endpoints",
        ["project", "id"],
        postgresql_where=sa.text("deleted_at IS NULL AND origin IS NULL"),
    )
    op.create_table(
        "webhook_secrets",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("previous_secret", sa.LargeBinary(), nullable=True),
        _time("previous_until"),
        _now("created_at"),
        _now("updated_at"),
        _check("webhook_secrets", "previous_secret_ends", "(previous_secret IS NULL) = (previous_until IS NULL)"),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_webhook_secrets")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=16), server_default=sa.text("'event'"), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("step", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        _now("next_at"),
        sa.Column("fence", sa.BigInteger(), nullable=True),
        _time("lease_until"),
        sa.Column("last_status", sa.SmallInteger(), nullable=True),
        sa.Column("last_error", sa.String(length=32), nullable=True),
        _now("created_at"),
        _time("finished_at"),
        _check(
            "webhook_deliveries",
            "state",
            "state IN ('pending', 'delivering', 'delivered', 'failed', 'cancelled')",
        ),
        _check("webhook_deliveries", "lease_iff_delivering", "(state = 'delivering') = (lease_until IS NOT NULL)"),
        _check(
            "webhook_deliveries",
            "finished_at_iff_final",
            "(finished_at IS NOT NULL) = (state IN ('delivered', 'failed', 'cancelled'))",
        ),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id_webhook_endpoints"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        postgresql_with={"fillfactor": 70},
    )
    for name, columns, where in (
        ("pending", ["endpoint_id", "next_at", "id"], "state = 'pending'"),
        ("leased", ["lease_until", "endpoint_id"], "state = 'delivering'"),
        ("tests", ["id"], "state = 'pending' AND kind = 'test'"),
        ("project", ["project", "id"], None),
        ("job_id", ["job_id", "endpoint_id"], None),
        ("endpoint_id", ["endpoint_id", "event_id"], None),
        ("finished_at", ["finished_at"], None),
    ):
        op.create_index(
            f"ix_webhook_deliveries_{name}",
            "webhook_deliveries",
            columns,
            postgresql_where=None if where is None else sa.text(where),
        )
    op.create_table(
        "webhook_attempts",
        sa.Column("delivery_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        _now("at"),
        sa.Column("status", sa.SmallInteger(), nullable=True),
        sa.Column("error", sa.String(length=32), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("excerpt", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["webhook_deliveries.id"],
            name=op.f("fk_webhook_attempts_delivery_id_webhook_deliveries"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("delivery_id", "number", name=op.f("pk_webhook_attempts")),
    )
    op.execute("CREATE SEQUENCE webhook_fence")
    for function in (DELIVERY_ID, TARGETS, DESCRIBE, FAN_OUT, TELL):
        op.execute(function)
    for trigger in TRIGGERS:
        op.execute(trigger)


def downgrade() -> None:
    op.execute("DROP TRIGGER tell ON jobs")
    op.execute("DROP TRIGGER fan_out ON outbox")
    op.execute("DROP TRIGGER describe ON outbox")
    for function in ("jobs_tell", "outbox_fan_out", "outbox_describe", "webhook_targets", "new_webhook_delivery_id"):
        op.execute(f"DROP FUNCTION {function}")
    op.execute("DROP SEQUENCE webhook_fence")
    for name in ("webhook_attempts", "webhook_deliveries", "webhook_secrets", "webhook_endpoints"):
        op.drop_table(name)
    op.execute("DELETE FROM outbox WHERE type IN ('video.started', 'video.progress')")
    op.create_unique_constraint(op.f("uq_outbox_job_id"), "outbox", ["job_id", "generation"])
    op.drop_column("outbox", "data")
    op.drop_column("jobs", "webhook")


def _jsonb() -> Any:
    return postgresql.JSONB(none_as_null=True, astext_type=sa.Text())


def _time(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=True)


def _now(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def _check(table: str, name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(f"ck_{table}_{name}"))
