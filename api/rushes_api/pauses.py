"""Whose queue is paused, as this process last heard."""

import asyncio
import time

from rushes_core import backlog
from rushes_core.log import get_logger
from rushes_core.time_limit import within
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

log = get_logger(__name__)

MAX_AGE_SECONDS = 1.0
WAIT_SECONDS = 0.5
"""How long a request waits to hear it again. What it answers does not depend on it: then it says what was known."""


class Pauses:
    """The projects that are paused, asked for again when somebody wants to know."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions
        self._projects: frozenset[str] = frozenset()
        self._heard_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def has(self, project: str) -> bool:
        """Whether the queue is paused for this project."""
        return project in self._projects or backlog.EVERYBODY in self._projects

    async def refresh(self) -> None:
        """Hear it again if the last time is longer ago than `MAX_AGE_SECONDS`."""
        if time.monotonic() - self._heard_at < MAX_AGE_SECONDS:
            return
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=WAIT_SECONDS)

    async def _ask(self) -> None:
        try:
            self._projects = await within(self._read())
            self._heard_at = time.monotonic()
        except (SQLAlchemyError, OSError) as error:
            log.warning("pauses_unknown", error=str(error).splitlines()[0])
        finally:
            self._asking = None

    async def _read(self) -> frozenset[str]:
        async with self._sessions() as session:
            paused = (await session.execute(backlog.queue_pauses())).scalars()
            return frozenset(pause.project for pause in paused)
