"""How fast a campaign really goes, beside how fast its replicas should do it."""

import math
from dataclasses import dataclass, replace
from typing import Self

_OWN_CLIPS = 4
_CLIPS_PER_PLACE = 1
"""What is seen of a campaign counts as much as what was expected beforehand after `_OWN_CLIPS` clips, and so many more
for each of its places: less would take the way in which single clips make progress for the pace of all."""
_REMEMBERED = 10
"""Of so many times as much work as that the ratio is made in the end: what is longer ago is forgotten."""
_LEAST = 0.05
"""The ratio of a campaign of which nothing is done for hours: it is still not expected to take for ever."""
CHANGE = 1.1
"""By this factor the pace changes at most in `CHANGE_SECONDS`."""
CHANGE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of clips, as clips of their canvases and frame counts were measured, that are done in a second in which
    the campaign may run.

    The estimator is the usual pace, which is what the places that it has just now would do by the measured times, times
    a ratio, `seen / expected`. `seen` is the work that it did, running clips by their progress, and `expected` the work
    that the usual pace would have done in the same seconds; both begin with the same few clips, and both forget
    exponentially, by work and not by time.

    A ratio, because what changes often is known: replicas, shares, limits and measured times change the usual pace at
    once, and only what nobody knows beforehand, as more urgent work of others, has to be learnt. Those few clips that
    it begins with, because a rate of two or three clips is no rate: early it is the forecast from measured times, later
    what was seen. Exponentially, because what keeps a campaign back in the evening may be gone at night; by work,
    because then a slow campaign is judged by as many clips as a fast one. What is known changes by steps, as when a
    replica is started anew, so the pace follows by a factor of `CHANGE` in `CHANGE_SECONDS` at most.

    Args:
        prior: of `seen` and `expected`, the work that they began with.
    """

    value: float
    seen: float
    expected: float
    prior: float

    @classmethod
    def usual(cls, value: float, *, places: float, clip_seconds: float) -> Self:
        """As nothing was seen yet.

        Args:
            places: clips that run at once.
        """
        prior = (_OWN_CLIPS + _CLIPS_PER_PLACE * places) * clip_seconds
        return cls(value, prior, prior, prior)

    def after(self, seconds: float, *, done: float, usual: float, in_use: float = 1.0) -> Self:
        """After so many seconds in which it might have run.

        Args:
            done: work; below 0 when attempts were lost.
            usual: pace of all its places.
            in_use: the part of them for which there were clips.
        """
        expected = usual * in_use * seconds
        kept = math.exp(-expected / (_REMEMBERED * self.prior))
        followed = replace(self, seen=max(0.0, self.seen * kept + done), expected=self.expected * kept + expected)
        return followed.towards(usual, seconds)

    def towards(self, usual: float, seconds: float) -> Self:
        """The same ratio where the usual pace is now `usual`."""
        # after a day any pace may be reached, and more is no number
        most = CHANGE ** min(seconds / CHANGE_SECONDS, 1_000)
        wanted = usual * max(_LEAST, self.seen / self.expected)
        return replace(self, value=min(max(wanted, self.value / most), self.value * most))

    @property
    def guessed(self) -> float:
        """How much of the ratio was not seen, from 1 to 0."""
        return min(1.0, self.prior / self.expected)
