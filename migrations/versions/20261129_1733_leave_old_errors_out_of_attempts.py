"""leave old errors out of attempts that were given back

Revision: b60f3d9a2e78, after 4e7d20c3b915. The previous release is still running while this one runs:
the trigger's function is replaced in place.
"""

from alembic import op

revision = "b60f3d9a2e78"
down_revision = "4e7d20c3b915"
branch_labels = None
depends_on = None


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
        SET finished_at = now(), outcome = NEW.state, error = {error}, crashed = NEW.crash_count > OLD.crash_count
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

# an attempt that does not count leaves the error of the one before on the job
OWN_ERROR = (
    "CASE WHEN NEW.attempt < OLD.attempt AND NEW.error IS NOT DISTINCT FROM OLD.error THEN NULL ELSE NEW.error END"
)


def upgrade() -> None:
    op.execute(HISTORY.format(error=OWN_ERROR))


def downgrade() -> None:
    op.execute(HISTORY.format(error="NEW.error"))
