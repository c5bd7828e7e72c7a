"""The engines that every process uses."""

import asyncio

import pytest
from rushes_core.database import create_api_engine, create_sync_engine
from rushes_core.settings import Settings
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

BROKEN = text("SELECT nonsense WHERE 'x' = :prompt")


def test_an_error_of_a_worker_does_not_hold_the_values_of_its_statement(settings: Settings) -> None:
    engine = create_sync_engine(settings, pool_size=1)
    with pytest.raises(DBAPIError) as error, engine.connect() as connection:
        connection.execute(BROKEN, {"prompt": "a secret dog"})
    assert "a secret dog" not in str(error.value)
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
