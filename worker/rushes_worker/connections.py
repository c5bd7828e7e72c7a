"""Connections of one replica to Postgres that run statements one by one, each a transaction of its own."""

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import psycopg
from psycopg import Connection, Cursor, RawCursor
from psycopg.rows import DictRow, dict_row
from rushes_core.database import connect_arguments
from rushes_core.settings import Settings

UNREACHABLE = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
"""Errors of a database that is away, restarting, failing over (read-only) or too slow."""

_MAX_OPEN = 5
_PLANS_KEPT_SECONDS = 5.0
"""A plan that was made while a table was empty is of no use for a full one, and lasts until somebody analyzes it."""


class Connections:
    """Lends a connection to one thread at a time, a new one when none is free; one that failed is not lent again."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        # a statement that is run all the time is not planned again to see whether its values would have helped; and a
        # plan that was made for a small table looks its rows up all the same when thousands were added
        self._arguments["options"] += " -c plan_cache_mode=force_generic_plan -c enable_seqscan=off"
        self._free: list[Connection[DictRow]] = []
        self._planned_at: dict[Connection[DictRow], float] = {}
        self._slots = threading.BoundedSemaphore(_MAX_OPEN)

    @contextmanager
    def lend(self) -> Iterator[Connection[DictRow]]:
        """A connection in autocommit mode.

        Raises:
            one of `UNREACHABLE`
        """
        with self._slots:
            connection = self._take()
            try:
                self._forget_old_plans(connection)
                yield connection
            except BaseException:
                self._drop(connection)
                raise
            self._free.append(connection)

    def close(self) -> None:
        while (connection := self._pop()) is not None:
            self._drop(connection)

    def _take(self) -> Connection[DictRow]:
        while (connection := self._pop()) is not None:
            if not _has_ended(connection):
                return connection
            self._drop(connection)
        connection = Connection[DictRow].connect(**self._arguments, autocommit=True, row_factory=dict_row)
        connection.cursor_factory = cast("type[Cursor[DictRow]]", RawCursor)
        self._planned_at[connection] = time.monotonic()
        return connection

    def _pop(self) -> Connection[DictRow] | None:
        # one step: another thread may take the last one after this one has looked
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _forget_old_plans(self, connection: Connection[DictRow]) -> None:
        now = time.monotonic()
        if now - self._planned_at[connection] > _PLANS_KEPT_SECONDS:
            connection.execute("DISCARD PLANS", prepare=False)
            self._planned_at[connection] = now

    def _drop(self, connection: Connection[DictRow]) -> None:
        connection.close()
        self._planned_at.pop(connection, None)


def _has_ended(connection: Connection[DictRow]) -> bool:
    """Whether the server has said something to a connection that asked for nothing: nearly always its end."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
