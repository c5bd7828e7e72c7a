"""Attempts that need no ranks any more: while others are rendered, their clips are finished and wait for the store."""

import contextvars
import threading
from collections.abc import Callable

from rushes_core.log import get_logger

log = get_logger(__name__)


class Spool:
    """Ends each attempt in a thread of its own and knows how many there are, and how large their clips.

    Args:
        max_jobs: jobs that the replica may hold at once, the one on the ranks included.
        max_bytes: finished clips on disk from which on no further job is claimed.
        on_change: called from a thread when an attempt has ended.
    """

    def __init__(self, *, max_jobs: int, max_bytes: int, on_change: Callable[[], None]) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._lock = threading.Lock()
        self._bytes: dict[int, int] = {}
        self._threads: set[threading.Thread] = set()

    def end(self, fence: int, action: Callable[[], None]) -> None:
        """Run `action`, which ends the attempt with this fence, in a thread."""
        with self._lock:
            self._bytes[fence] = 0
        # log records of the thread name the job
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run, fence, action), name=f"attempt-{fence}")
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def weigh(self, fence: int, num_bytes: int) -> None:
        """The clip of this attempt is finished and so large."""
        with self._lock:
            if fence in self._bytes:
                self._bytes[fence] = num_bytes

    def has_room(self, *, on_ranks: int) -> bool:
        """Whether one more job may be claimed, while `on_ranks` are being rendered."""
        with self._lock:
            return len(self._bytes) + on_ranks < self._max_jobs and sum(self._bytes.values()) <= self._max_bytes

    def close(self) -> None:
        """Wait until every attempt has ended."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self, fence: int, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # the lease is not renewed any more: the job gets another attempt when it has run out
            log.exception("attempt_failed")
        finally:
            with self._lock:
                del self._bytes[fence]
                self._threads.discard(threading.current_thread())
            self._on_change()
