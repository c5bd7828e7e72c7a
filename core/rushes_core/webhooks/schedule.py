"""When a delivery is tried again."""

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

DELAYS = (5.0, 300.0, 1_800.0, 7_200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Seconds between the ten attempts: about 75 hours in all."""
JITTER = 0.2
MAX_ATTEMPTS = 50
"""Bound of those that a receiver puts off with `Retry-After`, which do not move along the schedule."""
MAX_RETRY_AFTER = 86_400.0
MAX_AGE_DAYS = 5
"""A delivery that waited so long, for an endpoint that was failing, has failed."""


def delay_after(step: int) -> float | None:
    """Seconds until the attempt after the one at `step`, from 0; None when that was the last."""
    if step >= len(DELAYS):
        return None
    return DELAYS[step] * random.uniform(1 - JITTER, 1 + JITTER)


def retry_after(value: str | None) -> float | None:
    """Seconds that a header `Retry-After` asks for, between 1 and `MAX_RETRY_AFTER`; None if it is not understood."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        seconds = float(text[:12])
    else:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 1.0), MAX_RETRY_AFTER)
