"""When a campaign will be done, as arithmetic on what was measured."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_core.campaigns.forecast import Capacity, Ends, Left, Means, Work, ends, ends_of
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.windows import Window
from rushes_core.measured import Run, RunTimes, cost_of

NOW = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
SHAPE, LONG = (480, 480, 107), (480, 480, 214)
NIGHT = Window.parse({"timezone": "UTC", "start": "22:00", "end": "06:00"})


def times(num_jobs: int = 50, *, p50: float = 20, p90: float = 25, busy: float = 20) -> RunTimes:
    return RunTimes({SHAPE: Run(p50, p90, busy, num_jobs)})


def work(num_jobs: int = 100, **values: Any) -> Work:
    return Work(num_jobs, num_jobs * cost_of(SHAPE), **values)


def left(num_jobs: int = 100, *, measured: RunTimes | None = None, replicas: int = 2, **values: Any) -> Left:
    share, limit = values.pop("share", 1.0), values.pop("max_parallel", None)
    return Means(measured or times(), Capacity(replicas, share=share), limit).left(work(num_jobs, **values))


def seconds_to(moment: datetime | None) -> float:
    assert moment is not None
    return (moment - NOW).total_seconds()


def test_it_is_the_work_over_the_replicas_and_the_end_of_the_last_clip() -> None:
    found = left(100)
    assert found.p50 == pytest.approx(100 * 20 / 2, abs=20)
    assert found.p90 is not None
    assert 1.1 < found.p90 / found.p50 < 1.4
    assert (found.gpu_seconds, found.basis) == (2_000, "last 50 clips")


def test_what_running_clips_have_done_is_done() -> None:
    half = left(100, done=50 * cost_of(SHAPE))
    assert half.gpu_seconds == 1_000
    assert half.p50 == pytest.approx((left(100).p50 or 0) - 500)


def test_nothing_is_said_before_enough_clips_were_measured() -> None:
    assert left(100, measured=times(19)) == Left()
    assert left(100, measured=RunTimes({})) == Left()
    assert left(100, measured=times(20)).p50 is not None


def test_no_time_is_said_while_nobody_would_run_it() -> None:
    for found in (left(100, replicas=0), left(100, share=0)):
        assert (found.p50, found.p90, found.gpu_seconds) == (None, None, 2_000)
        assert ends(found, now=NOW) == Ends()


def test_a_share_and_a_limit_of_its_own_make_it_longer() -> None:
    assert left(100, replicas=4, share=0.25).p50 == pytest.approx(2_000)
    assert left(100, replicas=8, max_parallel=1).p50 == pytest.approx(2_000)


def test_more_replicas_than_clips_are_no_faster_than_one_clip() -> None:
    assert left(1, replicas=8).p50 == 20


def test_replicas_begin_the_next_clip_while_the_last_is_stored() -> None:
    assert left(101, measured=times(busy=10), replicas=1).p50 == pytest.approx(101 * 10 + 10)


def test_a_place_of_its_own_is_free_when_the_clip_is_stored() -> None:
    assert left(101, measured=times(busy=10), replicas=8, max_parallel=1).p50 == pytest.approx(101 * 20)


def test_an_unknown_shape_takes_as_long_as_others_in_proportion_and_is_doubted() -> None:
    run = times().run(LONG)
    assert run is not None
    assert (run.p50, run.p90, run.num_jobs) == (40, 50, 0)
    known, unknown = left(100, shapes={SHAPE: 32}), left(50, shapes={LONG: 32})
    assert unknown.gpu_seconds == (known.gpu_seconds or 0) / 2
    assert (unknown.p90 or 0) / (unknown.p50 or 1) > (known.p90 or 0) / (known.p50 or 1) + 0.2


def test_clips_of_its_own_canvas_and_length_count_and_no_others() -> None:
    # what was measured of the long ones is more than in proportion
    measured = RunTimes({SHAPE: Run(20, 25, 20, 50), LONG: Run(100, 120, 100, 50)})
    assert left(100, measured=measured, shapes={SHAPE: 32}).gpu_seconds == pytest.approx(2_000)
    assert left(200, measured=measured, shapes={LONG: 32}).gpu_seconds == pytest.approx(100 * 100)
    assert left(300, measured=measured, shapes={SHAPE: 10, LONG: 10}).gpu_seconds == pytest.approx(100 * 120)


def test_closed_hours_are_waited_for_and_it_is_said_whether_one_night_is_enough() -> None:
    found = left(100)
    short = ends(found, now=NOW, window=NIGHT)
    assert (seconds_to(short.p50), short.fits_window) == (pytest.approx(found.p50 or 0, abs=1e-3), True)
    long = ends(left(6_000, replicas=2), now=NOW, window=NIGHT)
    assert seconds_to(long.p50) > 24 * 3_600
    assert long.fits_window is False
    early = ends(found, now=NOW - timedelta(hours=3), window=NIGHT)
    assert early.p50 == short.p50
    assert early.fits_window is True


def test_it_does_not_begin_before_the_time_that_was_asked_for() -> None:
    later = ends(left(100), now=NOW, not_before=NOW + timedelta(hours=1))
    assert seconds_to(later.p50) == pytest.approx(3_600 + (left(100).p50 or 0), abs=1e-3)


def test_what_was_foreseen_a_moment_ago_stays_and_is_never_in_the_past() -> None:
    ago = timedelta(seconds=4)
    assert seconds_to(ends(Left(1, 100, 120, "x"), now=NOW, made_at=NOW - ago).p50) == 96
    assert ends(Left(1, 3, 5, "x"), now=NOW, made_at=NOW - ago).p50 == NOW
    assert seconds_to(ends(Left(1, 3, 5, "x"), now=NOW, made_at=NOW - ago).p90) == 1


def test_it_ends_when_nothing_more_starts() -> None:
    soon = NOW + timedelta(minutes=1)
    assert ends(left(1_000), now=NOW, expires_at=soon) == Ends(soon, soon, None)


@pytest.mark.parametrize(
    "held",
    [
        {"paused_at": NOW},
        {"hold_reason": "approval"},
        {"hold_reason": "budget"},
        {"hold_reason": "quota"},
        # what is left takes 2,000 GPU seconds
        {"budget_gpu_seconds": 2_999.0},
        {"window": {"timezone": "Nowhere/Atlantis", "start": "00:00", "end": "01:00"}},
        {"expires_at": NOW - timedelta(seconds=1)},
    ],
    ids=str,
)
def test_nobody_knows_when_it_goes_on(held: dict[str, Any]) -> None:
    assert ends_of(Campaign(**held), left(100), used_gpu_seconds=1_000, now=NOW) == Ends()


@pytest.mark.parametrize(
    "held", [{}, {"hold_reason": "window"}, {"hold_reason": "not_before"}, {"budget_gpu_seconds": 3_000.0}], ids=str
)
def test_somebody_knows_when_it_goes_on(held: dict[str, Any]) -> None:
    assert ends_of(Campaign(**held), left(100), used_gpu_seconds=1_000, now=NOW).p50 is not None


@given(
    num_jobs=st.integers(1, 2_000_000),
    replicas=st.integers(1, 1_000),
    share=st.floats(1e-6, 1),
    p50=st.floats(1e-3, 1e4),
    more=st.floats(1, 10),
    measured=st.integers(20, 1_000),
    max_parallel=st.none() | st.integers(1, 100),
)
def test_nine_of_ten_need_no_less_than_half(
    num_jobs: int, replicas: int, share: float, p50: float, more: float, measured: int, max_parallel: int | None
) -> None:
    found = left(
        num_jobs,
        measured=times(measured, p50=p50, p90=p50 * more, busy=p50),
        replicas=replicas,
        share=share,
        max_parallel=max_parallel,
    )
    assert found.p50 is not None
    assert found.p90 is not None
    assert 0 < found.p50 <= found.p90 < math.inf
    end = ends(found, now=NOW)
    assert end.p50 is not None
    assert end.p90 is not None
    assert NOW <= end.p50 <= end.p90
