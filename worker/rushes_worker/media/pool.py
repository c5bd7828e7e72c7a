"""The media processes of a replica: two clips may be in them at a time."""

import threading
from collections.abc import Callable

from rushes_worker.media.process import MediaProcess

SIZE = 2
"""One clip is finished while the next one is rendered. With a third one the encoder would fall behind for good, and raw
frames fill the disk: then the ranks wait."""


class MediaPool:
    """Lends media processes. One that is idle is kept; the second one is started when it is needed.

    What is left of a clip after its last frame takes the CPU for seconds: the last units' encoding, and the check of
    the whole file. A second process lets the ranks go on meanwhile.

    Args:
        start: makes a process; called in the main thread only.
    """

    def __init__(self, start: Callable[[], MediaProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._idle = [start()]
        self._num_lent = 0

    @property
    def available(self) -> bool:
        """Whether there is one to lend."""
        return self._num_lent < SIZE

    def lend(self) -> MediaProcess:
        """A process without a clip. Call it in the main thread."""
        with self._lock:
            self._num_lent += 1
            process = self._idle.pop() if self._idle else None
        return process or self._start()

    def take_back(self, process: MediaProcess) -> None:
        """Abort what `process` still has of a clip, and keep it or end it. Any thread."""
        process.abort()
        with self._lock:
            self._num_lent -= 1
            keep = not self._idle
            if keep:
                self._idle.append(process)
        if not keep:
            process.close()

    def close(self) -> None:
        """End every process that is not lent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
