"""Points in time and durations as clients write and read them."""

import re
from datetime import UTC, datetime, timedelta

MAX_AHEAD = timedelta(days=30)
"""How far in the future a job may be put."""
MAX_BEHIND = timedelta(seconds=60)
"""How far in the past a time may lie: clocks differ, and requests take time."""
MIN_CANCEL_AFTER = timedelta(seconds=5)

_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_UNIX = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
_DURATION = re.compile(r"(?=\d)(?:(\d{1,7})d)?(?:(\d{1,7})h)?(?:(\d{1,7})m)?(?:(\d{1,7})s)?", re.ASCII)


def parse_moment(value: object) -> datetime:
    """The time that `value` names, in UTC.

    Args:
        value: an ISO 8601 date and time with its zone, `2026-12-01T22:00:00+01:00`, or Unix seconds, as a number or as
            text.

    Raises:
        ValueError: what is wrong with it, without the value.
    """
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    try:
        if isinstance(value, str) and _ISO.fullmatch(value):
            return datetime.fromisoformat(value).astimezone(UTC)
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and _UNIX.fullmatch(text):
            return datetime.fromtimestamp(float(text), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError("is no time that there is") from error
    raise ValueError("must be an ISO 8601 time with its zone, as 2026-12-01T22:00:00Z, or Unix seconds")


def parse_duration(text: str) -> timedelta:
    """A duration as `90m`, `1h30m`, `2d` or `45s`: whole numbers with units, the largest first.

    Raises:
        ValueError: what is wrong with it, without the text.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError("must be a duration such as 90m, 1h30m, 2d or 45s")
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def unix_or_none(time: datetime | None) -> int | None:
    """Whole Unix seconds, as clients read them."""
    return None if time is None else int(time.timestamp())
