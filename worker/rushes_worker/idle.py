"""How long a rank's device has nothing to do from one render to the next.

On CUDA by events on the stream that does the work, so that work which is queued ahead counts as what it is; elsewhere,
where nothing is queued, by the clock.
"""

import sys
import time
from typing import Any


class IdleClock:
    """Marks where work ends and where it is about to begin again. One render after another."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device.startswith("cuda")
        self._idle_since: Any = None
        self._gaps: list[tuple[Any, Any]] = []

    def work_is_queued(self) -> None:
        """All work so far is queued, and none is behind it."""
        self._idle_since = self._mark()

    def work_pauses(self) -> None:
        """As `work_is_queued`, within a render before whose beginning the device was measured."""
        if self._gaps:
            self._idle_since = self._mark()

    def work_begins(self) -> None:
        """More is about to be queued."""
        if self._idle_since is not None:
            self._gaps.append((self._idle_since, self._mark()))
            self._idle_since = None

    def forget(self) -> None:
        """What comes next is not measured against what came before."""
        self._idle_since = None
        self._gaps = []

    def take(self) -> float | None:
        """Seconds without work in the gaps since the last call, all of which the device has passed; None without a
        gap."""
        gaps, self._gaps = self._gaps, []
        return sum(self._between(*gap) for gap in gaps) if gaps else None

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.monotonic()
        event = sys.modules["torch"].cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._on_cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3
