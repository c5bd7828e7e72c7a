"""Every revision goes up, down and up, and ends at the schema of the models."""

import subprocess
import sys
from typing import Any, Self

import psycopg
import pytest
from alembic import command
from psycopg.pq import TransactionStatus
from rushes_core import claims
from rushes_core.database import alembic_config, create_sync_engine, migrate
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from support.stack import SharedStack, libpq_url

FIRST_REVISION = "5148ce10a63d"
BEFORE_INDEXES = "9c1f0e5d7a42"
PREVIOUS_RELEASE = "b60f3d9a2e78"
HISTORY_TABLES = ("jobs", "job_events", "job_attempts", "outbox")
FULL = """
INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts)
SELECT 'video_' || i, 'p' || i % 20, 'tiny', 'x', i, 480, 480, 107, '{"metadata": {"a": "b"}}', 3
FROM generate_series(1, 2000) AS i;
UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE seed % 2 = 0;
INSERT INTO job_attempts (job_id, fence, attempt, lease_owner) SELECT id, seed, 1, 'w' FROM jobs;
"""


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
        job = session.scalars(claims.claim(model="tiny", owner="w", lease_seconds=30)).one()
        assert (job.id, job.generation) == ("video_1", 1)
    engine.dispose()


@pytest.fixture
def previous_release(stack: SharedStack) -> dict[str, str]:
    """The environment of a database of the previous release, with jobs and their history."""
    env = stack.env()
    command.downgrade(alembic_config(env["RUSHES_DATABASE_URL"]), PREVIOUS_RELEASE)
    with psycopg.connect(libpq_url(env), autocommit=True) as connection:
        for statement in FULL.split(";"):
            connection.execute(statement)
        connection.execute("ANALYZE")
    return env


class LockWatch:
    """What a migration holds of the tables that existed before, and reads of them, after each of its statements."""

    BLOCKING = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
    HELD = """
    SELECT DISTINCT relname FROM pg_locks JOIN pg_class ON pg_class.oid = relation
    WHERE pid = pg_backend_pid() AND granted AND mode = ANY (%s) AND relname = ANY (%s)
    """
    READ = """
    SELECT coalesce(sum(seq_tup_read + n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_xact_user_tables
    WHERE relname = ANY (%s)
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.long: list[str] = []
        """Statements that went through rows while a lock kept writers out."""
        self._read = 0

    def __enter__(self) -> Self:
        event.listen(Engine, "after_cursor_execute", self._after)
        return self

    def __exit__(self, *exception: object) -> None:
        event.remove(Engine, "after_cursor_execute", self._after)

    def _after(self, connection: Connection, cursor: Any, statement: str, *arguments: Any) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.info.transaction_status is not TransactionStatus.INTRANS:
            # it committed by itself, and holds nothing any more
            self._read = 0
            return
        tables = list(HISTORY_TABLES)
        held = {row[0] for row in driver.execute(self.HELD, (list(self.BLOCKING), tables))}
        ((read,),) = driver.execute(self.READ, (tables,))
        if held and read > self._read:
            self.long.append(statement)
        self.held |= held
        self._read = read


def test_no_lock_keeps_writers_out_while_rows_are_read(previous_release: dict[str, str]) -> None:
    config = alembic_config(previous_release["RUSHES_DATABASE_URL"])
    with LockWatch() as watch:
        command.upgrade(config, "head")
    assert watch.long == []
    assert "jobs" in watch.held
    command.check(config)


def test_the_watch_for_locks_sees_an_index_that_is_built_in_a_transaction(previous_release: dict[str, str]) -> None:
    engine = create_engine(previous_release["RUSHES_DATABASE_URL"])
    with LockWatch() as watch, engine.begin() as connection:
        connection.execute(text("CREATE INDEX ix_plain ON outbox (created_at)"))
    engine.dispose()
    assert watch.long == ["CREATE INDEX ix_plain ON outbox (created_at)"]


def test_an_upgrade_that_a_long_transaction_holds_up_fails_fast_and_can_be_run_again(
    previous_release: dict[str, str],
) -> None:
    config = alembic_config(previous_release["RUSHES_DATABASE_URL"])
    with psycopg.connect(libpq_url(previous_release)) as other:
        other.execute("SELECT count(*) FROM jobs")
        with pytest.raises(OperationalError, match="lock timeout"):
            command.upgrade(config, "head")
        # nobody waits behind it any more
        with psycopg.connect(libpq_url(previous_release), autocommit=True) as writer:
            writer.execute("SET lock_timeout = '1s'")
            writer.execute("UPDATE jobs SET priority = 2 WHERE id = 'video_1'")
    command.upgrade(config, "head")
    command.check(config)


@pytest.mark.parametrize("index", ["ix_jobs_metadata", "ix_outbox_job_id"])
def test_an_upgrade_that_is_broken_off_in_a_build_can_be_run_again(
    previous_release: dict[str, str], index: str
) -> None:
    config = alembic_config(previous_release["RUSHES_DATABASE_URL"])

    def break_off(connection: Connection, cursor: Any, statement: str, *arguments: Any) -> None:
        if "CREATE" in statement and index in statement:
            raise ConnectionAbortedError(index)

    event.listen(Engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(ConnectionAbortedError):
            command.upgrade(config, "head")
    finally:
        event.remove(Engine, "before_cursor_execute", break_off)
    command.upgrade(config, "head")
    command.check(config)
