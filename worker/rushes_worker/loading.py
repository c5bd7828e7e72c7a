"""What a rank tells while it loads: its stage, how far it is, how fast, and how long it will still take."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rushes_worker.commands import Loading

_TELL_SECONDS = 0.5
_RATE_SECONDS = 5.0
"""What counts in a rate."""


class LoadWatcher:
    """Implements `pipeline.base.LoadWatch`.

    Args:
        tell: called with every new stage, and about twice a second while weights are read.
    """

    def __init__(self, tell: Callable[[Loading], None]) -> None:
        self._tell = tell
        self._stage = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._read: deque[tuple[float, int, int]] = deque()
        self._told_at = float("-inf")
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """What each stage took, in order."""
        return tuple((name, round(seconds, 3)) for name, seconds in self._seconds.items())

    def expect(self, total_bytes: int) -> None:
        """All weights together are so large."""
        self._total_bytes = total_bytes

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is done within is stage `name`."""
        self._stage = name
        self._report()
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def add(self, done_bytes: int, read_bytes: int) -> None:
        """So much more of the weights is dealt with, of which this rank read so much."""
        now = time.monotonic()
        self._done_bytes += done_bytes
        self._read.append((now, done_bytes, read_bytes))
        while self._read[0][0] < now - _RATE_SECONDS:
            self._read.popleft()
        if now - self._told_at >= _TELL_SECONDS:
            self._report()

    def _report(self) -> None:
        now = self._told_at = time.monotonic()
        rate = left = None
        if len(self._read) > 1:
            # what was read first was begun before the first mark
            seconds = now - self._read[0][0]
            done, read = (sum(entry[field] for entry in self._read) - self._read[0][field] for field in (1, 2))
            if seconds > 0 and done > 0:
                rate = read / seconds
                left = (self._total_bytes - self._done_bytes) * seconds / done
        self._tell(Loading(self._stage, self._done_bytes, self._total_bytes, rate, left))
