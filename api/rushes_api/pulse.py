"""Whether the database still answers: asked all the time, so that no request has to wait long to find out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from rushes_core.database import connect_arguments
from rushes_core.log import get_logger
from rushes_core.settings import Settings
from rushes_core.time_limit import within

log = get_logger(__name__)

_Connection = psycopg.AsyncConnection[tuple[Any, ...]]

BEAT_SECONDS = 0.25
SILENT_BEATS = 4
"""Beats without an answer after which the database counts as silent. Beats, not seconds: those that this process
itself was too busy to take do not count."""


class Pulse:
    """Asks the database for nothing, on a connection of its own, four times a second."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        self._connection: _Connection | None = None
        self._is_closed = False
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
            except asyncio.CancelledError:
                question.cancel()
                await asyncio.wait({question})
                raise
            if question.result():
                if self.is_silent:
                    log.info("database_answers")
                self._missed = 0
            await asyncio.sleep(BEAT_SECONDS)

    async def _ask(self) -> bool:
        # whatever ends the beat closes it
        connection, self._connection = self._connection, None
        try:
            await within(self._beat(connection))
        except (psycopg.Error, OSError):
            return False
        return True

    async def _beat(self, connection: _Connection | None) -> None:
        if connection is None:
            connection = await psycopg.AsyncConnection.connect(**self._arguments, autocommit=True)
        try:
            await connection.execute("SELECT 1")
        except BaseException:
            await connection.close()
            raise
        # kept by the beat itself: whoever waits for it may be cancelled when it is done
        if self._is_closed or self._connection is not None:
            await connection.close()
        else:
            self._connection = connection

    async def close(self) -> None:
        self._is_closed = True
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
