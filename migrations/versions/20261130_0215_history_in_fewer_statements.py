"""history in fewer statements, and one check for a job's row

Revision: 2f6b8d0c71ae, after e8c3417f9b60. Claim, start and completion of a job did 22 statements of the triggers' and
read the text of ten checks and three trigger conditions again with each: now 9, and one check. They write the same,
but for attempts that are started ahead of their turn on the GPUs, which are billed from that turn on. A campaign also
knows since when the store has not given its file. The previous release may still be running while this one runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "2f6b8d0c71ae"
down_revision = "e8c3417f9b60"
branch_labels = None
depends_on = None

# Of a check the server reads the stored text with every statement that writes a row, of a function once a session.
SOUND = """
CREATE OR REPLACE FUNCTION job_is_sound(
    state text, priority integer, hold text, fence bigint, lease_owner text, lease_until timestamptz,
    progress integer, has_result boolean, has_error boolean, finished_at timestamptz
) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    broken text;
BEGIN
    IF priority BETWEEN 0 AND 2 AND progress >= 0 AND (CASE state
        WHEN 'queued' THEN lease_until IS NULL AND finished_at IS NULL AND NOT has_result AND progress < 100
        WHEN 'completed' THEN lease_until IS NULL AND finished_at IS NOT NULL AND has_result AND NOT has_error
            AND progress <= 100 AND hold IS NULL
        ELSE hold IS NULL AND NOT has_result AND progress < 100 AND CASE
            WHEN state IN ('claimed', 'running') THEN lease_until IS NOT NULL AND lease_owner IS NOT NULL
                AND fence IS NOT NULL AND finished_at IS NULL
            ELSE state IN ('failed', 'cancelled', 'expired') AND lease_until IS NULL AND finished_at IS NOT NULL
        END
    END) THEN
        RETURN true;
    END IF;
    broken := CASE
        WHEN state NOT IN ('queued', 'claimed', 'running', 'completed', 'failed', 'cancelled', 'expired') THEN 'state'
        WHEN (finished_at IS NOT NULL) <> (state IN ('completed', 'failed', 'cancelled', 'expired'))
            THEN 'finished_at_iff_final'
        WHEN state IN ('claimed', 'running') AND (lease_until IS NULL OR lease_owner IS NULL OR fence IS NULL)
            THEN 'leased_states_hold_a_lease'
        WHEN lease_until IS NOT NULL AND state NOT IN ('claimed', 'running') THEN 'lease_only_in_leased_states'
        WHEN has_result <> (state = 'completed') THEN 'result_iff_completed'
        WHEN has_error AND state = 'completed' THEN 'no_error_when_completed'
        WHEN progress NOT BETWEEN 0 AND 100 THEN 'progress_is_percent'
        WHEN progress = 100 AND state <> 'completed' THEN 'progress_100_iff_completed'
        WHEN priority NOT BETWEEN 0 AND 2 THEN 'priority_is_a_class'
        ELSE 'hold_only_while_queued'
    END;
    RAISE EXCEPTION 'a job that is % violates %', state, broken
        USING ERRCODE = 'check_violation', TABLE = 'jobs', CONSTRAINT = 'ck_jobs_' || broken;
END $$;
"""
# renewals and progress reports, most of all updates, end at the first line
GUARD = """
CREATE OR REPLACE FUNCTION jobs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    retried boolean;
BEGIN
    IF NEW.state = OLD.state AND NEW.generation = OLD.generation AND NEW.progress >= OLD.progress THEN
        RETURN NEW;
    END IF;
    -- the moves of an attempt that goes well
    IF NEW.generation = OLD.generation AND NEW.progress >= OLD.progress AND NEW.cancel_requested_at IS NULL
        AND NEW.hold IS NULL AND (CASE NEW.state
            WHEN 'claimed' THEN OLD.state = 'queued' AND NEW.fence > coalesce(OLD.fence, 0)
            WHEN 'running' THEN OLD.state = 'claimed'
            WHEN 'completed' THEN OLD.state = 'running'
            ELSE false
        END) THEN
        RETURN NEW;
    END IF;
    retried := NEW.state = 'queued' AND OLD.state IN ('failed', 'cancelled', 'expired');
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
    IF NEW.state <> 'queued' THEN
        NEW.hold := NULL;
    END IF;
    RETURN NEW;
END $$;
"""

# every event adds an entry to the job's history but progress, which rises between two of them
TELL = """
CREATE FUNCTION tell_of_job(job jobs, what text, suffix text) RETURNS void LANGUAGE sql AS $$
    INSERT INTO outbox (event_id, job_id, project, generation, type)
    SELECT 'evt_' || split_part(job.id, '_', 2) || '_' || job.generation || suffix, job.id, job.project, job.generation,
        what
    WHERE job.deleted_at IS NULL AND (
        coalesce(jsonb_exists(job.request -> 'webhook' -> 'events', what), false)
        OR CASE WHEN job.campaign_id IS NULL THEN EXISTS (
            SELECT FROM webhook_endpoints WHERE project = job.project AND origin IS NULL AND deleted_at IS NULL
                AND state = 'enabled' AND what = ANY (event_types)
        ) ELSE campaign_tells(job.campaign_id, what) END
    ) AND NOT (what = 'video.progress' AND EXISTS (
        SELECT FROM outbox WHERE job_id = job.id AND type = what AND created_at > now() - interval '10 s'
    ))
    ON CONFLICT (event_id) DO NOTHING
$$;
"""

# a statement that moves thousands of jobs counts them itself, once, and says so by the setting
HISTORY = """
CREATE OR REPLACE FUNCTION jobs_history() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    seconds double precision := 0;
    num_events bigint;
    may_be_told boolean;
    what text;
BEGIN
    IF NEW.state = OLD.state THEN
        IF NEW.started_at <> OLD.started_at THEN
            UPDATE job_attempts SET started_at = NEW.started_at WHERE job_id = NEW.id AND fence = NEW.fence;
        END IF;
        IF NEW.state = 'running' AND NEW.progress > OLD.progress THEN
            PERFORM tell_of_job(NEW, 'video.progress', '_p' || NEW.progress);
        END IF;
        RETURN NULL;
    END IF;
    IF NEW.state = 'claimed' THEN
        WITH event AS (
            INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
            VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence)
        )
        INSERT INTO job_attempts (job_id, fence, generation, attempt, lease_owner)
        VALUES (NEW.id, NEW.fence, NEW.generation, NEW.attempt, NEW.lease_owner);
    ELSIF NEW.state = 'running' THEN
        WITH event AS (
            INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
            VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence)
        ), attempt AS (
            UPDATE job_attempts SET started_at = now() WHERE job_id = NEW.id AND fence = NEW.fence
        )
        SELECT EXISTS (
            SELECT FROM webhook_endpoints WHERE project = NEW.project AND origin IS NULL AND deleted_at IS NULL
        ) OR jsonb_exists(NEW.request, 'webhook') OR NEW.campaign_id IS NOT NULL
        INTO may_be_told;
        IF may_be_told THEN
            PERFORM tell_of_job(NEW, 'video.started', '_s' || NEW.fence);
        END IF;
    ELSIF OLD.state IN ('claimed', 'running') THEN
        WITH event AS (
            INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
            VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence)
        ), attempt AS (
            UPDATE job_attempts
            SET finished_at = now(), outcome = NEW.state, error =
                CASE WHEN NEW.attempt < OLD.attempt AND NEW.error IS NOT DISTINCT FROM OLD.error THEN NULL
                ELSE NEW.error END, crashed = NEW.crash_count > OLD.crash_count
            WHERE job_id = NEW.id AND fence = NEW.fence
        )
        SELECT 1 + (SELECT count(*) FROM job_events WHERE job_id = NEW.id),
            -- without a phase it was started ahead, and its turn on the GPUs has not come
            CASE WHEN OLD.state = 'running' AND OLD.started_at IS NOT NULL
                AND (OLD.phase IS NOT NULL OR NEW.state = 'completed')
                THEN extract(epoch FROM now() - OLD.started_at) * coalesce((
                    SELECT substring(layout FROM 's([0-9]+)$')::int FROM replicas WHERE replicas.id = OLD.lease_owner
                ), 1)
                ELSE 0 END
        INTO num_events, seconds;
    ELSE
        INSERT INTO job_events (job_id, old_state, new_state, generation, attempt, fence)
        VALUES (NEW.id, OLD.state, NEW.state, NEW.generation, NEW.attempt, NEW.fence);
    END IF;
    IF NEW.campaign_id IS NOT NULL AND current_setting('rushes.counted', true) IS DISTINCT FROM 'on' THEN
        PERFORM count_campaign_job(
            NEW.campaign_id, OLD.state, NEW.state, NEW.num_frames * NEW.width * NEW.height / 10000, seconds
        );
    END IF;
    IF NEW.state IN ('claimed', 'running') THEN
        RETURN NULL;
    END IF;
    IF NEW.state = 'queued' THEN
        INSERT INTO project_shares (project) VALUES (NEW.project) ON CONFLICT DO NOTHING;
        IF NEW.campaign_id IS NOT NULL AND OLD.state IN ('failed', 'cancelled', 'expired') THEN
            UPDATE campaigns SET state = 'in_progress', reopened_at = now(), told_progress = 0,
                expires_at = CASE WHEN expires_at > now() THEN expires_at END
            WHERE id = NEW.campaign_id AND state IN ('completed', 'cancelled', 'expired', 'finalizing')
                AND deleted_at IS NULL;
        END IF;
    ELSIF NEW.deleted_at IS NULL THEN
        what := 'video.' || NEW.state;
        IF NEW.campaign_id IS NULL OR campaign_tells(NEW.campaign_id, what)
            OR jsonb_exists(NEW.request -> 'webhook' -> 'events', what) THEN
            INSERT INTO outbox (event_id, job_id, project, generation, type, data)
            VALUES (
                'evt_' || split_part(NEW.id, '_', 2) || '_' || NEW.generation, NEW.id, NEW.project, NEW.generation,
                what, CASE WHEN num_events IS NOT NULL THEN jsonb_build_object(
                    'status', NEW.state,
                    'attempt', NEW.attempt,
                    'progress', NEW.progress,
                    'error', CASE WHEN NEW.state <> 'completed' THEN NEW.error END,
                    'sequence', 1000 * num_events + NEW.progress
                ) END
            );
        END IF;
    END IF;
    -- last, because others wait for these two rows; for the second claims do
    IF seconds > 0 THEN
        INSERT INTO api_key_usage AS spent (api_key, day, gpu_seconds, attempts)
        SELECT id, (now() AT TIME ZONE 'UTC')::date, seconds, 1 FROM api_keys WHERE id = OLD.api_key
        ON CONFLICT (api_key, day) DO UPDATE
        SET gpu_seconds = spent.gpu_seconds + excluded.gpu_seconds, attempts = spent.attempts + 1;
    END IF;
    -- not for leases that ran out, of which one statement ends several
    IF OLD.charged IS NOT NULL AND OLD.state IN ('claimed', 'running') AND OLD.lease_until > now() THEN
        UPDATE project_shares SET virtual_time = virtual_time - OLD.charged + seconds / coalesce(
            (SELECT weight FROM projects WHERE name = NEW.project), 1
        ) WHERE project = NEW.project;
    END IF;
    RETURN NULL;
END $$;
"""

DESCRIBE = """
CREATE OR REPLACE FUNCTION outbox_describe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {told}IF NEW.type LIKE 'batch.%' THEN
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
TOLD = """IF NEW.data IS NOT NULL AND NEW.type NOT LIKE 'batch.%' THEN
        RETURN NEW;
    END IF;
    """

FAN_OUT = """
CREATE OR REPLACE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {nobody}INSERT INTO webhook_endpoints (id, project, origin)
    SELECT DISTINCT endpoint_id, NEW.project, origin FROM own_webhooks(NEW)
    ON CONFLICT (id) DO NOTHING;
    INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, job_id, type, sequence, url)
    SELECT new_webhook_delivery_id(), NEW.project, endpoint_id, NEW.event_id, NEW.job_id, NEW.type,
        coalesce((NEW.data ->> 'sequence')::bigint, 0), url
    FROM webhook_targets(NEW);
    RETURN NULL;
END $$;
"""
NOBODY = """-- of a job that names no webhook, in a project without endpoints
    IF NEW.type NOT LIKE 'batch.%' AND NOT EXISTS (
        SELECT FROM webhook_endpoints WHERE project = NEW.project AND origin IS NULL AND deleted_at IS NULL
    ) AND NOT EXISTS (
        SELECT FROM jobs WHERE id = NEW.job_id AND (campaign_id IS NOT NULL OR jsonb_exists(request, 'webhook'))
    ) THEN
        RETURN NULL;
    END IF;
    """

# in place of foreign keys, which look up the job for each row of what only its own triggers write
DELETED = """
CREATE FUNCTION jobs_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM job_attempts USING deleted WHERE job_attempts.job_id = deleted.id;
    DELETE FROM job_events USING deleted WHERE job_events.job_id = deleted.id;
    RETURN NULL;
END $$;
CREATE TRIGGER deleted AFTER DELETE ON jobs REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT
EXECUTE FUNCTION jobs_deleted()
"""
HISTORY_TABLES = ("job_attempts", "job_events")

# a class of which all was claimed costs every claim a look at the entries that a vacuum has not yet removed
VACUUM = {"autovacuum_vacuum_scale_factor": "0.01", "autovacuum_vacuum_insert_scale_factor": "0.05"}


IS_SOUND = {
    "is_sound": "job_is_sound(state, priority, hold, fence, lease_owner, lease_until, progress, result IS NOT NULL, "
    "error IS NOT NULL, finished_at)"
}
FINAL = "state IN ('completed', 'failed', 'cancelled', 'expired')"
LEASED = "state IN ('claimed', 'running')"
CHECKS = {
    "state": f"state IN ('queued') OR {LEASED} OR {FINAL}",
    "finished_at_iff_final": f"(finished_at IS NOT NULL) = ({FINAL})",
    "leased_states_hold_a_lease": f"(lease_until IS NOT NULL AND lease_owner IS NOT NULL AND fence IS NOT NULL) "
    f"OR NOT ({LEASED})",
    "lease_only_in_leased_states": f"lease_until IS NULL OR {LEASED}",
    "result_iff_completed": "(result IS NOT NULL) = (state = 'completed')",
    "no_error_when_completed": "error IS NULL OR state <> 'completed'",
    "progress_is_percent": "progress BETWEEN 0 AND 100",
    "progress_100_iff_completed": "progress < 100 OR state = 'completed'",
    "priority_is_a_class": "priority BETWEEN 0 AND 2",
    "hold_only_while_queued": "hold IS NULL OR state = 'queued'",
}


def upgrade() -> None:
    op.add_column("campaigns", sa.Column("store_failed_at", sa.DateTime(timezone=True)))
    op.execute(SOUND)
    _check(IS_SOUND)
    for function in (
        GUARD,
        TELL,
        HISTORY,
        DESCRIBE.replace("{told}", TOLD),
        FAN_OUT.replace("{nobody}", NOBODY),
        DELETED,
    ):
        op.execute(function)
    op.execute("CREATE OR REPLACE TRIGGER guard BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_guard()")
    op.execute("CREATE OR REPLACE TRIGGER history AFTER UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_history()")
    op.execute("DROP TRIGGER tell ON jobs")
    op.execute("DROP FUNCTION jobs_tell")
    for table in HISTORY_TABLES:
        op.drop_constraint(op.f(f"fk_{table}_job_id_jobs"), table)
    for name in CHECKS:
        op.drop_constraint(op.f(f"ck_jobs_{name}"), "jobs")
    op.execute(f"ALTER TABLE jobs SET ({', '.join(f'{name} = {value}' for name, value in VACUUM.items())})")


def downgrade() -> None:
    op.drop_column("campaigns", "store_failed_at")
    for table in HISTORY_TABLES:
        _add(table, f"fk_{table}_job_id_jobs", "FOREIGN KEY (job_id) REFERENCES jobs (id) ON DELETE CASCADE")
    _check(CHECKS)
    op.execute(f"ALTER TABLE jobs RESET ({', '.join(VACUUM)})")
    op.drop_constraint(op.f("ck_jobs_is_sound"), "jobs")
    op.execute("DROP FUNCTION job_is_sound")
    op.execute("DROP TRIGGER deleted ON jobs")
    op.execute("DROP FUNCTION jobs_deleted")
    retries, keys = _revision("9c1f0e5d7a42"), _revision("71c5a0e8d3f6")
    webhooks, campaigns = _revision("c2d8e41f07b5"), _revision("5b1e9c07d2a4")
    for statement in (
        keys.GUARD.format(holds=keys.HOLDS),
        retries.GUARD_TRIGGER,
        campaigns.HISTORY,
        retries.HISTORY_TRIGGER.replace("CREATE", "CREATE OR REPLACE"),
        campaigns.TELL.format(others=campaigns.IS_OF_CAMPAIGN),
        webhooks.TRIGGERS[-1],
        "DROP FUNCTION tell_of_job",
        DESCRIBE.replace("{told}", ""),
        FAN_OUT.replace("{nobody}", ""),
    ):
        op.execute(statement)


def _revision(name: str) -> Any:
    """The module of an earlier revision, whose functions come back."""
    revision = context.script.get_revision(name)
    assert revision is not None
    return revision.module


def _check(checks: dict[str, str]) -> None:
    for name, condition in checks.items():
        _add("jobs", f"ck_jobs_{name}", f"CHECK ({condition})")


def _add(table: str, name: str, constraint: str) -> None:
    """Add a constraint and look at the rows that there are without keeping writers out. May be run again."""
    with _patience():
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {name}")
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {constraint} NOT VALID")
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


@contextmanager
def _patience() -> Iterator[None]:
    """A transaction for each statement, of which the last is long and holds up nobody."""
    with op.get_context().autocommit_block():
        limit = op.get_bind().scalar(sa.text("SHOW statement_timeout"))
        op.execute("SET statement_timeout = 0")
        try:
            yield
        finally:
            op.execute(f"SET statement_timeout = '{limit}'")
