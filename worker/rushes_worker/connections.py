"""Connections of one replica to Postgres that run statements one by one, each a transaction of its own."""

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from rushes_core.database import connect_arguments
from rushes_core.prepared import Session
from rushes_core.settings import Settings

UNREACHABLE = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
"""Errors of a database that is away, restarting, failing over (read-only) or too slow."""

_MAX_OPEN = 5
_PLANS_KEPT_SECONDS = 5.0
"""A plan that was made while a table was empty is of no use for a full one, and lasts until somebody analyzes it."""


class Connections:
    """Lends a connection to one thread at a time, a new one when none is free.

    One that failed is not lent again, nor are those that were free when it had ended: what ended it has mostly met them
    too, and each would have to be tried.
    """

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        # a statement that is run all the time is not planned again to see whether its values would have helped; a plan
        # that was made for a small table looks its rows up all the same when thousands were added; and nothing is
        # remembered of rows that are looked for once
        self._arguments["options"] += (
            " -c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_memoize=off"
        )
        self._free: list[_Open] = []
        self._slots = threading.BoundedSemaphore(_MAX_OPEN)

    @contextmanager
    def lend(self) -> Iterator[Session]:
        """A connection on which every statement is a transaction of its own.

        Raises:
            one of `UNREACHABLE`
        """
        with self._slots:
            lent = self._take()
            try:
                lent.forget_old_plans()
                yield lent.session
            except BaseException:
                if lent.session.connection.closed:
                    self.close()
                lent.session.connection.close()
                raise
            self._free.append(lent)

    def close(self) -> None:
        """Close those that are free."""
        while (lent := self._pop()) is not None:
            lent.session.connection.close()

    def _take(self) -> "_Open":
        while (lent := self._pop()) is not None:
            if not lent.has_ended:
                return lent
            lent.session.connection.close()
        return _Open(Session(**self._arguments))

    def _pop(self) -> "_Open | None":
        # one step: another thread may take the last one after this one has looked
        try:
            return self._free.pop()
        except IndexError:
            return None


class _Open:
    """A connection, and what is made once for it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._news = select.poll()
        self._news.register(session.connection.fileno(), select.POLLIN)
        self._planned_at = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether the server has said something though it was asked for nothing: nearly always that this is the end."""
        return bool(self._news.poll(0))

    def forget_old_plans(self) -> None:
        now = time.monotonic()
        if now - self._planned_at > _PLANS_KEPT_SECONDS:
            self.session.run_once(b"DISCARD PLANS")
            self._planned_at = now
