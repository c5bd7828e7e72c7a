"""Waiting for what another process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, timeout_seconds: float = 90.0) -> None:
    """Return when `condition` holds; what it raises is raised.

    Raises:
        TimeoutError: it did not hold in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_seconds:g} s")
        time.sleep(0.05)
