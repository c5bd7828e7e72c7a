"""Waiting for what another process does."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


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


def wait_for_day_with(seconds: float) -> None:
    """Return when the day, by UTC, lasts for at least so long: what is counted by days is counted on one."""
    now = datetime.now(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    left = (midnight - now).total_seconds()
    if left < seconds:
        time.sleep(left + 0.1)
