"""Whether the database still answers: asked all the time, so that no request has to wait long to find out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psycopg
from rushes_core.database import connect_arguments
from rushes_core.log import get_logger
from rushes_core.settings import Settings

log = get_logger(__name__)

BEAT_SECONDS = 0.25
SILENT_BEATS = 4
"""Beats without an answer after which the database counts as silent. Beats, not seconds: those that this process
itself was too busy to take do not count."""


class Pulse:
    """Asks the database for nothing, on a connection of its own, four times a second."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        self._connection: psycopg.AsyncConnection[tuple[int]] | None = None
        self._missed = 0

    @property
    def is_silent(self) -> bool:
        """Whether the database takes questions and does not answer. One that refuses them is not silent."""
        return self._missed >= SILENT_BEATS

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            question = asyncio.create_task(self._ask())
            try:
                while not (await asyncio.wait({question}, timeout=BEAT_SECONDS))[0]:
                    self._missed += 1
                    if self._missed == SILENT_BEATS:
                        log.warning("database_silent", seconds=SILENT_BEATS * BEAT_SECONDS)
            finally:
                question.cancel()
            if question.result():
                if self.is_silent:
                    log.info("database_answers")
                self._missed = 0
            await asyncio.sleep(BEAT_SECONDS)

    async def _ask(self) -> bool:
        try:
            if self._connection is None:
                self._connection = await psycopg.AsyncConnection.connect(**self._arguments, autocommit=True)
            await self._connection.execute("SELECT 1")
        except (psycopg.Error, OSError):
            await self.close()
            return False
        return True

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


@asynccontextmanager
async def beating(settings: Settings) -> AsyncGenerator[Pulse]:
    """A pulse that is taken until the end of the context."""
    pulse = Pulse(settings)
    task = asyncio.create_task(pulse.run())
    try:
        yield pulse
    finally:
        task.cancel()
        await asyncio.wait({task})
        await pulse.close()
