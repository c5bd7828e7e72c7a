"""A campaign on replicas that follow a clock of their own, looked at every few seconds as the dispatcher does."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rushes_core.campaigns.forecast import Capacity, Ends, Means, Seen, Work, ends
from rushes_core.campaigns.windows import Opening, Window
from rushes_core.measured import Run, RunTimes, Shape, cost_of

BEGIN = datetime(2026, 12, 1, 22, 0, tzinfo=UTC)
LOOK_SECONDS = 5
_TOO_LONG = 400_000


@dataclass(frozen=True, slots=True)
class Look:
    """What was foreseen at one time."""

    at: float
    """Seconds since the campaign began."""
    done: float
    """Part of its clips that had ended."""
    may_run: bool
    p50: float | None
    """Seconds from then."""
    p90: float | None


@dataclass(slots=True)
class _Replica:
    left: float = 0.0
    whole: float = 1.0
    shape: Shape | None = None
    """Of the clip of the campaign that it runs; None: it is idle, or runs somebody else's."""


@dataclass
class Simulation:
    """
    Args:
        shapes: of its clips, in their order.
        runs: what was measured of clips of each shape, of which all are busy to their end.
        slower: by how much clips take longer than what was measured of them.
        urgent_share: of the time of each replica, what more urgent work takes, of which no forecast knows.
        rival: from when to when, in seconds, another project takes as much.
        down: the same for half of the replicas, which are not there.
        held: the same for somebody's pause.
    """

    shapes: Sequence[Shape]
    runs: dict[Shape, Run]
    seed: int
    num_replicas: int = 4
    slower: float = 1.0
    urgent_share: float = 0.0
    rival: tuple[float, float] = (0, 0)
    down: tuple[float, float] = (0, 0)
    held: tuple[float, float] = (0, 0)
    window: Window | None = None
    max_parallel: int | None = None
    samples_shapes: bool = True
    looks: list[Look] = field(default_factory=list[Look])
    took: float = 0.0

    def run(self) -> "Simulation":
        """To its end."""
        chance = random.Random(self.seed)
        waiting = list(reversed(self.shapes))
        replicas = [_Replica() for _ in range(self.num_replicas)]
        seen: Seen | None = None
        served = {"own": 0.0, "rival": 0.0}
        second = -1
        opening = Opening(True, None)
        while second < _TOO_LONG:
            second += 1
            now = BEGIN + timedelta(seconds=second)
            if self.window is not None and (opening.until is None or now >= opening.until):
                opening = self.window.at(now)
            up = self.num_replicas // 2 if _within(second, self.down) else self.num_replicas
            has_rival = _within(second, self.rival)
            may_run = opening.is_open and not _within(second, self.held)
            for number, replica in enumerate(replicas):
                if number >= up:
                    if replica.shape is not None:
                        waiting.append(replica.shape)
                    replica.shape, replica.left = None, 0.0
                    continue
                self._turn(replica, replicas, waiting, served, chance, may_run=may_run, has_rival=has_rival)
            running = [replica for replica in replicas if replica.shape is not None]
            num_left = len(waiting) + len(running)
            if not num_left:
                self.took = second + 1
                return self
            if not running and opening.until is not None and not opening.is_open:
                second = int((opening.until - BEGIN).total_seconds()) - 1
            elif second % LOOK_SECONDS == 0:
                share = 0.5 if has_rival else 1.0
                means = Means(RunTimes(self.runs), Capacity(up, share=share), self.max_parallel)
                work = self._work(waiting, running)
                looked = Seen(now, len(self.shapes) - num_left, 0, work.left, may_run)
                seen = looked.follow(seen, work, means)
                self._note(now, second, work, means, seen)
        raise AssertionError("it never ended")

    def _turn(
        self,
        replica: _Replica,
        replicas: Sequence[_Replica],
        waiting: list[Shape],
        served: dict[str, float],
        chance: random.Random,
        *,
        may_run: bool,
        has_rival: bool,
    ) -> None:
        if replica.left <= 0:
            replica.shape = None
            num_running = sum(one.shape is not None for one in replicas)
            has_place = self.max_parallel is None or num_running < self.max_parallel
            is_own = bool(waiting) and may_run and has_place
            urgent = chance.random() < self.urgent_share
            if urgent:
                replica.whole = replica.left = 20.0
            elif has_rival and (not is_own or served["rival"] <= served["own"]):
                replica.whole = replica.left = 20.0
                served["rival"] += 20.0
            elif is_own:
                replica.shape = waiting.pop()
                replica.whole = replica.left = self._seconds(replica.shape, chance)
                served["own"] += replica.whole
        replica.left -= 1.0

    def _seconds(self, shape: Shape, chance: random.Random) -> float:
        run = self.runs[shape]
        # nine of ten stay below p90, one in fifty is tried twice
        drawn = run.p50 * self.slower * chance.lognormvariate(0, 0.78 * (run.p90 / run.p50 - 1))
        return drawn * (2 if chance.random() < 0.02 else 1)

    def _work(self, waiting: Sequence[Shape], running: Sequence[_Replica]) -> Work:
        shapes = [*waiting, *(replica.shape for replica in running if replica.shape is not None)]
        done = sum(
            cost_of(replica.shape) * min(1.0, 1 - replica.left / replica.whole)
            for replica in running
            if replica.shape is not None
        )
        sampled = waiting[:: max(1, len(waiting) // 32)] if self.samples_shapes else ()
        counts = Counter(sampled)
        in_work = Counter(replica.shape for replica in running if replica.shape is not None)
        return Work(len(shapes), sum(map(cost_of, shapes)), done, counts, in_work)

    def _note(self, now: datetime, second: int, work: Work, means: Means, seen: Seen) -> None:
        found = ends(means.left(work, seen.pace), now=now, window=self.window) if seen.may_run else Ends()
        p50, p90 = (None if at is None else (at - now).total_seconds() for at in (found.p50, found.p90))
        self.looks.append(Look(float(second), 1 - work.num_jobs / len(self.shapes), seen.may_run, p50, p90))

    def at(self, part: float) -> Look:
        """The first look when so much was done."""
        return next(look for look in self.looks if look.done >= part and look.p50 is not None)


def coverage(simulations: Sequence[Simulation], part: float, of: Callable[[Look], float | None]) -> float:
    """Of how many what was foreseen when so much was done was late enough."""
    looks = [(one, one.at(part)) for one in simulations]
    return sum(look.at + (of(look) or 0.0) >= one.took for one, look in looks) / len(looks)


def _within(second: float, span: tuple[float, float]) -> bool:
    return span[0] <= second < span[1]
