"""What is said of a campaign on the command line, as members of a request. ValueError says what is wrong with it."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from rushes_core.moment import parse_duration, parse_moment

DAYS = ("mo", "tu", "we", "th", "fr", "sa", "su")
_WINDOW_EXAMPLE = "as in '22:00-06:00 mo-fr Europe/Berlin'"
_TIMES = re.compile(r"([0-2]\d:[0-5]\d)-([0-2]\d:[0-5]\d)", re.ASCII)
_CLOSINGS = {"stop": "stop", "finish": "finish_current"}


def window(text: str) -> dict[str, Any]:
    """A window: times, days unless all, a time zone, and `stop` if running clips are not to finish; in any order."""
    found: dict[str, Any] = {}
    for word in text.split():
        if times := _TIMES.fullmatch(word):
            part = {"start": times[1], "end": times[2]}
        elif word.lower() in _CLOSINGS:
            part = {"on_close": _CLOSINGS[word.lower()]}
        elif _looks_like_days(word):
            part = {"days": days(word)}
        else:
            part = {"timezone": _zone(word)}
        if again := found.keys() & part.keys():
            raise ValueError(f"says {' and '.join(sorted(again))} twice")
        found |= part
    for name, what in (("start", "times"), ("timezone", "a time zone")):
        if name not in found:
            raise ValueError(f"lacks {what}, {_WINDOW_EXAMPLE}")
    return found


def days(text: str) -> list[str]:
    """Days as `mo-fr`, `sa,su` or `fr-mo`, in the order of the week."""
    chosen: set[str] = set()
    for part in text.lower().split(","):
        first, dash, last = part.partition("-")
        for day in (first, last) if dash else (first,):
            if day not in DAYS:
                raise ValueError(f"has no day {day!r}: days are {', '.join(DAYS)}")
        start, end = DAYS.index(first), DAYS.index(last or first)
        chosen.update(DAYS[(start + step) % 7] for step in range((end - start) % 7 + 1))
    return [day for day in DAYS if day in chosen]


def _looks_like_days(word: str) -> bool:
    parts = re.split("[,-]", word.lower())
    return all(len(part) <= 2 for part in parts) or parts[0] in DAYS


def _zone(word: str) -> str:
    try:
        ZoneInfo(word)
    except (ValueError, OSError, KeyError):
        raise ValueError(
            f"has {word!r}, which is neither times, nor days, nor a time zone, {_WINDOW_EXAMPLE}"
        ) from None
    return word


def budget(text: str) -> dict[str, Any]:
    """GPU time: seconds as a number, or a duration; `cancel` behind a comma if the rest is to be cancelled then."""
    amount, comma, action = text.partition(",")
    if comma and action.strip() not in ("cancel", "hold"):
        raise ValueError("must end with ',cancel' or ',hold', or with the time")
    seconds = float(amount) if re.fullmatch(r"\d+(\.\d+)?", amount, re.ASCII) else _seconds(amount)
    if seconds <= 0:
        raise ValueError("must be more than no GPU time")
    return {"gpu_seconds": seconds} | ({"on_limit": "cancel"} if action.strip() == "cancel" else {})


def proof(text: str) -> dict[str, Any]:
    """How many clips come first, and after a colon how long until it goes on by itself: `4` or `4:30m`."""
    count, colon, after = text.partition(":")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ValueError("must be a number of clips, with a time behind a colon to go on by itself, as 4 or 4:30m")
    if colon:
        parse_duration(after)
    return {"count": int(count)} | ({"auto_continue_after": after} if colon else {})


def number(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("must be a whole number above 0")
    return int(text)


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, and None for `none`."""
    return lambda text: None if text == "none" else parse(text)


def moment(text: str) -> str:
    """A time from now, as 2h, or with its zone."""
    try:
        return (datetime.now(UTC) + parse_duration(text)).isoformat()
    except ValueError:
        return parse_moment(text).isoformat()


def pair(text: str) -> tuple[str, str]:
    """`NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError("must be NAME=VALUE")
    return name, value


def defaults(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Members that every line has: numbers, truth values and objects as JSON has them, everything else as text."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _seconds(text: str) -> float:
    try:
        return parse_duration(text).total_seconds()
    except ValueError:
        raise ValueError("must be GPU seconds, or a duration such as 25h") from None
