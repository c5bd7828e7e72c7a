"""campaigns: many jobs of one file, counted as they move, and weights of projects

Revision: 5b1e9c07d2a4, after a47d90be6c13. The previous release is still running while this one runs: it makes no jobs
of campaigns, and what it moves of them is counted by the triggers.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "5b1e9c07d2a4"
down_revision = "a47d90be6c13"
branch_labels = None
depends_on = None

JOB_COLUMNS = {
    "campaign_id": sa.Text(),
    "line": sa.BigInteger(),
    "custom_id": sa.Text(),
    "start_by": sa.DateTime(timezone=True),
    "stop_at": sa.DateTime(timezone=True),
    "charged": sa.Double(),
}

# A count is spread over rows of which each transaction takes one that is free: it may hold what another one waits for,
# as a claim holds the share of its project.
SHARDS = """
CREATE FUNCTION campaigns_accepted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO campaign_counts (campaign_id, shard) SELECT NEW.id, shard FROM generate_series(0, 7) AS shard;
    RETURN NULL;
END $$;
CREATE TRIGGER accepted AFTER INSERT ON campaigns FOR EACH ROW EXECUTE FUNCTION campaigns_accepted();
"""
COUNT = """
CREATE FUNCTION count_campaign_job(
    campaign text, old_state text, new_state text, cost bigint, seconds double precision
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO campaign_counts AS counts (
        campaign_id, shard, queued, in_progress, completed, failed, cancelled, expired, remaining_cost, gpu_seconds
    )
    SELECT campaign, coalesce((
            SELECT shard FROM campaign_counts WHERE campaign_id = campaign LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
        ), pg_backend_pid() % 8),
        (new_state = 'queued')::int - (old_state = 'queued')::int,
        (new_state IN ('claimed', 'running'))::int - (old_state IN ('claimed', 'running'))::int,
        (new_state = 'completed')::int,
        (new_state = 'failed')::int - (old_state = 'failed')::int,
        (new_state = 'cancelled')::int - (old_state = 'cancelled')::int,
        (new_state = 'expired')::int - (old_state = 'expired')::int,
        cost * (
            (new_state IN ('queued', 'claimed', 'running'))::int - (old_state IN ('queued', 'claimed', 'running'))::int
        ),
        seconds
    ON CONFLICT (campaign_id, shard) DO UPDATE SET
        queued = counts.queued + excluded.queued,
        in_progress = counts.in_progress + excluded.in_progress,
        completed = counts.completed + excluded.completed,
        failed = counts.failed + excluded.failed,
        cancelled = counts.cancelled + excluded.cancelled,
        expired = counts.expired + excluded.expired,
        remaining_cost = counts.remaining_cost + excluded.remaining_cost,
        gpu_seconds = counts.gpu_seconds + excluded.gpu_seconds
$$;
"""

# jobs are accepted queued; once a statement, whatever number of jobs it accepts
ACCEPTED = """
CREATE OR REPLACE FUNCTION jobs_accepted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
    SELECT id, NULL, state, generation, attempt, fence FROM accepted;
    INSERT INTO project_shares (project) SELECT DISTINCT project FROM accepted ORDER BY project ON CONFLICT DO NOTHING;
    {campaigns}RETURN NULL;
END $$;
"""
COUNT_ACCEPTED = """INSERT INTO campaign_counts AS counts (campaign_id, shard, queued, remaining_cost)
    SELECT campaign_id, pg_backend_pid() % 8, count(*), sum(num_frames * width * height / 10000)
    FROM accepted WHERE campaign_id IS NOT NULL GROUP BY campaign_id
    ON CONFLICT (campaign_id, shard) DO UPDATE SET
        queued = counts.queued + excluded.queued,
        remaining_cost = counts.remaining_cost + excluded.remaining_cost;
    """

# a statement that moves thousands of jobs counts them itself, once, and says so by the setting
HISTORY = """
CREATE OR REPLACE FUNCTION jobs_history() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    seconds double precision := 0;
    what CONSTANT text := 'video.' || NEW.state;
BEGIN
    INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
    VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence);
    IF OLD.state = 'running' AND OLD.started_at IS NOT NULL THEN
        seconds := extract(epoch FROM now() - OLD.started_at) * coalesce(
            (SELECT substring(layout FROM 's([0-9]+)$')::int FROM replicas WHERE replicas.id = OLD.lease_owner), 1
        );
    END IF;
    IF NEW.campaign_id IS NOT NULL THEN
        IF current_setting('rushes.counted', true) IS DISTINCT FROM 'on' THEN
            PERFORM count_campaign_job(
                NEW.campaign_id, OLD.state, NEW.state, NEW.num_frames * NEW.width * NEW.height / 10000, seconds
            );
        END IF;
    END IF;
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
    IF seconds > 0 THEN
        INSERT INTO api_key_usage AS spent (api_key, day, gpu_seconds, attempts)
        SELECT id, (now() AT TIME ZONE 'UTC')::date, seconds, 1 FROM api_keys WHERE id = OLD.api_key
        ON CONFLICT (api_key, day) DO UPDATE
        SET gpu_seconds = spent.gpu_seconds + excluded.gpu_seconds, attempts = spent.attempts + 1;
    END IF;
    IF NEW.state = 'queued' THEN
        INSERT INTO project_shares (project) VALUES (NEW.project) ON CONFLICT DO NOTHING;
        IF NEW.campaign_id IS NOT NULL AND OLD.state IN ('failed', 'cancelled', 'expired') THEN
            UPDATE campaigns SET state = 'in_progress', reopened_at = now(), told_progress = 0,
                expires_at = CASE WHEN expires_at > now() THEN expires_at END
            WHERE id = NEW.campaign_id AND state IN ('completed', 'cancelled', 'expired', 'finalizing')
                AND deleted_at IS NULL;
        END IF;
    ELSIF NEW.deleted_at IS NULL AND (
        NEW.campaign_id IS NULL OR campaign_tells(NEW.campaign_id, what)
        OR jsonb_exists(NEW.request -> 'webhook' -> 'events', what)
    ) THEN
        INSERT INTO outbox (event_id, job_id, project, generation, type)
        VALUES (
            'evt_' || split_part(NEW.id, '_', 2) || '_' || NEW.generation, NEW.id, NEW.project, NEW.generation, what
        );
    END IF;
    -- last, because claims of the project wait for it; not for leases that ran out, of which one statement ends several
    IF OLD.charged IS NOT NULL AND OLD.state IN ('claimed', 'running') AND OLD.lease_until > now() THEN
        UPDATE project_shares SET virtual_time = virtual_time - OLD.charged + seconds / coalesce(
            (SELECT weight FROM projects WHERE name = NEW.project), 1
        ) WHERE project = NEW.project;
    END IF;
    RETURN NULL;
END $$;
"""

# whether what becomes of its single jobs is told: thousands of them end in a night
TELLS = """
CREATE FUNCTION campaign_tells(campaign text, what text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM campaigns
        WHERE id = campaign AND (tell_items OR coalesce(jsonb_exists(webhook -> 'events', what), false))
    )
$$;
"""

# the URLs that a job, its campaign or both name
OWN_WEBHOOKS = """
CREATE FUNCTION own_webhooks(event outbox) RETURNS TABLE (endpoint_id text, origin text, url text)
LANGUAGE sql STABLE AS $$
    SELECT webhook ->> 'endpoint', webhook ->> 'origin', webhook ->> 'url' FROM (
        SELECT request -> 'webhook' FROM jobs WHERE id = event.job_id
        UNION ALL
        SELECT webhook FROM campaigns WHERE id = CASE WHEN event.type LIKE 'batch.%' THEN event.job_id
            ELSE (SELECT campaign_id FROM jobs WHERE id = event.job_id) END
    ) AS own (webhook)
    WHERE jsonb_exists(webhook -> 'events', event.type)
    GROUP BY 1, 2, 3
$$;
"""

TARGETS = """
CREATE OR REPLACE FUNCTION webhook_targets(event outbox) RETURNS TABLE (endpoint_id text, url text)
LANGUAGE sql STABLE AS $$
    SELECT id, NULL FROM webhook_endpoints
    WHERE project = event.project AND origin IS NULL AND deleted_at IS NULL AND state = 'enabled'
        AND event.type = ANY (event_types)
        AND (event.type LIKE 'batch.%' OR NOT EXISTS (
            SELECT FROM jobs
            WHERE id = event.job_id AND campaign_id IS NOT NULL AND NOT campaign_tells(campaign_id, event.type)
        ))
    UNION ALL
    SELECT endpoint_id, url FROM own_webhooks(event)
$$;
"""

DESCRIBE = """
CREATE OR REPLACE FUNCTION outbox_describe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.type LIKE 'batch.%' THEN
        SELECT jsonb_build_object(
            'status', state,
            'progress', CASE WHEN state = 'completed' THEN 100 WHEN loaded_at IS NULL OR total = 0 THEN 0
                ELSE least(99, div(100 * (total - counts.queued - counts.in_progress), total)) END,
            'request_counts', jsonb_build_object(
                'total', total, 'completed', counts.completed, 'failed', counts.failed + counts.invalid,
                'queued', counts.queued, 'in_progress', counts.in_progress, 'cancelled', counts.cancelled,
                'expired', counts.expired, 'invalid', counts.invalid
            ),
            'name', name,
            'metadata', metadata,
            'output_file_id', output_file_id,
            'error_file_id', error_file_id,
            'error', CASE WHEN state = 'failed' THEN errors -> 'data' -> 0 END,
            'sequence', NEW.generation
        ) || coalesce(NEW.data, '{}') INTO NEW.data
        FROM campaigns, LATERAL (
            SELECT coalesce(sum(queued), 0) AS queued, coalesce(sum(in_progress), 0) AS in_progress,
                coalesce(sum(completed), 0) AS completed, coalesce(sum(failed), 0) AS failed,
                coalesce(sum(cancelled), 0) AS cancelled, coalesce(sum(expired), 0) AS expired,
                coalesce(sum(invalid), 0) AS invalid,
                coalesce(sum(queued + in_progress + completed + failed + cancelled + expired + invalid), 0) AS total
            FROM campaign_counts WHERE campaign_id = NEW.job_id
        ) AS counts
        WHERE id = NEW.job_id;
        RETURN NEW;
    END IF;
    {job}
    RETURN NEW;
END $$;
"""
DESCRIBE_JOB = """SELECT jsonb_build_object(
        'status', CASE WHEN state = 'running' THEN 'in_progress' ELSE state END,
        'attempt', attempt,
        'progress', progress,
        'error', CASE WHEN state IN ('failed', 'cancelled', 'expired') THEN error END,
        'sequence', 1000 * (SELECT count(*) FROM job_events WHERE job_events.job_id = jobs.id) + progress
    ) INTO NEW.data FROM jobs WHERE id = NEW.job_id;"""

FAN_OUT = """
CREATE OR REPLACE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_endpoints (id, project, origin)
    SELECT DISTINCT endpoint_id, NEW.project, origin FROM own_webhooks(NEW)
    ON CONFLICT (id) DO NOTHING;
    INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, job_id, type, sequence, url)
    SELECT new_webhook_delivery_id(), NEW.project, endpoint_id, NEW.event_id, NEW.job_id, NEW.type,
        coalesce((NEW.data ->> 'sequence')::bigint, 0), url
    FROM webhook_targets(NEW);
    RETURN NULL;
END $$;
"""

TELL = """
CREATE OR REPLACE FUNCTION jobs_tell() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    what CONSTANT text := CASE WHEN OLD.state = 'running' THEN 'video.progress' ELSE 'video.started' END;
BEGIN
    IF NEW.deleted_at IS NOT NULL OR NOT (
        coalesce(jsonb_exists(NEW.request -> 'webhook' -> 'events', what), false) OR {others}
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

IS_FOLLOWED = """EXISTS (
            SELECT FROM webhook_endpoints WHERE project = NEW.project AND origin IS NULL AND deleted_at IS NULL
                AND state = 'enabled' AND what = ANY (event_types)
        )"""
IS_OF_CAMPAIGN = f"""CASE WHEN NEW.campaign_id IS NULL THEN {IS_FOLLOWED}
        ELSE campaign_tells(NEW.campaign_id, what) END"""

# queued jobs of a campaign, some thousands at once; leased ones are asked to stop by whoever calls this
CLOSE = """
CREATE FUNCTION close_campaign_jobs(campaign text, target text, why jsonb, at_most integer) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    closed integer;
BEGIN
    IF target NOT IN ('cancelled', 'expired') THEN
        RAISE EXCEPTION 'jobs of a campaign are closed as cancelled or expired, not as %', target;
    END IF;
    PERFORM set_config('rushes.counted', 'on', true);
    WITH open AS MATERIALIZED (
        SELECT id FROM jobs WHERE campaign_id = campaign AND state = 'queued'
        ORDER BY line LIMIT at_most FOR NO KEY UPDATE SKIP LOCKED
    ), changed AS (
        UPDATE jobs SET state = target, error = why, finished_at = now(),
            cancel_requested_at = CASE target WHEN 'cancelled' THEN coalesce(cancel_requested_at, now())
                ELSE cancel_requested_at END
        FROM open WHERE jobs.id = open.id
        RETURNING jobs.num_frames * jobs.width * jobs.height / 10000 AS cost
    ), total AS (
        SELECT count(*) AS n, coalesce(sum(cost), 0) AS cost FROM changed
    ), counted AS (
        INSERT INTO campaign_counts AS counts (campaign_id, shard, queued, cancelled, expired, remaining_cost)
        SELECT campaign, pg_backend_pid() % 8, -n, CASE target WHEN 'cancelled' THEN n ELSE 0 END,
            CASE target WHEN 'expired' THEN n ELSE 0 END, -cost
        FROM total WHERE n > 0
        ON CONFLICT (campaign_id, shard) DO UPDATE SET
            queued = counts.queued + excluded.queued,
            cancelled = counts.cancelled + excluded.cancelled,
            expired = counts.expired + excluded.expired,
            remaining_cost = counts.remaining_cost + excluded.remaining_cost
    )
    SELECT n INTO closed FROM total;
    PERFORM set_config('rushes.counted', 'off', true);
    RETURN closed;
END $$;
"""

# failed jobs, and others that ended without a clip where that was asked for: each a new generation that starts from
# nothing, as a retry of a single job does
# not from the first line each time, past all that is queued again; but once more when the last one is reached
RETRY = """
CREATE FUNCTION retry_campaign_jobs(campaign text, at_most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    wanted jsonb;
    reached bigint;
    last_line bigint;
    num_changed integer;
    retried integer := 0;
BEGIN
    SELECT retry INTO wanted FROM campaigns WHERE id = campaign;
    IF wanted IS NULL THEN
        RETURN 0;
    END IF;
    reached := coalesce((wanted ->> 'reached')::bigint, 0);
    PERFORM set_config('rushes.counted', 'on', true);
    LOOP
        WITH ended AS MATERIALIZED (
            SELECT each.* FROM unnest(
                CASE WHEN (wanted ->> 'include_cancelled')::boolean THEN ARRAY['failed', 'cancelled', 'expired']
                ELSE ARRAY['failed'] END
            ) AS old (state), LATERAL (
                SELECT id, jobs.state, line FROM jobs
                WHERE campaign_id = campaign AND jobs.state = old.state AND line > reached AND deleted_at IS NULL
                    AND finished_at <= to_timestamp((wanted ->> 'before')::double precision)
                    AND (
                        old.state <> 'failed' OR wanted -> 'codes' IS NULL
                        OR jsonb_exists(wanted -> 'codes', error ->> 'code')
                    )
                ORDER BY line LIMIT at_most FOR NO KEY UPDATE SKIP LOCKED
            ) AS each ORDER BY line LIMIT at_most - retried
        ), changed AS (
            UPDATE jobs SET state = 'queued', hold = 'campaign', generation = generation + 1, attempt = 0,
                crash_count = 0, crashed_on = '{}', error_count = 0, low_memory = false, progress = 0, error = NULL,
                timings = '{}', phase = NULL, completed_steps = 0, started_at = NULL, finished_at = NULL,
                cancel_requested_at = NULL, start_by = NULL, stop_at = NULL,
                deadline_at = CASE WHEN deadline_at > now() THEN deadline_at END,
                seed = CASE WHEN (wanted ->> 'new_seeds')::boolean THEN floor(random() * 2 ^ 53)::bigint ELSE seed END
            FROM ended WHERE jobs.id = ended.id
            RETURNING ended.state AS old_state, jobs.line, jobs.num_frames * jobs.width * jobs.height / 10000 AS cost
        ), total AS (
            SELECT count(*) AS n, count(*) FILTER (WHERE old_state = 'failed') AS failed,
                count(*) FILTER (WHERE old_state = 'cancelled') AS cancelled,
                count(*) FILTER (WHERE old_state = 'expired') AS expired, coalesce(sum(cost), 0) AS cost,
                max(line) AS line
            FROM changed
        ), counted AS (
            INSERT INTO campaign_counts AS counts (
                campaign_id, shard, queued, failed, cancelled, expired, remaining_cost
            )
            SELECT campaign, pg_backend_pid() % 8, n, -failed, -cancelled, -expired, cost FROM total WHERE n > 0
            ON CONFLICT (campaign_id, shard) DO UPDATE SET
                queued = counts.queued + excluded.queued,
                failed = counts.failed + excluded.failed,
                cancelled = counts.cancelled + excluded.cancelled,
                expired = counts.expired + excluded.expired,
                remaining_cost = counts.remaining_cost + excluded.remaining_cost
        )
        SELECT n, line INTO num_changed, last_line FROM total;
        retried := retried + num_changed;
        EXIT WHEN retried >= at_most OR reached = 0;
        reached := 0;
    END LOOP;
    IF retried >= at_most THEN
        UPDATE campaigns SET retry = retry || jsonb_build_object('reached', last_line) WHERE id = campaign;
    END IF;
    PERFORM set_config('rushes.counted', 'off', true);
    RETURN retried;
END $$;
"""

# whoever opens jobs of a campaign holds this lock, too: what it opened is seen here, and it sees what is paused here
CLOSE_OPEN = """
CREATE FUNCTION close_open_jobs(campaign text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    closed integer;
BEGIN
    PERFORM pg_advisory_xact_lock(738764376, hashtext(campaign));
    WITH open AS MATERIALIZED (
        SELECT id FROM jobs WHERE campaign_id = campaign AND state = 'queued' AND hold IS DISTINCT FROM 'campaign'
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE jobs SET hold = 'campaign', start_by = NULL, stop_at = NULL FROM open WHERE jobs.id = open.id;
    GET DIAGNOSTICS closed = ROW_COUNT;
    WITH waiting AS MATERIALIZED (
        SELECT id FROM jobs WHERE campaign_id = campaign AND state = 'claimed' AND hold IS DISTINCT FROM 'campaign'
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE jobs SET start_by = now() FROM waiting WHERE jobs.id = waiting.id;
    RETURN closed;
END $$;
"""


def upgrade() -> None:
    op.create_table(
        "campaigns",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("api_key", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), server_default=sa.text("'validating'"), nullable=False),
        sa.Column("hold_reason", sa.String(length=16), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Text(), nullable=False),
        sa.Column("owns_input", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("input_format", sa.String(length=8), nullable=True),
        sa.Column("defaults", _jsonb(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("metadata", _jsonb(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("dry_run", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("strict", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default=sa.text("2"), nullable=False),
        sa.Column("overrides_priority", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        *_columns(sa.BigInteger(), "max_attempts", "max_parallel", "max_failures"),
        sa.Column("failures_excused", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("on_failure", sa.String(length=16), server_default=sa.text("'pause'"), nullable=False),
        sa.Column("budget_gpu_seconds", sa.Double(), nullable=True),
        sa.Column("on_budget", sa.String(length=16), server_default=sa.text("'complete_running'"), nullable=False),
        sa.Column("window", _jsonb(), nullable=True),
        *_times("not_before", "expires_at"),
        *_columns(sa.BigInteger(), "completion_seconds", "proof_count", "proof_continue_seconds"),
        sa.Column("proof_state", sa.String(length=24), nullable=True),
        *_times("proof_done_at", "paused_at"),
        sa.Column("pause_reason", sa.String(length=16), nullable=True),
        sa.Column("webhook", _jsonb(), nullable=True),
        sa.Column("tell_items", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("errors", _jsonb(), nullable=True),
        sa.Column("report", _jsonb(), nullable=True),
        *_columns(sa.BigInteger(), "num_lines"),
        sa.Column("loaded_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("loaded_lines", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        *_times("loaded_at"),
        sa.Column("load_failures", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        *_times("lease_until"),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_file_id", sa.Text(), nullable=True),
        sa.Column("error_file_id", sa.Text(), nullable=True),
        sa.Column("output_seconds", sa.BigInteger(), nullable=True),
        sa.Column("retry", _jsonb(), nullable=True),
        sa.Column("num_events", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("told_progress", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        *_times("told_progress_at"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        *_times(
            "in_progress_at",
            "finalizing_at",
            "completed_at",
            "failed_at",
            "expired_at",
            "cancelling_at",
            "cancelled_at",
            "reopened_at",
            "deleted_at",
            "purged_at",
        ),
        sa.CheckConstraint(
            "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', "
            "'cancelled')",
            name=op.f("ck_campaigns_state"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 2", name=op.f("ck_campaigns_priority_is_a_class")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_campaigns")),
    )
    op.create_index(
        "ix_campaigns_project", "campaigns", ["project", "id"], postgresql_where=sa.text("deleted_at IS NULL")
    )
    op.create_index(
        "ix_campaigns_active",
        "campaigns",
        ["state", "id"],
        postgresql_where=sa.text("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    )
    op.create_index(
        "ix_campaigns_unpurged",
        "campaigns",
        ["id"],
        postgresql_where=sa.text("deleted_at IS NOT NULL AND purged_at IS NULL"),
    )
    op.create_index("ix_campaigns_retry", "campaigns", ["id"], postgresql_where=sa.text("retry IS NOT NULL"))
    op.create_table(
        "campaign_counts",
        sa.Column("campaign_id", sa.Text(), nullable=False),
        sa.Column("shard", sa.SmallInteger(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)
            for name in (
                "queued",
                "in_progress",
                "completed",
                "failed",
                "cancelled",
                "expired",
                "invalid",
                "remaining_cost",
            )
        ),
        sa.Column("gpu_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_campaign_counts_campaign_id_campaigns"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", "shard", name=op.f("pk_campaign_counts")),
        postgresql_with={"fillfactor": 20},
    )
    op.create_table(
        "campaign_line_errors",
        sa.Column("campaign_id", sa.Text(), nullable=False),
        sa.Column("line", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("param", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_campaign_line_errors_campaign_id_campaigns"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", "line", name=op.f("pk_campaign_line_errors")),
    )
    op.add_column("measured_times", sa.Column("run_p90", sa.Double(), nullable=True))
    op.add_column("projects", sa.Column("weight", sa.Double(), server_default=sa.text("1"), nullable=False))
    op.create_check_constraint(op.f("ck_projects_weight_is_positive"), "projects", "weight > 0")
    for name, type_ in JOB_COLUMNS.items():
        op.add_column("jobs", sa.Column(name, type_, nullable=True))
    op.execute(SHARDS)
    op.execute(COUNT)
    op.execute(ACCEPTED.format(campaigns=COUNT_ACCEPTED))
    for function in (
        TELLS,
        HISTORY,
        CLOSE,
        CLOSE_OPEN,
        RETRY,
        OWN_WEBHOOKS,
        TARGETS,
        DESCRIBE.replace("{job}", DESCRIBE_JOB),
        FAN_OUT,
        TELL.format(others=IS_OF_CAMPAIGN),
    ):
        op.execute(function)


def downgrade() -> None:
    op.execute("DROP FUNCTION retry_campaign_jobs")
    op.execute("DROP FUNCTION close_open_jobs")
    op.execute("DROP FUNCTION close_campaign_jobs")
    for function in (OLD_HISTORY, OLD_TARGETS, OLD_DESCRIBE, OLD_FAN_OUT, TELL.format(others=IS_FOLLOWED)):
        op.execute(function)
    op.execute("DROP FUNCTION own_webhooks")
    op.execute("DROP FUNCTION campaign_tells")
    op.execute("DELETE FROM webhook_deliveries WHERE type LIKE 'batch.%'")
    op.execute("DELETE FROM outbox WHERE type LIKE 'batch.%'")
    op.execute(ACCEPTED.format(campaigns=""))
    op.execute("DROP FUNCTION count_campaign_job")
    for name in reversed(JOB_COLUMNS):
        op.drop_column("jobs", name)
    op.drop_constraint(op.f("ck_projects_weight_is_positive"), "projects")
    op.drop_column("projects", "weight")
    op.drop_column("measured_times", "run_p90")
    for name in ("campaign_line_errors", "campaign_counts", "campaigns"):
        op.drop_table(name)
    op.execute("DROP FUNCTION campaigns_accepted")


def _jsonb() -> postgresql.JSONB:
    return postgresql.JSONB(none_as_null=True, astext_type=sa.Text())


def _columns(type_: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, type_, nullable=True) for name in names]


def _times(*names: str) -> list[sa.Column[Any]]:
    return _columns(sa.DateTime(timezone=True), *names)


OLD_HISTORY = """
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
    IF OLD.state = 'running' AND OLD.started_at IS NOT NULL THEN
        INSERT INTO api_key_usage AS spent (api_key, day, gpu_seconds, attempts)
        SELECT id, (now() AT TIME ZONE 'UTC')::date, extract(epoch FROM now() - OLD.started_at) * coalesce(
            (SELECT substring(layout FROM 's([0-9]+)$')::int FROM replicas WHERE replicas.id = OLD.lease_owner), 1
        ), 1
        FROM api_keys WHERE id = OLD.api_key
        ON CONFLICT (api_key, day) DO UPDATE
        SET gpu_seconds = spent.gpu_seconds + excluded.gpu_seconds, attempts = spent.attempts + 1;
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

OLD_TARGETS = """
CREATE OR REPLACE FUNCTION webhook_targets(event outbox) RETURNS TABLE (endpoint_id text, url text)
LANGUAGE sql STABLE AS $$
    SELECT id, NULL FROM webhook_endpoints
    WHERE project = event.project AND origin IS NULL AND deleted_at IS NULL AND state = 'enabled'
        AND event.type = ANY (event_types)
    UNION ALL
    SELECT request -> 'webhook' ->> 'endpoint', request -> 'webhook' ->> 'url' FROM jobs
    WHERE id = event.job_id AND jsonb_exists(request -> 'webhook' -> 'events', event.type)
$$;
"""

OLD_DESCRIBE = f"""
CREATE OR REPLACE FUNCTION outbox_describe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {DESCRIBE_JOB}
    RETURN NEW;
END $$;
"""

OLD_FAN_OUT = """
CREATE OR REPLACE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql AS $$
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
