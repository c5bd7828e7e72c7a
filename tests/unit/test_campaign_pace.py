"""What is foreseen of campaigns that run on a clock of their own: late enough, never in the past, and steady."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from rushes_core.campaigns.forecast import WATCHED_SECONDS, Capacity, Means, Seen, Work
from rushes_core.campaigns.pace import CHANGE, CHANGE_SECONDS, Pace
from rushes_core.campaigns.windows import Window
from rushes_core.measured import Run, RunTimes, cost_of
from support.campaign_simulation import LOOK_SECONDS, Simulation, coverage

SHORT, LONG = (480, 480, 107), (832, 480, 141)
# the long ones take more than in proportion
RUNS = {SHORT: Run(20, 24, 20, 50), LONG: Run(60, 75, 60, 50)}
NUM_SEEDS = 30
NOW = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
TEN_MINUTES = Window.parse({"timezone": "UTC", "start": "22:00", "end": "22:10"})


def off(chance: random.Random) -> float:
    """How much longer clips take than those that were measured."""
    return chance.lognormvariate(0, 0.08)


def span(chance: random.Random, latest: float, seconds: float) -> tuple[float, float]:
    begins = chance.uniform(0, latest)
    return begins, begins + seconds


Kind = Callable[[random.Random], dict[str, Any]]
FORESEEABLE: dict[str, Kind] = {
    "alone": lambda chance: {"slower": off(chance)},
    "one replica": lambda chance: {"shapes": [SHORT] * 30, "num_replicas": 1, "slower": off(chance)},
    "many replicas": lambda chance: {"shapes": [SHORT] * 600, "num_replicas": 32, "slower": off(chance)},
    "short clips first": lambda chance: {"shapes": [SHORT] * 100 + [LONG] * 60, "slower": off(chance)},
    "two at once": lambda chance: {"shapes": [SHORT] * 60, "num_replicas": 8, "max_parallel": 2, "slower": off(chance)},
    "replicas that come back": lambda chance: {"down": span(chance, 900, chance.uniform(30, 200))},
    "ten minutes a night": lambda chance: {"shapes": [SHORT] * 250, "slower": off(chance), "window": TEN_MINUTES},
}
SURPRISING: dict[str, Kind] = {
    "much urgent work": lambda chance: {"urgent_share": chance.uniform(0.2, 0.4)},
    "another project for a while": lambda chance: {"rival": (0, chance.uniform(300, 700))},
    "half of the replicas for long": lambda chance: {"down": span(chance, 100, 400)},
    "a pause": lambda chance: {"held": span(chance, 400, 600)},
}
KINDS = FORESEEABLE | SURPRISING


@cache
def simulated(kind: str) -> list[Simulation]:
    """Campaigns of a kind, each by a seed of its own."""
    found: list[Simulation] = []
    for seed in range(NUM_SEEDS):
        values = {"shapes": [SHORT] * 200, "runs": RUNS} | KINDS[kind](random.Random(seed))
        found.append(Simulation(seed=seed, **values).run())
    return found


class TestHonest:
    @pytest.mark.parametrize("done", [0.0, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize("kind", FORESEEABLE)
    def test_nine_of_ten_are_done_by_the_latest_from_the_first_look_on(self, kind: str, done: float) -> None:
        assert coverage(simulated(kind), done, lambda look: look.p90) >= 0.9

    @pytest.mark.parametrize("kind", SURPRISING)
    def test_what_nobody_knew_is_learnt(self, kind: str) -> None:
        assert coverage(simulated(kind), 0.6, lambda look: look.p90) >= 0.9

    @pytest.mark.parametrize("kind", FORESEEABLE)
    def test_the_middle_is_nowhere_far_off_and_the_latest_no_excuse(self, kind: str) -> None:
        for done in (0.0, 0.1, 0.5):
            looks = [(one.at(done), one.took) for one in simulated(kind)]
            assert abs(mean((took - at.at) / (at.p50 or 0.0) - 1 for at, took in looks)) < 0.15
            assert mean((at.p90 or 0.0) / (at.p50 or 0.0) for at, _ in looks) < 1.5


class TestSteady:
    # where the rest of a clip needs another night, the end moves by a day
    @pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"ten minutes a night"}))
    def test_the_end_moves_by_a_tenth_of_what_is_left_and_a_part_of_a_clip_at_most(self, kind: str) -> None:
        clip = RUNS[LONG if kind == "short clips first" else SHORT].p90
        for one in simulated(kind):
            for before, after in pairwise(one.looks):
                if before.p50 is None or after.p50 is None:
                    continue
                moved = abs(after.at + after.p50 - before.at - before.p50)
                assert moved <= (CHANGE - 1) * before.p50 + clip

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_never_in_the_past(self, kind: str) -> None:
        for one in simulated(kind):
            assert all(look.p50 is None or 0 <= look.p50 <= (look.p90 or 0.0) for look in one.looks)

    def test_it_is_null_while_nobody_knows(self) -> None:
        looks = [look for one in simulated("a pause") for look in one.looks]
        assert [look.p50 is None for look in looks] == [not look.may_run for look in looks]
        assert any(not look.may_run for look in looks)


def work(num_jobs: int = 100) -> Work:
    return Work(num_jobs, num_jobs * cost_of(SHORT), shapes={SHORT: 32})


def means(num_replicas: int = 4, **values: Any) -> Means:
    return Means(RunTimes(RUNS), Capacity(num_replicas, **values))


def looked(seconds: float = 0.0, *, left: Work, num_ended: int = 0, **values: Any) -> Seen:
    fields: dict[str, Any] = {"num_dropped": 0, "may_run": True} | values
    return Seen(NOW + timedelta(seconds=seconds), num_ended, left=left.left, **fields)


def ratio(seen: Seen) -> float:
    assert seen.pace is not None
    return seen.pace.seen / seen.pace.expected


class TestWhatCounts:
    def test_the_first_look_foresees_what_was_measured(self) -> None:
        first = looked(left=work()).follow(None, work(), means())
        assert first.pace is not None
        assert (first.pace.value, ratio(first), first.pace.guessed) == (4, 1, 1)

    def test_what_is_done_slower_than_foreseen_slows_it(self) -> None:
        first = looked(left=work()).follow(None, work(), means())
        # eight clips in twice the time that they should take
        slow = looked(60, left=work(94), num_ended=6).follow(first, work(94), means())
        assert ratio(slow) == pytest.approx((8 + 6) / (8 + 12), rel=0.05)
        assert slow.pace is not None
        assert slow.pace.value == pytest.approx(4 * ratio(slow))
        assert slow.pace.guessed == pytest.approx(8 / 20, rel=0.1)

    @pytest.mark.parametrize(
        "then",
        [
            looked(30, left=work(99), num_ended=1, may_run=False),
            looked(30, left=work(60), num_ended=40, num_dropped=39),
            looked(WATCHED_SECONDS + 1, left=work(99), num_ended=1),
        ],
        ids=["held", "cancelled by somebody", "not watched"],
    )
    def test_what_says_nothing_of_its_pace_is_not_learnt_from(self, then: Seen) -> None:
        first = looked(left=work()).follow(None, work(), means())
        after = then.follow(first, work(60), means())
        assert ratio(after) == 1

    def test_what_happened_while_it_was_held_is_not_counted_afterwards(self) -> None:
        held = looked(left=work(), may_run=False).follow(None, work(), means())
        assert ratio(looked(30, left=work(), num_ended=0).follow(held, work(), means())) == 1

    def test_a_retry_is_no_step_back(self) -> None:
        first = looked(left=work(50), num_ended=50).follow(None, work(50), means())
        assert ratio(looked(5, left=work(90), num_ended=10).follow(first, work(90), means())) == 1

    def test_lost_attempts_are(self) -> None:
        first = looked(left=work(50), num_ended=50).follow(None, work(50), means())
        assert ratio(looked(5, left=work(52), num_ended=50).follow(first, work(50), means())) < 1

    def test_places_that_too_few_clips_are_left_for_do_nothing_wrong(self) -> None:
        first = looked(left=work(1)).follow(None, work(1), means())
        half = replace(work(1), done=cost_of(SHORT) / 4)
        assert ratio(looked(5, left=half).follow(first, half, means())) == pytest.approx(1)

    def test_without_replicas_it_keeps_what_it_knew(self) -> None:
        first = looked(left=work()).follow(None, work(), means())
        assert looked(5, left=work()).follow(first, work(), means(0)).pace == first.pace
        assert looked(5, left=work()).follow(None, work(), means(0)).pace is None

    def test_what_is_known_to_change_is_followed_by_steps(self) -> None:
        pace, seconds = Pace.usual(8, places=8, clip_seconds=20), 0
        while pace.value > 1:
            pace, last = pace.towards(1, LOOK_SECONDS), pace.value
            assert last / pace.value <= CHANGE + 1e-9
            seconds += LOOK_SECONDS
        assert seconds == pytest.approx(110, abs=CHANGE_SECONDS)

    def test_a_day_later_it_may_have_any_pace(self) -> None:
        assert Pace.usual(8, places=8, clip_seconds=20).towards(1_000, 86_400).value == 1_000

    def test_what_is_long_ago_is_forgotten(self) -> None:
        pace = Pace.usual(4, places=4, clip_seconds=20)
        for _ in range(500):
            pace = pace.after(5, done=10, usual=4)
        slow = pace.value
        for _ in range(1_000):
            pace = pace.after(5, done=20, usual=4)
        assert slow == pytest.approx(2, rel=0.02)
        assert pace.value == pytest.approx(4, rel=0.02)
