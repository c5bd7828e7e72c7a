"""Which jobs of campaigns are opened next, as arithmetic."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from rushes_core.campaigns.opening import (
    FIRST_ITEMS,
    LOOK_AHEAD,
    MAX_OPEN,
    MIN_OPEN,
    Budget,
    Choice,
    Line,
    Standing,
    back_to_back,
    choose,
    lane_target,
    num_ahead,
    shares,
)
from rushes_core.campaigns.tables import Campaign
from rushes_core.measured import Run, RunTimes

NOW = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
SMALL, LARGE = (480, 480, 107), (832, 480, 141)
TIMES = RunTimes({SMALL: Run(8, 10, 8, 50), LARGE: Run(50, 60, 50, 50)})


def lines(shapes: list[tuple[int, int, int]]) -> list[Line]:
    return [Line(str(number), number, shape) for number, shape in enumerate(shapes)]


def standing(**values: int) -> Standing:
    numbers = dict.fromkeys(Standing.__dataclass_fields__, 0) | {"queued": 100, "remaining_cost": 100} | values
    del numbers["campaign"]
    return Standing(Campaign(), **numbers)


def chosen(waiting: list[Line], *, room: int = 10, budget: float | None = None, closes: int | None = None) -> Choice:
    return choose(
        waiting,
        room=room,
        times=TIMES,
        budget=Budget(budget, 1, 0),
        closes=None if closes is None else NOW + timedelta(seconds=closes),
        expires=None,
        now=NOW,
    )


class TestOrder:
    @given(
        shapes=st.lists(st.sampled_from([SMALL, LARGE, (768, 768, 107)]), max_size=400),
        rooms=st.lists(st.integers(1, 2 * LOOK_AHEAD), min_size=1),
    )
    def test_no_line_is_moved_by_more_places_than_are_looked_ahead(
        self, shapes: list[tuple[int, int, int]], rooms: list[int]
    ) -> None:
        waiting = lines(shapes)
        opened: list[int] = []
        while waiting:
            room = rooms[len(opened) % len(rooms)]
            for line in list(back_to_back(waiting[: num_ahead(room)]))[:room]:
                opened.append(line.line)
                waiting.remove(line)
        assert sorted(opened) == list(range(len(shapes)))
        assert all(abs(place - line) < LOOK_AHEAD for place, line in enumerate(opened))

    def test_lines_of_one_shape_follow_each_other(self) -> None:
        order = [line.shape for line in back_to_back(lines([SMALL, LARGE] * (LOOK_AHEAD // 2)))]
        assert order == [SMALL] * (LOOK_AHEAD // 2) + [LARGE] * (LOOK_AHEAD // 2)


class TestChoice:
    def test_what_could_not_finish_before_the_window_closes_is_passed_over(self) -> None:
        choice = chosen(lines([LARGE, SMALL]), closes=30)
        assert [(one.id, one.start_by) for one in choice.opened] == [("1", NOW + timedelta(seconds=20))]
        assert choice.num_too_long == 1

    def test_a_budget_is_never_exceeded_by_what_nine_of_ten_take(self) -> None:
        choice = chosen(lines([SMALL] * 5), budget=35)
        assert (len(choice.opened), choice.is_spent) == (3, True)

    @given(left=st.floats(0, 1_000), shapes=st.lists(st.sampled_from([SMALL, LARGE])))
    def test_whatever_the_lines_are(self, left: float, shapes: list[tuple[int, int, int]]) -> None:
        waiting = lines(shapes)
        spent = sum(TIMES.shapes[waiting[int(one.id)].shape].p90 for one in chosen(waiting, budget=left).opened)
        assert spent <= left


class TestNumbers:
    def test_a_lane_is_bounded_on_both_sides(self) -> None:
        assert lane_target(num_replicas=0, num_claimed=0) == MIN_OPEN
        assert lane_target(num_replicas=10, num_claimed=2) == 20
        assert lane_target(num_replicas=10_000, num_claimed=10_000) == MAX_OPEN

    def test_campaigns_share_a_lane_by_work_and_each_has_something(self) -> None:
        started = {"ended": 100, "queued": 100}
        cheap, dear = standing(**started, remaining_cost=100), standing(**started, remaining_cost=300)
        assert shares([cheap, dear], 40) == [30, 10]
        assert shares([cheap, standing(**started, remaining_cost=10**9)], 40) == [40, 1]

    def test_a_new_campaign_has_its_first_items_open(self) -> None:
        assert shares([standing(ended=100)] * 20 + [standing()], 20)[-1] == FIRST_ITEMS
