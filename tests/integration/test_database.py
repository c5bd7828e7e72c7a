"""The engines that every process uses."""

import asyncio

import psycopg
import pytest
from rushes_core import database
from rushes_core.database import create_api_engine, create_sync_engine
from rushes_core.impatient import Impatient
from rushes_core.settings import Settings
from rushes_worker.connections import Connections
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from support.proxy import relayed

OWN_PID = text("SELECT pg_backend_pid()")
BROKEN = text("SELECT nonsense WHERE 'x' = :prompt")


def test_an_error_of_a_worker_does_not_hold_the_values_of_its_statement(settings: Settings) -> None:
    engine = create_sync_engine(settings, pool_size=1)
    with pytest.raises(DBAPIError) as error, engine.connect() as connection:
        connection.execute(BROKEN, {"prompt": "a secret dog"})
    assert "a secret dog" not in str(error.value)
    engine.dispose()


def test_a_worker_gives_up_a_connection_that_falls_silent_and_makes_another(settings: Settings) -> None:
    with relayed(settings) as (through, proxy):
        engine = create_sync_engine(through, pool_size=1, silence_seconds=3)
        with engine.connect() as connection:
            first = connection.execute(OWN_PID).scalar_one()
            proxy.strand()
            with pytest.raises(OperationalError, match="no result within 3 s") as error:
                connection.execute(OWN_PID)
        assert error.value.connection_invalidated
        with engine.connect() as connection:
            assert connection.execute(OWN_PID).scalar_one() != first
        engine.dispose()


def test_a_worker_does_not_take_a_connection_from_the_pool_that_fell_silent(settings: Settings) -> None:
    with relayed(settings) as (through, proxy):
        engine = create_sync_engine(through, pool_size=1, silence_seconds=3)
        with engine.connect() as connection:
            connection.execute(OWN_PID)
        proxy.strand()
        with engine.connect() as connection:
            connection.execute(OWN_PID)
        engine.dispose()


def test_a_replica_takes_none_of_those_that_were_free_when_one_fell_silent(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Impatient, "silence_seconds", 3.0)
    with relayed(settings) as (through, proxy):
        connections = Connections(through)
        with connections.lend() as one, connections.lend() as other:
            assert one.run_once(b"SELECT 1") == other.run_once(b"SELECT 1")
        proxy.strand()
        with pytest.raises(psycopg.OperationalError), connections.lend() as session:
            session.run_once(b"SELECT 1")
        with connections.lend() as session:
            session.run_once(b"SELECT 1")
        connections.close()


def test_a_process_with_more_patience_waits_for_what_the_server_is_still_doing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Impatient, "silence_seconds", 0.1)
    engine = create_sync_engine(settings, pool_size=1, silence_seconds=30)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 7 FROM pg_sleep(0.5)")).scalar_one() == 7
    engine.dispose()


def test_an_error_of_the_api_does_not_hold_the_values_of_its_statement(settings: Settings) -> None:
    async def run() -> None:
        engine = create_api_engine(settings, pool_size=1)
        with pytest.raises(DBAPIError) as error:
            async with engine.connect() as connection:
                await connection.execute(BROKEN, {"prompt": "a secret dog"})
        assert "a secret dog" not in str(error.value)
        await engine.dispose()

    asyncio.run(run())


@pytest.mark.parametrize("is_idle", [False, True], ids=["just used", "idle"])
def test_the_api_replaces_a_connection_that_ended_in_the_pool(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, is_idle: bool
) -> None:
    monkeypatch.setattr(database, "MAX_IDLE_SECONDS", 0.0 if is_idle else 1_000.0)

    async def run() -> None:
        engine, other = create_api_engine(settings, pool_size=1), create_api_engine(settings, pool_size=1)
        async with engine.connect() as connection:
            first = (await connection.execute(OWN_PID)).scalar_one()
        async with engine.connect() as connection:
            assert (await connection.execute(OWN_PID)).scalar_one() == first
        async with other.connect() as connection:
            # returns when it has ended
            await connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": first})
        async with engine.connect() as connection:
            assert (await connection.execute(OWN_PID)).scalar_one() != first
        await engine.dispose()
        await other.dispose()

    asyncio.run(run())
