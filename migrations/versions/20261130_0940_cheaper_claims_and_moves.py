"""cheaper claims and moves of jobs

Revision: 83a5c1f0d94e, after 5d0c7be2a914. What a row of `jobs` must be is looked at by the triggers before a write
instead of by a check, whose text the server reads again with every statement; what a claim asks for in unusual cases
alone is in functions, which a statement that does not call them does not prepare. The previous release may still be
running while this one runs. Stop this release's workers before it is taken back: they call these functions.
"""

from typing import Any

from alembic import context, op

revision = "83a5c1f0d94e"
down_revision = "5d0c7be2a914"
branch_labels = None
depends_on = None

_SOUND = (
    "job_is_sound(NEW.state, NEW.priority, NEW.hold, NEW.fence, NEW.lease_owner, NEW.lease_until, NEW.progress, "
    "NEW.result IS NOT NULL, NEW.error IS NOT NULL, NEW.finished_at)"
)

# a row that is accepted; the function raises what is wrong with any other
ACCEPT = f"""
CREATE FUNCTION jobs_sound() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF {_SOUND} THEN
        RETURN NEW;
    END IF;
END $$;
CREATE TRIGGER sound BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_sound();
"""

GUARD = f"""
CREATE OR REPLACE FUNCTION jobs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    retried boolean;
BEGIN
    -- the moves of an attempt that goes well; what they leave as it was is sound
    IF NEW.state <> OLD.state AND NEW.generation = OLD.generation AND NEW.progress >= OLD.progress
        AND NEW.cancel_requested_at IS NULL AND NEW.hold IS NULL AND NEW.priority = OLD.priority AND (CASE NEW.state
            WHEN 'claimed' THEN OLD.state = 'queued' AND NEW.fence > coalesce(OLD.fence, 0)
                AND NEW.lease_until IS NOT NULL AND NEW.lease_owner IS NOT NULL AND NEW.finished_at IS NULL
                AND NEW.result IS NULL AND NEW.progress < 100
            WHEN 'running' THEN OLD.state = 'claimed' AND NEW.fence IS NOT NULL
                AND NEW.lease_until IS NOT NULL AND NEW.lease_owner IS NOT NULL AND NEW.finished_at IS NULL
                AND NEW.result IS NULL AND NEW.progress < 100
            WHEN 'completed' THEN OLD.state = 'running' AND NEW.finished_at IS NOT NULL AND NEW.lease_until IS NULL
                AND NEW.result IS NOT NULL AND NEW.error IS NULL AND NEW.progress <= 100
            ELSE false
        END) THEN
        RETURN NEW;
    END IF;
    -- renewals and reports of progress
    IF NEW.state = OLD.state AND NEW.generation = OLD.generation AND NEW.progress >= OLD.progress AND
        {_SOUND} THEN
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
    IF {_SOUND} THEN
        RETURN NEW;
    END IF;
END $$;
"""

# what `claims` asks for in few cases; `class_is_ready` looks for what a claim would take if nobody held a lock
CLAIMS = """
CREATE FUNCTION others_wait(of_model text, of_class integer, beside text) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(
        (SELECT 1 FROM jobs WHERE state = 'queued' AND hold IS NULL AND model = of_model AND priority = of_class
            AND project > beside ORDER BY project LIMIT 1),
        (SELECT 1 FROM jobs WHERE state = 'queued' AND hold IS NULL AND model = of_model AND priority = of_class
            AND project < beside ORDER BY project DESC LIMIT 1)
    ) IS NOT NULL;
END $$;
CREATE FUNCTION measured_pace(of_model text) RETURNS double precision LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT sum(num_jobs * run_p50) / sum(num_jobs * (num_frames * width * height / 1e8::float))
        FROM measured_times WHERE model = of_model
    );
END $$;
CREATE FUNCTION other_replica_is_up(of_model text, names text[], seen_within_seconds double precision)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM replicas WHERE model = of_model AND state IN ('ready', 'busy')
            AND last_seen > now() - make_interval(secs => seen_within_seconds)
            AND split_part(id, '#', 1) <> ALL (names)
    );
END $$;
CREATE FUNCTION class_is_ready(of_model text, of_class integer, replica text, crashed_on_wait double precision)
RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM project_shares AS share, LATERAL (
            SELECT FROM jobs WHERE state = 'queued' AND hold IS NULL
                AND model = of_model AND priority = of_class AND project = share.project
                AND run_at <= now() AND cancel_requested_at IS NULL
                AND (deadline_at IS NULL OR deadline_at > now()) AND (start_by IS NULL OR start_by > now())
                AND (replica <> ALL (crashed_on) OR run_at < now() - make_interval(secs => crashed_on_wait)
                    OR NOT other_replica_is_up(model, crashed_on, crashed_on_wait))
            ORDER BY run_at, id LIMIT 1
        ) AS waiting
        WHERE project <> ALL (ARRAY(SELECT project FROM queue_pauses))
            AND '*' <> ALL (ARRAY(SELECT project FROM queue_pauses))
    );
END $$;
"""


def upgrade() -> None:
    # first what needs the stronger lock
    op.drop_constraint(op.f("ck_jobs_is_sound"), "jobs")
    for statements in (ACCEPT, GUARD, CLAIMS):
        op.execute(statements)


def downgrade() -> None:
    history = _revision("2f6b8d0c71ae")
    history._check(history.IS_SOUND)
    op.execute("DROP TRIGGER sound ON jobs")
    op.execute("DROP FUNCTION jobs_sound")
    op.execute(history.GUARD)
    for function in ("class_is_ready", "other_replica_is_up", "measured_pace", "others_wait"):
        op.execute(f"DROP FUNCTION {function}")


def _revision(name: str) -> Any:
    """The module of an earlier revision, whose functions come back."""
    revision = context.script.get_revision(name)
    assert revision is not None
    return revision.module
