"""Connections that requests share: what several want of the database in one moment is done as one."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.rows import tuple_row
from rushes_core.database import connect_arguments
from rushes_core.settings import Settings
from rushes_core.time_limit import end

Row = tuple[Any, ...]
Connection = psycopg.AsyncConnection[Row]

_Answer = TypeVar("_Answer")
_Together = TypeVar("_Together")


class Line:
    """A connection that is made when it is needed, and again when it was lost."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        self._connection: Connection | None = None

    async def fetch(self, query: str, values: Sequence[Sequence[object] | Mapping[str, object]]) -> list[list[Row]]:
        """The rows of `query` for each of `values`. A connection that turns out to be dead is replaced once."""
        return await self._run(lambda connection: _fetch(connection, query.encode(), values))

    async def begin(self) -> Connection:
        """The connection, in a transaction. One that turns out to be dead is replaced once."""
        cursor = await self._run(lambda connection: connection.execute(b"BEGIN", prepare=False))
        return cursor.connection

    async def _run(self, work: Callable[[Connection], Awaitable[_Answer]]) -> _Answer:
        is_old = self._connection is not None
        try:
            return await work(await self._connected())
        except (psycopg.OperationalError, psycopg.errors.FeatureNotSupported):
            # the latter: a migration has changed what a prepared statement returns
            await self.close()
            if not is_old:
                raise
        return await work(await self._connected())

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.closed

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                **self._arguments, autocommit=True, row_factory=tuple_row
            )
        return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _fetch(
    connection: Connection, query: bytes, values: Sequence[Sequence[object] | Mapping[str, object]]
) -> list[list[Row]]:
    if len(values) == 1:
        cursor = await connection.execute(query, values[0], prepare=True, binary=True)
        return [await cursor.fetchall()]
    async with connection.pipeline():
        cursors = [await connection.execute(query, each, prepare=True, binary=True) for each in values]
        return [await cursor.fetchall() for cursor in cursors]


class Gathering(ABC, Generic[_Together]):
    """Does together what comes in one turn of the loop. While every line is taken, more gathers for the next.

    What a line does not do in time is given up, and the line with it: a connection may fall silent for ever.
    """

    def __init__(self, settings: Settings, *, lines: int, wait_seconds: float) -> None:
        """
        Args:
            wait_seconds: how long a line may take.
        """
        self._settings = settings
        self._wait_seconds = wait_seconds
        self._lines = {Line(settings) for _ in range(lines)}
        self._free = list(self._lines)
        self._is_due = False
        self._is_closed = False
        self._under_way: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _next(self) -> _Together:
        """Take what goes along next; false, if nothing waits."""

    @abstractmethod
    async def _work(self, line: Line, together: _Together) -> None:
        """Do it, and tell whoever waits; `_fail` tells them what this raises."""

    @abstractmethod
    def _fail(self, together: _Together, error: Exception) -> None:
        """Tell those who still wait."""

    async def close(self) -> None:
        self._is_closed = True
        await end(self._under_way)
        self._start()
        for line in self._lines:
            await line.close()

    def _call(self) -> None:
        """Something waits. What else comes in this turn of the loop goes along."""
        if not self._is_due and (self._free or self._is_closed):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._is_due = False
        while (self._free or self._is_closed) and (together := self._next()):
            if self._is_closed:
                self._fail(together, _stopping())
            else:
                task = self._spawn(self._serve(self._free.pop(), together))
                # not by `_serve` itself: one that is cancelled before its first step never runs
                task.add_done_callback(partial(self._ended, together))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _serve(self, line: Line, together: _Together) -> None:
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._wait_seconds, self._give_up, task, line, together)
        try:
            await self._work(line, together)
        except Exception as error:
            self._fail(together, error)
        finally:
            timer.cancel()
            if line in self._lines:
                self._free.append(line)
                self._start()
            else:
                await line.close()

    def _ended(self, together: _Together, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._fail(together, _stopping())

    def _give_up(self, task: "asyncio.Task[None]", line: Line, together: _Together) -> None:
        self._fail(together, psycopg.OperationalError(f"the database did not answer within {self._wait_seconds:g} s"))
        self._lines.remove(line)
        # others need not wait until the driver has let go of it
        self._spawn(end({task}))
        line = Line(self._settings)
        self._lines.add(line)
        self._free.append(line)
        self._start()


def _stopping() -> Exception:
    return psycopg.OperationalError("the API is stopping")
