"""When a campaign will be done, from what clips took lately, with whom it shares the replicas, and how fast it goes.

There is no forecast before enough clips were measured, while nothing of the campaign may run, or while no replica is
up: a figure that somebody would plan by is worse than none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property

from rushes_core.campaigns.pace import Pace
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.windows import Window
from rushes_core.errors import InvalidRequest
from rushes_core.measured import RunTimes, Shape

MIN_MEASURED = 20
"""Completed clips before which nothing is said."""
WATCHED_SECONDS = 60.0
"""Between two looks at a campaign; what happened in a longer time is not known well enough to learn from it."""
HELD = ("paused", "approval", "budget", "quota")
"""Reasons to wait of which nobody knows how long they last."""
_NINE_OF_TEN = 1.28
"""Standard deviations that nine of ten stay within, on the one side."""
_UNSEEN = 0.08
"""What nobody can know of the hours ahead, replicas that come and go or other projects' work: part of the time that is
left, as a standard deviation."""
_GUESSED = 0.2
"""The same of the pace as long as nothing was seen of it."""
_UNMEASURED = 0.3
"""The same of clips like which none was measured."""
_NUM_TRIED_ONCE = 4
"""Of so many clips none is tried a second time, more often than not."""
_LONGEST = timedelta(days=36_500).total_seconds()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a campaign may count on.

    Args:
        num_replicas: that take jobs of its model.
        gpus: of each, on average.
        share: of them, from 0 to 1.
    """

    num_replicas: int
    gpus: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is not done of a campaign.

    Args:
        num_jobs: that have not ended.
        cost: their frames times pixels / 10,000, as `campaign_counts.remaining_cost`.
        done: the part of that which those that run have done.
        shapes: how often each is among some of its clips that wait; empty: as among those that were measured.
        running: the same of those that run.
    """

    num_jobs: int
    cost: float
    done: float = 0.0
    shapes: Mapping[Shape, int] = field(default_factory=dict[Shape, int])
    running: Mapping[Shape, int] = field(default_factory=dict[Shape, int])

    @property
    def left(self) -> float:
        return max(0.0, self.cost - self.done)


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a campaign, in seconds in which it may run. All of it is null where nothing can be said."""

    gpu_seconds: float | None = None
    """On one replica after another, times the GPUs of each."""
    p50: float | None = None
    """What half of such campaigns need."""
    p90: float | None = None
    """What nine of ten need."""
    basis: str | None = None


@dataclass(frozen=True)
class Means:
    """What a campaign is rendered with.

    Args:
        max_parallel: its clips that run at once, at most.
    """

    times: RunTimes
    capacity: Capacity
    max_parallel: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough clips were measured to say anything."""
        return self.times.seconds_per_cost is not None and self.times.num_jobs >= MIN_MEASURED

    @cached_property
    def places(self) -> float:
        """Its clips that run at once."""
        return min(self.capacity.num_replicas * self.capacity.share, self.max_parallel or math.inf)

    def busy(self, shapes: Mapping[Shape, int]) -> float:
        """Of the seconds that a clip runs, those after which another one may begin in its place."""
        is_limited = self.max_parallel is not None and self.places == self.max_parallel
        return 1.0 if is_limited else self.times.mixed(shapes).busy_share

    def in_use(self, num_jobs: int) -> float:
        """The part of its places for which so many jobs suffice."""
        return min(1.0, num_jobs / self.places) if self.places else 0.0

    def seconds(self, cost: float, shapes: Mapping[Shape, int]) -> float:
        """Of clips of such shapes, one after another."""
        return cost * (self.times.mixed(shapes).seconds_per_cost or 0.0)

    def left(self, work: Work, pace: Pace | None = None) -> Left:
        """How long it takes to do `work`, at the usual pace unless another one is known."""
        if work.num_jobs <= 0 or not self.is_known:
            return Left()
        shapes = work.shapes or work.running
        times = self.times.mixed(shapes)
        basis = f"last {self.times.num_jobs} clips"
        seconds = self.seconds(work.left, shapes)
        gpu_seconds = round(seconds * self.capacity.gpus, 3)
        if self.places <= 0:
            return Left(gpu_seconds=gpu_seconds, basis=basis)
        clip = self.seconds(work.cost, shapes) / work.num_jobs
        parallel = min(self.places, work.num_jobs)
        busy = self.busy(shapes)
        speed = (self.places / busy if pace is None else pace.value) * self.in_use(work.num_jobs)
        varies = clip * (times.spread - 1) / _NINE_OF_TEN
        # the places do not fall idle at the same time: of the last clips the latest is waited for, and it is stored
        tail = clip * (busy * max(0.0, parallel - 1) / (2 * parallel) + 1 - busy)
        tail += varies * math.sqrt(math.log(max(1.0, parallel)))
        usual = seconds / speed + tail
        # single clips even out, errors of the measurement and of the pace do not
        doubts = (
            _UNSEEN,
            _GUESSED * math.sqrt(1.0 if pace is None else pace.guessed),
            (times.spread - 1) / _NINE_OF_TEN / math.sqrt(self.times.num_jobs),
            _UNMEASURED * self._unmeasured(work.shapes),
        )
        late = usual * (1 + _NINE_OF_TEN * math.hypot(*doubts))
        late += _NINE_OF_TEN * varies * (math.sqrt(work.num_jobs) / parallel + 1)
        # of many clips that run last, one is tried a second time
        late += clip * parallel / (parallel + _NUM_TRIED_ONCE)
        return Left(gpu_seconds, usual, late, basis)

    def _unmeasured(self, shapes: Mapping[Shape, int]) -> float:
        """The part of the clips that are of shapes of which none was measured."""
        unknown = sum(count for shape, count in shapes.items() if shape not in self.times.shapes)
        return unknown / max(1, sum(shapes.values()))


@dataclass(frozen=True, slots=True)
class Seen:
    """A campaign as it was looked at.

    Args:
        num_ended: its jobs that had ended.
        num_dropped: of those, the ones that nobody ran to an end: cancelled or expired.
        left: cost of what was not done, as `Work.left`.
        may_run: whether nothing held it.
        pace: None: nobody would have run anything yet.
    """

    at: datetime
    num_ended: int
    num_dropped: int
    left: float
    may_run: bool
    pace: Pace | None = None

    def follow(self, before: "Seen | None", work: Work, means: Means) -> "Seen":
        """The same with the pace that it has now.

        What happened since `before` counts if it was watched, and if work was neither added nor dropped.
        """
        shapes = work.running or work.shapes
        known = None if before is None else before.pace
        if not means.is_known or not means.places or not work.num_jobs:
            return replace(self, pace=known)
        usual = means.places / means.busy(shapes)
        if before is None or known is None:
            clip_seconds = means.seconds(work.cost / work.num_jobs, work.shapes)
            return replace(self, pace=Pace.usual(usual, places=means.places, clip_seconds=clip_seconds))
        seconds = (self.at - before.at).total_seconds()
        counts = (
            self.may_run
            and before.may_run
            and 0 < seconds <= WATCHED_SECONDS
            and self.num_ended >= before.num_ended
            and self.num_dropped == before.num_dropped
        )
        if not counts:
            return replace(self, pace=known.towards(usual, max(0.0, seconds)))
        done = means.seconds(before.left - self.left, shapes)
        return replace(self, pace=known.after(seconds, done=done, usual=usual, in_use=means.in_use(work.num_jobs)))


@dataclass(frozen=True, slots=True)
class Ends:
    """When a campaign is done. All of it is null where nobody knows when it may go on."""

    p50: datetime | None = None
    p90: datetime | None = None
    fits_window: bool | None = None
    """Whether it is done, in nine of ten cases, before its window closes next; also null without a window."""


def ends(
    left: Left,
    *,
    now: datetime,
    made_at: datetime | None = None,
    not_before: datetime | None = None,
    expires_at: datetime | None = None,
    window: Window | None = None,
) -> Ends:
    """When that is over which is left.

    Args:
        made_at: when so much was left, if not `now`.
        expires_at: when nothing more starts.
    """
    if left.p50 is None or left.p90 is None:
        return Ends()
    begins = made_at or now
    if not_before is not None:
        begins = max(begins, not_before)
    if expires_at is not None and expires_at <= begins:
        return Ends()
    found: list[datetime | None] = []
    for seconds in (left.p50, left.p90):
        at = _after(begins, seconds, window)
        # what has not started by then never does
        at = expires_at if expires_at is not None and (at is None or at > expires_at) else at
        found.append(None if at is None else max(at, now))
    p50, p90 = found
    return Ends(p50, p90, _fits(begins, p90, window))


def _after(begins: datetime, seconds: float, window: Window | None) -> datetime | None:
    if window is not None:
        return window.after_open_seconds(begins, min(seconds, _LONGEST))
    return begins + timedelta(seconds=min(seconds, _LONGEST))


def _fits(begins: datetime, ends: datetime | None, window: Window | None) -> bool | None:
    if window is None:
        return None
    opening = window.at(begins)
    if not opening.is_open:
        if opening.until is None:
            return False
        opening = window.at(opening.until)
    return ends is not None and (opening.until is None or ends <= opening.until)


def ends_of(
    campaign: Campaign, left: Left, *, used_gpu_seconds: float, now: datetime, made_at: datetime | None = None
) -> Ends:
    """Of a campaign as it stands: what it was asked to keep to is kept to."""
    if campaign.paused_at is not None or campaign.hold_reason in HELD:
        return Ends()
    budget = campaign.budget_gpu_seconds
    if budget is not None and used_gpu_seconds + (left.gpu_seconds or 0.0) > budget:
        # it will be held, or cancelled, before it is done
        return Ends()
    try:
        window = None if campaign.window is None else Window.parse(campaign.window)
    except InvalidRequest:
        # a time zone that this machine does not know
        return Ends()
    return ends(
        left,
        now=now,
        made_at=made_at,
        not_before=campaign.not_before,
        expires_at=campaign.expires_at,
        window=window,
    )
