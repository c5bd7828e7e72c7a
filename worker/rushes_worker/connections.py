"""Connections of one replica to Postgres that run statements one by one, each a transaction of its own."""

import select
import threading
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


class Connections:
    """Lends a connection to one thread at a time, a new one when none is free; one that failed is not lent again."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        # a statement that is run all the time is not planned again to see whether its values would have helped
        self._arguments["options"] += " -c plan_cache_mode=force_generic_plan"
        self._free: list[Connection[DictRow]] = []
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
                yield connection
            except BaseException:
                connection.close()
                raise
            self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _take(self) -> Connection[DictRow]:
        while self._free:
            connection = self._free.pop()
            if not _has_ended(connection):
                return connection
            connection.close()
        connection = Connection[DictRow].connect(**self._arguments, autocommit=True, row_factory=dict_row)
        connection.cursor_factory = cast("type[Cursor[DictRow]]", RawCursor)
        return connection


def _has_ended(connection: Connection[DictRow]) -> bool:
    """Whether the server has said something to a connection that asked for nothing: nearly always its end."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
