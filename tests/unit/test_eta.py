"""What is foreseen of a job, from figures that are made up."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rushes_api import eta as eta_module
from rushes_api.eta import Leased, Outlook, Shape, ShapeTimes
from rushes_core.models import Job, MeasuredTime
from rushes_core.states import JobState

SHAPE = (1344, 768, 124)
LONG = (1344, 768, 362)
NOW = datetime.now(UTC)
TIMES = {SHAPE: ShapeTimes(num_jobs=30, run_seconds=12.0, ranks_seconds=10.0)}


@pytest.fixture(autouse=True)
def _no_time_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    monkeypatch.setattr(eta_module, "datetime", Still)


def outlook(**changes: Any) -> Outlook:
    values: dict[str, Any] = {
        "at": NOW,
        "clock_ahead": timedelta(),
        "shapes": TIMES,
        "num_replicas": 2,
        "gpus_per_replica": 1.0,
        "leased": [],
        "paused": frozenset(),
    }
    return Outlook(**(values | changes))


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "project": "default",
        "state": JobState.QUEUED,
        "priority": 1,
        "hold": None,
        "width": SHAPE[0],
        "height": SHAPE[1],
        "num_frames": SHAPE[2],
        "run_at": ago(30),
        "started_at": None,
        "progress": 0,
    }
    return Job(**(values | changes))


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def busy(
    owner: str = "a", *, spent: float = 0.0, phase: str | None = "denoising", shape: Shape = SHAPE, progress: int = 90
) -> Leased:
    return Leased(True, phase, shape, ago(spent), progress, owner)


def claimed(owner: str = "a") -> Leased:
    return Leased(is_running=False, phase=None, shape=SHAPE, started_at=None, owner=owner)


def waits(figures: Outlook, num_ahead: int | None, **changes: Any) -> tuple[float, float]:
    """Seconds until a queued job starts and until it completes."""
    eta = figures.eta(job(**changes), num_ahead)
    assert eta is not None
    assert eta.confidence == "p80"
    assert eta.starts_at is not None
    assert eta.completes_at is not None
    now = NOW.timestamp()
    return eta.starts_at - now, eta.completes_at - now


class TestQueued:
    def test_an_idle_replica_takes_it_at_once(self) -> None:
        assert waits(outlook(leased=[busy()]), 0) == (pytest.approx(1, abs=1), pytest.approx(13, abs=1))

    def test_it_waits_for_what_is_ahead_shared_by_all_replicas(self) -> None:
        figures = outlook(leased=[busy("a", spent=4), busy("b", spent=8)])
        # 6 and 2 seconds are left, and six clips of ten seconds, three for each of two replicas
        starts, completes = waits(figures, 6)
        assert starts == pytest.approx(33, abs=1.1)
        assert completes - starts == pytest.approx(12, abs=1.1)
        assert waits(outlook(leased=figures.leased[:1], num_replicas=1), 6)[0] == pytest.approx(67, abs=1.1)

    def test_what_is_ahead_takes_what_clips_of_its_own_sizes_take(self) -> None:
        shapes = TIMES | {LONG: ShapeTimes(num_jobs=1, run_seconds=80.0, ranks_seconds=70.0)}
        waiting = {0: {SHAPE: 2}, 1: {LONG: 6}, 2: {SHAPE: 20}}
        figures = outlook(num_replicas=1, shapes=shapes, waiting=waiting)
        # two of 10 seconds and six of 70 come before one of their class: 55 each
        assert figures.wait_seconds(8, priority=1) == pytest.approx(1 + 8 * 55)
        assert figures.wait_seconds(2, priority=0) == pytest.approx(1 + 2 * 10)
        assert figures.wait_seconds(28) == pytest.approx(1 + 2 * 10 + 6 * 70 + 20 * 10)
        assert waits(figures, 8)[0] == pytest.approx(1 + 8 * 55, abs=1.1)
        assert waits(figures, 2, priority=0)[0] == pytest.approx(1 + 2 * 10, abs=1.1)

    def test_what_is_ahead_and_was_not_measured_takes_as_long_as_what_was(self) -> None:
        figures = outlook(num_replicas=1, waiting={1: {LONG: 3, SHAPE: 1}})
        assert figures.wait_seconds(4, priority=1) == pytest.approx(1 + 4 * 10)
        assert figures.wait_seconds(4, priority=0) == pytest.approx(1 + 4 * 10)

    def test_a_clip_that_is_only_stored_yet_holds_nobody_up(self) -> None:
        figures = outlook(num_replicas=1, leased=[busy(spent=11, phase="uploading")])
        assert waits(figures, 0)[0] == pytest.approx(1, abs=1)

    def test_a_job_that_is_claimed_ahead_counts(self) -> None:
        assert waits(outlook(num_replicas=1, leased=[busy(spent=5), claimed()]), 0)[0] == pytest.approx(16, abs=1.1)

    def test_one_that_takes_longer_than_most_is_not_over_yet(self) -> None:
        assert waits(outlook(num_replicas=1, leased=[busy(spent=100)]), 0)[0] == pytest.approx(2, abs=1.1)

    def test_it_does_not_start_before_its_time(self) -> None:
        assert waits(outlook(), None, run_at=ago(-600))[0] == pytest.approx(600, abs=1.1)
        assert waits(outlook(num_replicas=1), 100, run_at=ago(-5))[0] > 900

    def test_figures_that_are_old_do_not_put_it_into_the_past(self) -> None:
        assert waits(outlook(at=ago(14)), 0)[0] >= 0

    def test_a_clip_of_another_size_was_not_measured(self) -> None:
        eta = outlook().eta(job(num_frames=362), 0)
        assert eta is not None
        assert (eta.starts_at is not None, eta.completes_at) == (True, None)

    def test_times_are_those_of_the_database(self) -> None:
        ahead = timedelta(hours=1)
        starts, _ = waits(outlook(at=NOW + ahead, clock_ahead=ahead), 0)
        assert starts == pytest.approx(3_601, abs=1.1)

    @pytest.mark.parametrize(
        ("figures", "changes"),
        [
            ({"shapes": {}}, {}),
            ({"num_replicas": 0}, {}),
            ({"paused": frozenset({"default"})}, {}),
            ({"paused": frozenset({"*"})}, {}),
            ({}, {"hold": "concurrency"}),
            ({}, {"state": JobState.COMPLETED}),
        ],
    )
    def test_nobody_knows(self, figures: dict[str, Any], changes: dict[str, Any]) -> None:
        assert outlook(**figures).eta(job(**changes), 0) is None

    def test_nobody_knows_without_a_count_of_what_is_ahead(self) -> None:
        assert outlook().eta(job(), None) is None

    def test_the_pause_of_another_project_is_not_felt(self) -> None:
        assert outlook(paused=frozenset({"another"})).eta(job(), 0) is not None


class TestHeld:
    def test_a_running_job_ends_when_most_do(self) -> None:
        eta = outlook().eta(job(state=JobState.RUNNING, started_at=ago(5), progress=40), None)
        assert eta is not None
        assert eta.starts_at is None
        assert (eta.completes_at or 0) - NOW.timestamp() == pytest.approx(7, abs=1.1)

    def test_one_that_is_late_goes_by_what_is_left(self) -> None:
        eta = outlook().eta(job(state=JobState.RUNNING, started_at=ago(50), progress=75), None)
        assert eta is not None
        assert (eta.completes_at or 0) - NOW.timestamp() == pytest.approx(3, abs=1.1)

    def test_a_claimed_job_starts_when_a_running_one_ends(self) -> None:
        figures = outlook(num_replicas=1, leased=[busy(spent=4)])
        starts, completes = waits(figures, None, state=JobState.CLAIMED, lease_owner="a")
        assert (starts, completes) == (pytest.approx(6, abs=1.1), pytest.approx(18, abs=1.1))


class TestNeighbours:
    """Jobs one after another, as their clients are told of them."""

    def test_a_replica_that_is_late_with_one_starts_no_other_before_it_is_free(self) -> None:
        # it has run for four times as long as most, and is half done
        figures = outlook(num_replicas=1, leased=[busy(spent=50, progress=50)])
        ahead = figures.eta(job(state=JobState.RUNNING, started_at=ago(50), progress=50), None)
        assert ahead is not None
        assert ahead.completes_at is not None
        ahead_completes = ahead.completes_at - NOW.timestamp()
        assert ahead_completes == pytest.approx(6, abs=1.1)
        # but for what storing it takes
        stored = TIMES[SHAPE].run_seconds - TIMES[SHAPE].ranks_seconds
        assert waits(figures, 0)[0] >= ahead_completes - stored

    def test_each_replica_starts_what_it_has_claimed_when_it_is_free_itself(self) -> None:
        figures = outlook(leased=[busy("a", spent=9), claimed("a"), busy("b", spent=1), claimed("b")])
        starts = {
            owner: waits(figures, None, state=JobState.CLAIMED, lease_owner=owner)[0] for owner in ("a", "b", None)
        }
        assert starts == {
            "a": pytest.approx(1, abs=1.1),
            "b": pytest.approx(9, abs=1.1),
            None: pytest.approx(0, abs=1.1),
        }

    def test_one_behind_a_claimed_one_starts_when_that_leaves_the_ranks(self) -> None:
        figures = outlook(num_replicas=1, leased=[busy(spent=4), claimed()])
        before, _ = waits(figures, None, state=JobState.CLAIMED, lease_owner="a")
        assert waits(figures, 0)[0] == pytest.approx(before + 10 + 1, abs=1.1)

    def test_the_first_replica_that_is_free_takes_the_next_one(self) -> None:
        figures = outlook(leased=[busy("a", spent=8), busy("b", spent=0)])
        # one is free in 2 seconds, and takes the second clip after that in 12; the other one is free in 10
        assert [round(figures.wait_seconds(num_ahead) or 0) for num_ahead in range(5)] == [3, 11, 13, 21, 23]

    def test_what_a_replica_holds_that_takes_no_more_is_not_waited_for(self) -> None:
        figures = outlook(num_replicas=1, leased=[busy("drains", spent=0), busy("b", spent=8)])
        assert figures.wait_seconds(0) == pytest.approx(3, abs=0.1)

    @pytest.mark.parametrize("num_replicas", [1, 2, 7, 64])
    def test_of_two_neighbours_the_first_is_never_foreseen_later(self, num_replicas: int) -> None:
        leased = [busy(str(number), spent=number % 10) for number in range(num_replicas * 2 // 3)]
        figures = outlook(num_replicas=num_replicas, leased=leased)
        found = [figures.wait_seconds(num_ahead) or 0 for num_ahead in range(300)]
        assert found == sorted(found)
        # each round of all replicas takes a clip more
        assert [later - found[place] for place, later in enumerate(found[num_replicas:])] == pytest.approx(
            [10.0] * (300 - num_replicas)
        )

    def test_ten_thousand_ahead_are_as_far_as_they_are_one_by_one(self) -> None:
        figures = outlook(num_replicas=3, leased=[busy("a", spent=7)])
        assert figures.wait_seconds(9_999) == pytest.approx(1 + 3_333 * 10, abs=4)


class TestShapes:
    def measured(self, phases: dict[str, float]) -> ShapeTimes:
        return ShapeTimes.of(
            MeasuredTime(model="m", width=1, height=1, num_frames=1, num_jobs=3, run_p50=10, run_p80=12, phases=phases)
        )

    def test_ranks_are_free_before_the_clip_is_stored(self) -> None:
        phases = {"encoding": 1.0, "denoising": 4.0, "decoding": 2.5, "muxing": 1.5, "uploading": 1.0}
        assert self.measured(phases) == ShapeTimes(3, 12, pytest.approx(9.0))

    def test_without_phases_they_are_taken_to_the_end(self) -> None:
        assert self.measured({}) == ShapeTimes(3, 12, 12)
