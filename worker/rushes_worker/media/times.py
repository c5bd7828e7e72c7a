"""When the parts of a clip were at work, by the clock that all processes of a machine share."""

import threading
import time
from collections.abc import Iterable, Iterator
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

    def mark(self, what: str) -> None:
        """`what` happened just now."""
        now = time.monotonic()
        with self._lock:
            self._spans.append(Span(what, now, now))

    def in_order(self) -> tuple[Span, ...]:
        """Everything that has ended, by its beginning."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.began))


def timeline(spans: Iterable[Span]) -> str:
    """A table in Markdown, in milliseconds since the last unit came."""
    rows = sorted(spans, key=lambda span: span.began)
    zero = max((span.began for span in rows if span.what.startswith("unit ")), default=0.0)
    lines = ["| | from ms | to ms | ms |", "|---|---|---|---|"]
    for span in rows:
        began, ended = (span.began - zero) * 1e3, (span.ended - zero) * 1e3
        lines.append(f"| {span.what} | {began:.0f} | {ended:.0f} | {ended - began:.0f} |")
    return "\n".join(lines)
