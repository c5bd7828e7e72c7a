"""Whether a replica was asked to stop, and how long its running job may still take."""

import signal
import time
from collections.abc import Callable
from types import FrameType

from rushes_core.signals import ENDING, heeded


class Stopping:
    """Set once by a signal; asking again changes nothing."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._grace_ends: float | None = None

    def request(self) -> None:
        """Begin the grace period. Safe in a signal handler."""
        if self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._grace_seconds

    @property
    def requested(self) -> bool:
        return self._grace_ends is not None

    @property
    def grace_is_over(self) -> bool:
        return self._grace_ends is not None and time.monotonic() >= self._grace_ends

    @property
    def seconds_left(self) -> float:
        """Of the grace period; infinite while nobody asked."""
        return float("inf") if self._grace_ends is None else max(0.0, self._grace_ends - time.monotonic())


def on_stop(handle: Callable[[int, FrameType | None], None]) -> None:
    """Have `handle` called at every signal that asks this process to stop; at a hangup only where that is not ignored,
    as it is under nohup."""
    for number in heeded():
        signal.signal(number, handle)


def ignore_signals() -> None:
    """Everything has ended: who asks again while the interpreter leaves does not change the exit status."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
