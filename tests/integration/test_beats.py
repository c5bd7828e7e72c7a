"""When the processes that nobody asks worked last, as they say themselves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rushes_core import beats
from rushes_core.database import create_sync_engine
from rushes_core.settings import Settings
from rushes_core.states import JobState
from sqlalchemy import Engine, text
from support.checkpoints import tiny_checkpoint
from support.job_rows import JobRows, wait_past_restart
from support.service import CommandProcess
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("beats")), **LOCAL)


@pytest.fixture
def beating(settings: Settings) -> Iterator[Callable[[], dict[str, float]]]:
    engine = create_sync_engine(settings)

    def silences() -> dict[str, float]:
        with engine.connect() as connection:
            return {process: float(seconds) for process, seconds in connection.execute(beats.silences())}

    yield silences
    engine.dispose()


@contextmanager
def dead_attempts_kept(engine: Engine) -> Iterator[None]:
    """Have the database refuse to end attempts, and do all else."""
    with engine.begin() as connection:
        connection.execute(
            text("""
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'kept'; END$$;
CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW WHEN (OLD.state = 'running' AND NEW.state <> 'running')
EXECUTE FUNCTION refuse()
""")
        )
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP FUNCTION refuse CASCADE"))


def test_processes_say_again_and_again_that_they_work_and_are_silent_when_they_are_gone(
    settings: Settings, engine: Engine, beating: Callable[[], dict[str, float]], tmp_path: Path
) -> None:
    half = beats.BEAT_SECONDS / 2
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE beats"))
    with ExitStack() as running:
        for command in ("dispatcher", "loader", "deliver"):
            running.enter_context(CommandProcess(settings, tmp_path / f"{command}.log", command))
        wait_until(lambda: beating().keys() == set(beats.PROCESSES))
        for process in beats.PROCESSES:
            wait_until(lambda process=process: beating()[process] > half)
            wait_until(lambda process=process: beating()[process] < half)
    wait_until(lambda: min(beating().values()) > 1.5 * beats.BEAT_SECONDS)


def test_a_dispatcher_that_can_end_no_dead_attempt_is_silent(
    settings: Settings, rows: JobRows, beating: Callable[[], dict[str, float]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    wait_past_restart(rows.engine)
    with CommandProcess(settings, log, "dispatcher"):
        wait_until(lambda: beating().get(beats.DISPATCHER, 60.0) < beats.BEAT_SECONDS)
        with dead_attempts_kept(rows.engine):
            dead = rows.running(lease_seconds=-2)
            wait_until(lambda: '"sweep_failed"' in log.read_text())
            wait_until(lambda: beating()[beats.DISPATCHER] > 2 * beats.BEAT_SECONDS)
            assert rows.read(dead.id).state is JobState.RUNNING
        wait_until(lambda: beating()[beats.DISPATCHER] < beats.BEAT_SECONDS)
        assert rows.read(dead.id).state is not JobState.RUNNING
