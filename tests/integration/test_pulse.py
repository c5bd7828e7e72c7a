"""The pulse's connection, whatever becomes of who waits for a beat."""

import asyncio
from typing import Any

import psycopg
import pytest
from rushes_api.pulse import Pulse
from rushes_core.settings import Settings


def test_a_beat_that_is_done_as_its_waiter_is_cancelled_leaves_no_connection(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[psycopg.AsyncConnection[Any]] = []

    async def run() -> None:
        pulse = Pulse(settings)
        connect, beat = psycopg.AsyncConnection.connect, pulse._beat

        async def remembered(**arguments: Any) -> psycopg.AsyncConnection[Any]:
            made.append(await connect(**arguments))
            return made[-1]

        async def beat_and_cancel(connection: psycopg.AsyncConnection[Any] | None) -> Any:
            kept = await beat(connection)
            waiter.cancel()
            return kept

        monkeypatch.setattr(psycopg.AsyncConnection, "connect", remembered)
        monkeypatch.setattr(pulse, "_beat", beat_and_cancel)
        waiter = asyncio.create_task(pulse._ask())
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await pulse.close()

    asyncio.run(run())
    assert [connection.closed for connection in made] == [True]
