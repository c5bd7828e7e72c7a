"""Every revision goes up, down and up, and ends at the schema of the models."""

import subprocess
import sys

import psycopg
import pytest
from alembic import command
from rushes_core import jobs
from rushes_core.database import alembic_config, create_sync_engine, migrate
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from support.stack import SharedStack, libpq_url

FIRST_REVISION = "5148ce10a63d"
BEFORE_INDEXES = "9c1f0e5d7a42"


@pytest.fixture
def empty_database(stack: SharedStack) -> str:
    """URL of a database without tables."""
    settings = stack.settings()
    command.downgrade(alembic_config(settings.database_url), "base")
    return settings.database_url


def test_revisions_go_up_down_and_up_and_match_the_models(empty_database: str) -> None:
    config = alembic_config(empty_database)
    command.upgrade(config, "head")
    command.downgrade(config, "base")
    command.upgrade(config, "head")
    command.check(config)


def test_downgrade_leaves_nothing_behind(stack: SharedStack) -> None:
    env = stack.env()
    command.downgrade(alembic_config(env["RUSHES_DATABASE_URL"]), "base")
    with psycopg.connect(libpq_url(env)) as connection:
        left = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'alembic%' "
            "UNION SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        ).fetchall()
    assert left == []


def test_processes_that_migrate_at_once_do_not_collide(empty_database: str) -> None:
    code = (
        "import sys; from alembic import command; from rushes_core.database import alembic_config; "
        "command.upgrade(alembic_config(sys.argv[1]), 'head')"
    )
    rivals = [subprocess.Popen([sys.executable, "-c", code, empty_database]) for _ in range(3)]
    assert [rival.wait(60) for rival in rivals] == [0, 0, 0]
    command.check(alembic_config(empty_database))


def test_a_lock_that_is_not_to_be_had_fails_the_run_and_the_next_run_succeeds(stack: SharedStack) -> None:
    env = stack.env()
    config = alembic_config(env["RUSHES_DATABASE_URL"])
    command.downgrade(config, "9c1f0e5d7a42")
    with psycopg.connect(libpq_url(env)) as other:
        other.execute("SELECT count(*) FROM idempotency_keys")
        # the revision before the one that needs the lock builds indexes, for which it lifts the limits
        with pytest.raises(OperationalError, match="lock timeout"):
            command.upgrade(config, "head")
    command.upgrade(config, "head")
    command.check(config)


def test_migrate_is_idempotent(stack: SharedStack) -> None:
    settings = stack.settings()
    migrate(settings)
    migrate(settings)


def test_a_lock_that_is_not_to_be_had_fails_the_migration_and_it_can_be_run_again(stack: SharedStack) -> None:
    env = stack.env()
    config = alembic_config(env["RUSHES_DATABASE_URL"])
    command.downgrade(config, FIRST_REVISION)
    with psycopg.connect(libpq_url(env)) as reader:
        reader.execute("SELECT count(*) FROM jobs")
        with pytest.raises(OperationalError, match="lock timeout"):
            command.upgrade(config, "head")
    command.upgrade(config, "head")
    command.check(config)


def test_an_index_whose_build_was_broken_off_is_built_again(stack: SharedStack) -> None:
    env = stack.env()
    config = alembic_config(env["RUSHES_DATABASE_URL"])
    command.downgrade(config, BEFORE_INDEXES)
    with psycopg.connect(libpq_url(env), autocommit=True) as connection:
        connection.execute("CREATE INDEX ix_jobs_claim ON jobs (id)")
        connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_jobs_claim'::regclass")
        command.upgrade(config, "head")
        command.check(config)
        invalid = connection.execute("SELECT indexrelid::regclass FROM pg_index WHERE NOT indisvalid").fetchall()
    assert invalid == []


def test_jobs_that_waited_before_the_upgrade_are_claimed_after_it(stack: SharedStack) -> None:
    settings = stack.settings()
    command.downgrade(alembic_config(settings.database_url), FIRST_REVISION)
    engine = create_sync_engine(settings)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts)"
                " VALUES ('video_1', 'p', 'tiny', 'x', 1, 480, 480, 107, '{}', 3)"
            )
        )
    migrate(settings)
    with Session(engine) as session:
        job = session.scalars(jobs.claim(model="tiny", owner="w", lease_seconds=30)).one()
        assert (job.id, job.generation) == ("video_1", 1)
    engine.dispose()
