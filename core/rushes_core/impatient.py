"""Connections to Postgres that do not wait for ever."""

import time
from typing import TypeVar

import psycopg
from psycopg.abc import PQGen

SILENCE_SECONDS = 15.0
"""How long a result may be waited for: longer than the server lets a statement run. A commit, which it does not bound,
is in doubt then."""
_LOOK_SECONDS = 0.1
"""How often a wait is left for Ctrl-C to be seen."""

_Result = TypeVar("_Result")
_Row = TypeVar("_Row")


class Impatient(psycopg.Connection[_Row]):
    """Ends when a result does not come in time. From a server that was frozen and has been replaced, or behind a proxy
    that acknowledges what it does not pass on, none ever would, and no timeout of TCP sees that."""

    silence_seconds = SILENCE_SECONDS

    def wait(self, gen: PQGen[_Result], interval: float = _LOOK_SECONDS, timeout: float | None = None) -> _Result:
        """As psycopg's, but for the end.

        Raises:
            psycopg.OperationalError: no result came in time. The connection is closed.
        """
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, self.silence_seconds)
        except psycopg.OperationalError as error:
            if time.monotonic() - began < self.silence_seconds:
                raise
            self.close()
            raise psycopg.OperationalError(f"no result within {self.silence_seconds:g} s") from error
