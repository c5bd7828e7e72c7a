"""Keeps the lease of a campaign while it is worked on, by a thread of its own: who is killed is soon replaced, and
who only takes long is not."""

import threading
import time
from collections.abc import Callable
from typing import Self

from rushes_core.campaigns.loading import LEASE_SECONDS
from rushes_core.log import get_logger
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

log = get_logger(__name__)

RENEW_SECONDS = LEASE_SECONDS / 4
HANGING_SECONDS = 60.0
"""Without a sign of the work for so long, the lease is let run out."""


class Renewal(threading.Thread):
    """Renews within a `with` block.

    Args:
        renew: renews once; False: there is nothing to renew any more.
    """

    def __init__(self, renew: Callable[[], bool]) -> None:
        super().__init__(name="renew", daemon=True)
        self._renew = renew
        self._ended = threading.Event()
        self._lost = False
        self._seen_at = time.monotonic()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def goes_on(self) -> bool:
        """Whether the work is to go on, as far as is known; to be asked often."""
        self._seen_at = time.monotonic()
        return not self._lost

    def run(self) -> None:
        while not self._lost and not self._ended.wait(RENEW_SECONDS):
            if time.monotonic() > self._seen_at + HANGING_SECONDS:
                continue
            try:
                self._lost = not self._renew()
            except (DBAPIError, PoolTimeout) as error:
                # whatever is written under the lease says whether it still holds
                log.debug("lease_not_renewed", error=str(error).splitlines()[0])
