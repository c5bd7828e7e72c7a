"""Ctrl-C, SIGTERM and SIGHUP end a command once and in order; none of them can cut its cleaning up short."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rushes_core.parent import signal_with_parent
from rushes_core.signals import ENDING, heeded


class Interrupted(BaseException):
    """The first ending signal; not an Exception, so that no handler of errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first ending signal, and ignore later ones.

    SIGHUP stays ignored where it was (`nohup`).
    """

    def on_signal(signum: int, frame: FrameType | None) -> None:
        for number in handled:
            signal.signal(number, _ignore)
        raise Interrupted(signum)

    handled = heeded()
    previous = {number: signal.signal(number, on_signal) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back ending signals inside the block; the first one takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = {number: signal.signal(number, lambda signum, frame: pending.append(signum)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one ends, so that killing `make up` ends what it runs."""
    signal_with_parent(signal.SIGTERM)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """A handler rather than SIG_IGN, which children would inherit."""
