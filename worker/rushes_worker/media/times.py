"""When the parts of a clip were at work, by the clock that all processes of a machine share."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something was at work from one time to another, in seconds of the monotonic clock."""

    what: str
    began: float
    ended: float


class Spans:
    """Notes spans; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @contextmanager
    def note(self, what: str) -> Iterator[None]:
        """`what` is what the body of the `with` statement does."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._spans.append(Span(what, began, time.monotonic()))

    def in_order(self) -> tuple[Span, ...]:
        """Everything that has ended, by its beginning."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.began))
