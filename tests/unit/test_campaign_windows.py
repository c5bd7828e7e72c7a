"""When a window is open, in zones whose clocks change by an hour, by half an hour, or never."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rushes_core.campaigns.windows import DAYS, Window, opening_of
from rushes_core.errors import InvalidRequest

NIGHT = {"timezone": "Europe/Berlin", "start": "22:00", "end": "06:00"}
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata")
CHANGES = {
    "Europe/Berlin": (date(2026, 3, 29), date(2026, 10, 25)),
    "America/New_York": (date(2026, 3, 8), date(2026, 11, 1)),
    "Australia/Lord_Howe": (date(2026, 4, 5), date(2026, 10, 4)),
    "Asia/Kolkata": (date(2026, 3, 29), date(2026, 10, 25)),
}


def window(**fields: object) -> Window:
    return Window.parse(NIGHT | fields)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


class TestHours:
    def test_it_opens_and_closes_by_the_clock_of_its_zone(self) -> None:
        late = window()
        assert late.at(utc("2026-12-01T20:59")) == late.at(utc("2026-12-01T12:00"))
        assert late.at(utc("2026-12-01T20:59")).until == utc("2026-12-01T21:00")
        opening = late.at(utc("2026-12-01T21:00"))
        assert (opening.is_open, opening.until) == (True, utc("2026-12-02T05:00"))
        assert not late.at(utc("2026-12-02T05:00")).is_open

    def test_a_night_belongs_to_the_day_on_which_it_starts(self) -> None:
        fridays = window(days=["fr"])
        assert fridays.at(utc("2026-12-05T03:00")).is_open  # Saturday
        assert not fridays.at(utc("2026-12-04T03:00")).is_open  # Friday, early
        assert fridays.at(utc("2026-12-05T05:00")).until == utc("2026-12-11T21:00")

    def test_a_whole_day_ends_at_24_00(self) -> None:
        monday = window(days=["mo"], start="00:00", end="24:00", timezone="UTC")
        opening = monday.at(utc("2026-11-30T23:59"))
        assert (opening.is_open, opening.until) == (True, utc("2026-12-01T00:00"))

    def test_days_that_meet_are_one_opening(self) -> None:
        weekend = window(days=["sa", "su"], start="00:00", end="24:00", timezone="UTC")
        assert weekend.at(utc("2026-12-05T12:00")).until == utc("2026-12-07T00:00")

    def test_one_that_is_always_open_never_changes(self) -> None:
        always = window(start="00:00", end="24:00")
        opening = always.at(utc("2026-12-05T12:00"))
        assert (opening.is_open, opening.until) == (True, None)


class TestAskedAgain:
    @pytest.mark.parametrize("second", [0, 1, 59])
    @pytest.mark.parametrize("minute", ["20:59", "21:00", "04:59", "05:00"])
    def test_it_is_the_same(self, minute: str, second: int) -> None:
        stored = window().as_dict()
        now = utc(f"2026-12-01T{minute}").replace(second=second, microsecond=999_999)
        assert opening_of(stored, now) == Window.parse(stored).at(now)

    def test_a_change_within_a_minute_is_not_missed(self) -> None:
        # clocks in Amsterdam were 19 minutes and 32 seconds ahead
        stored = window(timezone="Europe/Amsterdam", start="22:00", end="06:00").as_dict()
        for seconds in range(0, 60, 7):
            now = utc("1930-12-01T21:40").replace(second=seconds)
            assert opening_of(stored, now) == Window.parse(stored).at(now)

    def test_it_is_worked_out_once_a_minute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stored = window(start="01:23").as_dict()
        asked: list[datetime] = []
        at = Window.at
        monkeypatch.setattr(Window, "at", lambda self, now: (asked.append(now), at(self, now))[1])
        for second in range(60):
            opening_of(stored, utc("2026-12-01T12:00").replace(second=second))
        assert asked == [utc("2026-12-01T12:00")]


class TestChangesOfTheClock:
    def test_a_night_is_an_hour_shorter_in_spring_and_longer_in_autumn(self) -> None:
        night = window()
        assert night.at(utc("2026-03-28T21:00")).until == utc("2026-03-29T04:00")
        assert night.at(utc("2026-10-24T20:00")).until == utc("2026-10-25T05:00")

    def test_a_start_that_the_clock_skips_is_the_moment_of_the_change(self) -> None:
        early = window(start="02:30", end="05:00")
        assert early.at(utc("2026-03-29T00:59")).until == utc("2026-03-29T01:00")
        assert early.at(utc("2026-03-29T01:00")).is_open

    def test_an_end_that_the_clock_skips_is_the_moment_of_the_change(self) -> None:
        assert window(start="22:00", end="02:30").at(utc("2026-03-28T23:00")).until == utc("2026-03-29T01:00")

    def test_hours_that_the_clock_skips_altogether_are_no_opening(self) -> None:
        assert window(start="02:10", end="02:50").at(utc("2026-03-28T12:00")).until == utc("2026-03-30T00:10")

    def test_a_weekly_window_that_the_clock_skips_opens_a_week_later(self) -> None:
        sunday = window(days=["su"], start="02:10", end="02:50")
        opening = sunday.at(utc("2026-03-22T01:20"))
        assert (opening.is_open, opening.until) == (True, utc("2026-03-22T01:50"))
        assert sunday.at(utc("2026-03-22T02:00")).until == utc("2026-04-05T00:10")

    def test_an_end_that_comes_twice_is_the_first(self) -> None:
        assert window(start="22:00", end="02:30").at(utc("2026-10-24T22:00")).until == utc("2026-10-25T00:30")

    def test_a_start_that_comes_twice_opens_once(self) -> None:
        early = window(start="02:30", end="04:00")
        assert early.at(utc("2026-10-25T00:30")).until == utc("2026-10-25T03:00")

    def test_half_an_hour_is_skipped_on_lord_howe(self) -> None:
        night = window(timezone="Australia/Lord_Howe", start="02:15", end="03:00")
        change = utc("2026-10-03T15:30")
        assert (night.at(change - timedelta(minutes=1)).until, night.at(change).is_open) == (change, True)
        assert night.at(change).until == utc("2026-10-03T16:00")

    @settings(max_examples=60, deadline=None)
    @given(
        zone=st.sampled_from(ZONES),
        change=st.integers(0, 1),
        start=st.integers(0, 1_439),
        end=st.integers(0, 1_440),
        days=st.sets(st.sampled_from(DAYS), min_size=1),
        minutes=st.integers(-3_000, 3_000),
    )
    def test_it_is_open_when_the_clock_on_the_wall_has_shown_the_start_and_not_yet_the_end(
        self, zone: str, change: int, start: int, end: int, days: set[str], minutes: int
    ) -> None:
        if start == end:
            return
        fields = {"timezone": zone, "start": _clock(start), "end": _clock(end), "days": sorted(days)}
        middle = datetime.combine(CHANGES[zone][change], datetime.min.time(), ZoneInfo(zone)).astimezone(UTC)
        now = middle + timedelta(minutes=minutes)
        opening = Window.parse(fields).at(now)
        assert opening.is_open == _is_open(ZoneInfo(zone), start, end, days, now)
        if opening.until is not None:
            assert opening.until > now
            assert Window.parse(fields).at(opening.until).is_open != opening.is_open
            assert Window.parse(fields).at(opening.until - timedelta(seconds=1)).is_open == opening.is_open


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _is_open(zone: ZoneInfo, start: int, end: int, days: set[str], now: datetime) -> bool:
    """By looking at the clock on the wall every minute."""
    minutes = [now + timedelta(minutes=n) for n in range(-4_500, 1)]
    walls = [moment.astimezone(zone).replace(tzinfo=None) for moment in minutes]
    for day in sorted({wall.date() for wall in walls[1_500:]}):
        if DAYS[day.weekday()] not in days:
            continue
        first = datetime.combine(day, datetime.min.time())
        opens = next((n for n, wall in enumerate(walls) if wall >= first + timedelta(minutes=start)), None)
        end_day = first if end > start else first + timedelta(days=1)
        if opens is not None and all(wall < end_day + timedelta(minutes=end) for wall in walls[opens:]):
            return True
    return False


class TestOpenTime:
    def test_closed_hours_do_not_count(self) -> None:
        assert window().after_open_seconds(utc("2026-12-01T12:00"), 9 * 3_600) == utc("2026-12-02T22:00")

    def test_a_night_of_the_change_counts_as_long_as_it_is(self) -> None:
        assert window().after_open_seconds(utc("2026-03-28T12:00"), 7 * 3_600) == utc("2026-03-29T04:00")

    def test_no_work_ends_when_it_is_open(self) -> None:
        assert window().after_open_seconds(utc("2026-12-01T12:00"), 0) == utc("2026-12-01T21:00")
        assert window().after_open_seconds(utc("2026-12-01T22:00"), 0) == utc("2026-12-01T22:00")

    def test_what_takes_more_than_a_year_has_no_end(self) -> None:
        assert window().after_open_seconds(utc("2026-12-01T12:00"), 500 * 8 * 3_600) is None


class TestParse:
    def test_what_is_absent_is_every_day_and_finishing(self) -> None:
        assert window().as_dict() == NIGHT | {"days": list(DAYS), "on_close": "finish_current"}

    def test_what_was_stored_is_the_same_window(self) -> None:
        stored = window(days=["su", "mo", "mo"], end="24:00", on_close="stop")
        assert stored.as_dict()["days"] == ["mo", "su"]
        assert Window.parse(stored.as_dict()) == stored

    @pytest.mark.parametrize(
        ("fields", "param", "shown"),
        [
            ({"timezone": "Europe/Bonn"}, "window.timezone", "'Europe/Bonn'"),
            ({"timezone": "../../etc/passwd"}, "window.timezone", "time zone"),
            ({"timezone": 1}, "window.timezone", "1"),
            ({"days": []}, "window.days", "mo, tu, we, th, fr, sa, su"),
            ({"days": ["monday"]}, "window.days", "monday"),
            ({"days": "mo"}, "window.days", "'mo'"),
            ({"start": "24:00"}, "window.start", "23:59"),
            ({"start": "7:00"}, "window.start", "HH:MM"),
            ({"start": 700}, "window.start", "700"),
            ({"end": "24:01"}, "window.end", "24:00"),
            ({"end": "22:00"}, "window.end", "00:00 to 24:00"),
            ({"on_close": "kill"}, "window.on_close", "finish_current, stop"),
            ({"tz": "UTC"}, "window.tz", "unknown"),
            ({"timezone": None}, "window.timezone", "required"),
        ],
    )
    def test_a_refusal_names_the_field_the_value_and_what_is_allowed(
        self, fields: dict[str, object], param: str, shown: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            window(**fields)
        assert refused.value.param == param
        assert shown in str(refused.value)
        assert param in str(refused.value)

    @pytest.mark.parametrize("value", ["22:00-06:00", 5, ["mo"]])
    def test_what_is_no_object_is_refused(self, value: object) -> None:
        with pytest.raises(InvalidRequest, match="window must be an object"):
            Window.parse(value)
