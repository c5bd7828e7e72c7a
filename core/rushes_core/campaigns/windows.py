"""Hours of the week in which the jobs of a campaign may run, by the clock on somebody's wall.

A window opens at the first moment at which that clock shows `start` or later, and closes at the first moment after it
at which it shows `end` or later. An hour that a change of the clock skips or repeats is therefore neither lost to the
other hours nor opened twice: `02:30` in a night that has none is the moment of the change, and in a night that has two
it is the first. A window across midnight belongs to the day on which it starts.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from typing import Any, cast
from zoneinfo import ZoneInfo, available_timezones

from rushes_core.errors import InvalidRequest
from rushes_core.fields import printable, shown

DAYS = ("mo", "tu", "we", "th", "fr", "sa", "su")
FINISH_CURRENT = "finish_current"
"""What runs when the window closes may finish."""
STOP = "stop"
"""What runs when the window closes is given back to the campaign."""
ON_CLOSE = (FINISH_CURRENT, STOP)
FIELDS = ("timezone", "days", "start", "end", "on_close")

_MIDNIGHT = 24 * 60
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])", re.ASCII)
_ONE_DAY = timedelta(days=1)
_DAYS_AHEAD = 16
"""Two weeks and more: any window opens or closes within that, or never does, should a change of the clock swallow the
hours of one week."""
_MAX_DAYS = 400
"""Where `after_open_seconds` gives up."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a window is at one moment."""

    is_open: bool
    until: datetime | None
    """When that changes, in UTC; None: never."""


@dataclass(frozen=True, slots=True)
class Window:
    """Daily hours on some days of the week; from 00:00 to 24:00 they are the whole day."""

    timezone: ZoneInfo
    days: tuple[str, ...]
    start: int
    """Minutes after midnight."""
    end: int
    """Minutes after midnight, up to 24 hours; at or before `start` it is that of the next day."""
    on_close: str

    @classmethod
    def parse(cls, value: object) -> "Window":
        """The window of a request, or of the column that `as_dict` was stored in.

        Raises:
            InvalidRequest: names the field as `window.<field>`, the value, and what is allowed.
        """
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"window must be an object, got {shown(value)}", param="window")
        fields = {str(name): item for name, item in cast("Mapping[object, object]", value).items() if item is not None}
        unknown = next((printable(name) for name in fields if name not in FIELDS), None)
        if unknown is not None:
            raise InvalidRequest(
                f"unknown parameter: window.{unknown}", param=f"window.{unknown}", code="unknown_parameter"
            )
        for name in ("timezone", "start", "end"):
            if name not in fields:
                raise InvalidRequest(
                    f"window.{name} is required", param=f"window.{name}", code="missing_required_parameter"
                )
        window = cls(
            _zone(fields["timezone"]),
            _days(fields.get("days", list(DAYS))),
            _minutes("start", fields["start"]),
            _minutes("end", fields["end"]),
            _word("on_close", fields.get("on_close", FINISH_CURRENT), ON_CLOSE),
        )
        if window.start == window.end:
            raise _refusal("end", "must differ from start; 00:00 to 24:00 is the whole day", fields["end"])
        return window

    def as_dict(self) -> dict[str, Any]:
        """The window with every field, for JSON."""
        return {
            "timezone": self.timezone.key,
            "days": list(self.days),
            "start": _text(self.start),
            "end": _text(self.end),
            "on_close": self.on_close,
        }

    def at(self, now: datetime) -> Opening:
        """Whether it is open at `now`, a time with its zone, and until when that is so."""
        now = now.astimezone(UTC)
        spans = list(self._spans(now, _DAYS_AHEAD))
        for opens, closes in spans:
            if opens <= now < closes:
                return Opening(True, closes if (opens, closes) != spans[-1] else None)
            if now < opens:
                return Opening(False, opens)
        return Opening(False, None)

    def after_open_seconds(self, now: datetime, seconds: float) -> datetime | None:
        """When it will have been open for so many seconds since `now`; None: not within `_MAX_DAYS`."""
        now, left = now.astimezone(UTC), timedelta(seconds=seconds)
        for opens, closes in self._spans(now, _MAX_DAYS):
            begins = max(opens, now)
            if begins + left <= closes:
                return begins + left
            left -= max(closes - begins, timedelta(0))
        return None

    def _spans(self, now: datetime, days_ahead: int) -> Iterator[tuple[datetime, datetime]]:
        """When it opens and closes, from before `now`, in UTC; what meets is one span."""
        today = now.astimezone(self.timezone).date()
        last: tuple[datetime, datetime] | None = None
        for days in range(-2, days_ahead + 1):
            day = today + days * _ONE_DAY
            if DAYS[day.weekday()] not in self.days:
                continue
            end_day = day if self.end > self.start else day + _ONE_DAY
            opens, closes = self._moment(day, self.start), self._moment(end_day, self.end)
            if closes <= opens:
                continue
            if last is not None and opens <= last[1]:
                last = (last[0], closes)
                continue
            if last is not None:
                yield last
            last = (opens, closes)
        if last is not None:
            yield last

    def _moment(self, day: date, minutes: int) -> datetime:
        """The first moment of `day` at which the clock shows so many minutes after midnight, or more."""
        shown_then = datetime(day.year, day.month, day.day) + timedelta(minutes=minutes)
        # fold 0: the first of two, and for a time that is skipped the one that comes as long after the change
        moment = shown_then.replace(tzinfo=self.timezone).astimezone(UTC)
        if moment.astimezone(self.timezone).replace(tzinfo=None) == shown_then:
            return moment
        return self._change_before(moment)

    def _change_before(self, moment: datetime) -> datetime:
        """The last change of the clock up to `moment`, which is less than a day away."""
        before, after = moment - _ONE_DAY, moment
        offset = after.astimezone(self.timezone).utcoffset()
        while after - before > timedelta(seconds=1):
            middle = before + (after - before) / 2
            if middle.astimezone(self.timezone).utcoffset() == offset:
                after = middle
            else:
                before = middle
        return (before + timedelta(seconds=1)).replace(microsecond=0)


def opening_of(stored: Mapping[str, Any], now: datetime) -> Opening:
    """`Window.parse(stored).at(now)`, for whoever asks it of the same windows several times a second.

    Raises:
        InvalidRequest
    """
    minute = now.astimezone(UTC).replace(second=0, microsecond=0)
    found = _opening_of(json.dumps(stored, sort_keys=True), minute)
    # no window changes within a minute, but for changes of clocks that are long gone
    return found if found.until is None or now < found.until else Window.parse(stored).at(now)


@lru_cache(maxsize=4_096)
def _opening_of(stored: str, minute: datetime) -> Opening:
    return Window.parse(json.loads(stored)).at(minute)


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _refusal(name: str, problem: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"window.{name} {problem}, got {shown(value)}", param=f"window.{name}")


def _zone(value: object) -> ZoneInfo:
    if isinstance(value, str) and value in _zones():
        return ZoneInfo(value)
    raise _refusal("timezone", "must be the name of a time zone, as Europe/Berlin or UTC", value)


def _days(value: object) -> tuple[str, ...]:
    words = cast("list[object]", value) if isinstance(value, list) else []
    if words and all(word in DAYS for word in words):
        return tuple(day for day in DAYS if day in words)
    raise _refusal("days", f"must be a list of one or more of {', '.join(DAYS)}", cast("object", value))


def _minutes(name: str, value: object) -> int:
    if name == "end" and value == "24:00":
        return _MIDNIGHT
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        last = "24:00" if name == "end" else "23:59"
        raise _refusal(name, f"must be a time from 00:00 to {last} as HH:MM", value)
    return int(found[1]) * 60 + int(found[2])


def _word(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise _refusal(name, f"must be one of {', '.join(allowed)}", value)


def _text(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"
