"""When a campaign will be done, as arithmetic on what was measured."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from rushes_core.campaigns import forecast
from rushes_core.campaigns.forecast import Capacity, Forecast
from rushes_core.campaigns.windows import Window
from rushes_core.measured import Run, RunTimes, cost_of

NOW = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
SHAPE = (480, 480, 107)
NIGHT = Window.parse({"timezone": "UTC", "start": "22:00", "end": "06:00"})


def times(num_jobs: int = 50, *, p50: float = 20, p90: float = 25, busy: float = 20) -> RunTimes:
    return RunTimes({SHAPE: Run(p50, p90, busy, num_jobs)})


def of(num_jobs: int = 100, *, measured: RunTimes | None = None, replicas: int = 2, **values: object) -> Forecast:
    fields: dict[str, object] = {"capacity": Capacity(replicas), "now": NOW} | values
    cost = num_jobs * cost_of(SHAPE)
    return forecast.of(num_jobs=num_jobs, cost=cost, times=measured or times(), **fields)  # type: ignore[arg-type]


def seconds_to(moment: datetime | None) -> float:
    assert moment is not None
    return (moment - NOW).total_seconds()


def test_it_is_the_work_over_the_replicas_and_the_end_of_the_last_clip() -> None:
    found = of(100)
    assert seconds_to(found.p50) == 99 * 20 / 2 + 20
    assert 1.1 < seconds_to(found.p90) / seconds_to(found.p50) < 1.4
    assert (found.gpu_seconds, found.basis, found.fits_window) == (2_000, "last 50 clips", None)


def test_nothing_is_said_before_enough_clips_were_measured() -> None:
    assert of(100, measured=times(19)) == Forecast()
    assert of(100, measured=RunTimes({})) == Forecast()
    assert of(100, measured=times(20)).p50 is not None


def test_no_time_is_said_while_nobody_would_run_it_or_may() -> None:
    for found in (of(100, replicas=0), of(100, is_held=True), of(100, capacity=Capacity(2, share=0))):
        assert (found.p50, found.p90, found.gpu_seconds) == (None, None, 2_000)


def test_a_share_and_a_limit_of_its_own_make_it_longer() -> None:
    assert seconds_to(of(100, capacity=Capacity(4, share=0.25)).p50) == 99 * 20 + 20
    assert seconds_to(of(100, replicas=8, max_parallel=1).p50) == 99 * 20 + 20


def test_more_replicas_than_clips_are_no_faster_than_one_clip() -> None:
    assert seconds_to(of(1, replicas=8).p50) == 20


def test_replicas_begin_the_next_clip_while_the_last_is_stored() -> None:
    assert seconds_to(of(101, measured=times(busy=10), replicas=1).p50) == 100 * 10 + 20


def test_an_unknown_shape_takes_as_long_as_others_in_proportion() -> None:
    run = times().run((480, 480, 214))
    assert run is not None
    assert (run.p50, run.p90, run.num_jobs) == (40, 50, 0)


def test_closed_hours_are_waited_for_and_it_is_said_whether_one_night_is_enough() -> None:
    short = of(100, window=NIGHT)
    assert (seconds_to(short.p50), short.fits_window) == (99 * 20 / 2 + 20, True)
    long = of(6_000, replicas=2, window=NIGHT)
    assert seconds_to(long.p50) > 24 * 3_600
    assert long.fits_window is False
    early = of(100, window=NIGHT, now=NOW - timedelta(hours=3))
    assert early.p50 == short.p50
    assert early.fits_window is True


def test_it_does_not_begin_before_the_time_that_was_asked_for() -> None:
    later = NOW + timedelta(hours=1)
    assert seconds_to(of(100, not_before=later).p50) == 3_600 + 99 * 20 / 2 + 20


@given(
    num_jobs=st.integers(1, 2_000_000),
    replicas=st.integers(1, 1_000),
    share=st.floats(1e-6, 1),
    p50=st.floats(1e-3, 1e4),
    more=st.floats(1, 10),
    measured=st.integers(20, 1_000),
    max_parallel=st.none() | st.integers(1, 100),
)
def test_it_lies_ahead_and_nine_of_ten_need_no_less_than_half(
    num_jobs: int, replicas: int, share: float, p50: float, more: float, measured: int, max_parallel: int | None
) -> None:
    found = of(
        num_jobs,
        measured=times(measured, p50=p50, p90=p50 * more, busy=p50),
        capacity=Capacity(replicas, share=share),
        max_parallel=max_parallel,
    )
    assert found.p50 is not None
    assert found.p90 is not None
    assert NOW < found.p50 <= found.p90
