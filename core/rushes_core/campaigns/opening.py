"""Which jobs of which campaigns are opened next, and how many: arithmetic on what the feeder has read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.windows import STOP, Opening, opening_of
from rushes_core.errors import InvalidRequest
from rushes_core.measured import RunTimes, Shape

LOOK_AHEAD = 64
"""Jobs of one shape are put back to back among so many in the order of their lines: none is moved by more places."""
MIN_OPEN = 4
MAX_OPEN = 256
"""Jobs of a campaign that are open at once at most."""
BUDGET_REACHED = "budget_reached"
"""Code of the error of what is cancelled for the budget."""
FAILURES_REACHED = "max_failures_reached"
"""The same for failures."""
FIRST_ITEMS = 4
"""Of every campaign so many come before the others of its project, so that whoever sent it soon sees a result."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a campaign stands, read in one statement."""

    campaign: Campaign
    queued: int
    """Open or not."""
    in_progress: int
    ended: int
    """Jobs that completed or failed."""
    failed: int
    remaining_cost: int
    gpu_seconds: float
    has_used_its_day: bool
    """Its key may have no more GPU time today."""
    num_open: int
    """That may be claimed."""
    num_leased: int
    num_late: int
    """Open ones whose time to start has passed."""
    num_ahead: int
    """Claimed ones that may still be started."""

    @property
    def num_live(self) -> int:
        """Jobs that run, or may be claimed."""
        return self.num_open + self.num_leased

    @property
    def limits(self) -> object:
        """While this stays the same, what could not be opened before can hardly be opened now."""
        campaign = self.campaign
        asked = (campaign.budget_gpu_seconds, campaign.max_parallel, campaign.window, campaign.hold_reason)
        return (asked, self.queued, self.num_live, self.gpu_seconds)

    @property
    def num_waiting(self) -> int:
        return max(0, self.queued - self.num_open)

    @property
    def mean_cost(self) -> float:
        """Of the clips that are left."""
        return max(1.0, self.remaining_cost / max(1, self.queued + self.in_progress))

    @property
    def num_first(self) -> int:
        """How many of its first items have neither ended nor are open."""
        return max(0, FIRST_ITEMS - self.ended - self.num_live)

    @property
    def has_failed_too_often(self) -> bool:
        campaign = self.campaign
        if campaign.max_failures is None:
            return False
        failed = self.failed - min(campaign.failures_excused, self.failed)
        return failed >= max(1, campaign.max_failures)

    def has_used_its_budget(self, *, can_begin: bool) -> bool:
        """Whether clips wait of which none will start, because others have run. A budget that was too small for the
        first one from the beginning is not used up.

        Args:
            can_begin: something runs or is open, or one more clip could be.
        """
        limit = self.campaign.budget_gpu_seconds
        if limit is None or not self.queued:
            return False
        return self.gpu_seconds >= limit or (self.gpu_seconds > 0 and not can_begin)

    def is_over(self, now: datetime) -> bool:
        """Whether nothing of it is to start any more."""
        campaign = self.campaign
        return campaign.state != "in_progress" or (campaign.expires_at is not None and campaign.expires_at <= now)

    def is_to_go_on(self, now: datetime) -> bool:
        """Whether its proof has waited for approval for as long as was asked for."""
        campaign = self.campaign
        return (
            campaign.proof_state == "awaiting_approval"
            and campaign.proof_continue_seconds is not None
            and campaign.proof_done_at is not None
            and campaign.proof_done_at + timedelta(seconds=campaign.proof_continue_seconds) <= now
        )

    def reason_to_wait(self, now: datetime) -> str | None:
        """Why none of its jobs may be opened at `now`; None: some may, or its budget decides."""
        campaign = self.campaign
        if campaign.paused_at is not None:
            return "paused"
        if campaign.proof_state == "awaiting_approval" and not self.is_to_go_on(now):
            return "approval"
        if campaign.not_before is not None and campaign.not_before > now:
            return "not_before"
        if not self.opening(now).is_open:
            return "window"
        return "quota" if self.has_used_its_day else None

    def opening(self, now: datetime) -> Opening:
        """Of its window; one without a window is always open."""
        window = self.campaign.window
        try:
            return Opening(True, None) if window is None else opening_of(window, now)
        except InvalidRequest:
            # a time zone that this machine does not know: nobody can say when it is open
            return Opening(False, None)

    def stop_at(self, opening: Opening) -> datetime | None:
        """When what runs is given back."""
        window = self.campaign.window
        return opening.until if window is not None and window.get("on_close") == STOP else None

    def room(self, target: int) -> int:
        """How many more may be opened towards `target` open ones."""
        room = min(target, MAX_OPEN) - self.num_open
        campaign = self.campaign
        if campaign.max_parallel is not None:
            room = min(room, campaign.max_parallel - self.num_live)
        if campaign.proof_count is not None and campaign.proof_state == "running":
            room = min(room, campaign.proof_count - self.ended - self.num_live)
        return max(0, room)


def spent(standing: Standing) -> dict[str, Any]:
    """Why a campaign is cancelled whose budget is used up, as an entry of its `errors`."""
    limit, used = standing.campaign.budget_gpu_seconds, round(standing.gpu_seconds, 3)
    message = f"Of the campaign's budget of {limit:g} GPU seconds {used:g} are used: too little is left for this."
    return {"code": BUDGET_REACHED, "message": message, "param": "budget.gpu_seconds", "line": None}


def failed_too_often(standing: Standing) -> dict[str, Any]:
    """The same for one of which too many jobs failed."""
    message = (
        f"Of the campaign's jobs {standing.failed} failed, and its max_failures is {standing.campaign.max_failures}."
    )
    return {"code": FAILURES_REACHED, "message": message, "param": "max_failures", "line": None}


@dataclass(frozen=True, slots=True)
class Line:
    """A job that waits to be opened."""

    id: str
    line: int
    shape: Shape


@dataclass(slots=True)
class Budget:
    """GPU seconds that a campaign may still begin to use.

    Args:
        left: what is not used; None: there is no limit.
        num_live: jobs that use some of it already.
    """

    left: float | None
    gpus: int
    num_live: int

    def take(self, seconds: float | None) -> bool:
        """Begin a clip that runs so long; False: there is not enough left. One of which nothing is known goes alone."""
        if self.left is not None:
            if self.left <= 0 or (seconds is None and self.num_live) or (seconds or 0) * self.gpus > self.left:
                return False
            self.left -= (seconds or 0) * self.gpus
        self.num_live += 1
        return True


@dataclass(frozen=True, slots=True)
class Opened:
    """A job that is to be opened."""

    id: str
    start_by: datetime | None


@dataclass(frozen=True, slots=True)
class Choice:
    opened: list[Opened]
    is_spent: bool
    """The budget was too small for one more."""
    num_too_long: int
    """Jobs that were passed over because they could not finish before the window closes."""


def choose(
    lines: Sequence[Line],
    *,
    room: int,
    times: RunTimes,
    budget: Budget,
    closes: datetime | None,
    expires: datetime | None,
    now: datetime,
) -> Choice:
    """Which of the `lines` that wait, in their order, are opened.

    Args:
        room: how many.
        closes: when the window closes. A clip starts only if nine of ten of its shape would have finished by then.
        expires: when nothing starts any more.
    """
    opened: list[Opened] = []
    num_too_long = 0
    for line in back_to_back(lines):
        if len(opened) >= room:
            break
        run = times.run(line.shape)
        last = closes if closes is None or run is None else closes - timedelta(seconds=run.p90)
        if last is not None and last <= now:
            num_too_long += 1
            continue
        if not budget.take(None if run is None else run.p90):
            return Choice(opened, True, num_too_long)
        limits = [limit for limit in (last, expires) if limit is not None]
        opened.append(Opened(line.id, min(limits, default=None)))
    return Choice(opened, False, num_too_long)


def back_to_back(lines: Sequence[Line]) -> Iterator[Line]:
    """The lines in an order in which those of one shape follow each other, as far as `LOOK_AHEAD` allows."""
    for begin in range(0, len(lines), LOOK_AHEAD):
        ahead = lines[begin : begin + LOOK_AHEAD]
        for shape in dict.fromkeys(line.shape for line in ahead):
            yield from (line for line in ahead if line.shape == shape)


def num_ahead(room: int) -> int:
    """How many lines are looked at to open `room` of them."""
    return LOOK_AHEAD * -(-room // LOOK_AHEAD)


def lane_target(*, num_replicas: int, num_claimed: float) -> int:
    """How many jobs of one project and class are to be open, so that no replica waits until the next pass.

    Args:
        num_claimed: jobs of it that were claimed since the last pass.
    """
    return round(min(MAX_OPEN, max(MIN_OPEN, 2 * num_replicas, 3 * num_claimed)))


def shares(standings: Sequence[Standing], target: int) -> list[int]:
    """How many open jobs each of the campaigns of one project and class has: as much work each, and first items first.

    Jobs are claimed in the order in which they were opened, so open jobs are the campaign's share of the claims.
    """
    by_cost = [1 / standing.mean_cost for standing in standings]
    total = sum(by_cost)
    return [
        min(MAX_OPEN, max(1, round(target * part / total), standing.num_open + standing.num_first))
        for standing, part in zip(standings, by_cost, strict=True)
    ]
