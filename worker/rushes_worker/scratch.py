"""The directory in which a replica keeps raw frames and unfinished clips."""

import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from rushes_core.log import get_logger

log = get_logger(__name__)

_PREFIX = "rushes-replica-"
_MIN_FREE_BYTES = 32 * 1024 * 1024
"""What a worker starts with; what a job needs is a setting."""


class Scratch:
    """A directory of this replica alone below `parent`, locked while the replica lives.

    Directories of replicas that are gone without having tidied up are removed first.

    Args:
        free_bytes: what a job needs free to be begun.
    """

    def __init__(self, parent: Path, *, free_bytes: int = 0) -> None:
        self._free_bytes = free_bytes
        self._was_full = False
        self._looking = threading.Lock()
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # the sweep of another replica may have come between making and locking
            with suppress(BlockingIOError, FileNotFoundError):
                self._lock = _lock(self.path)
                if self.path.exists():
                    return
                os.close(self._lock)

    @property
    def has_room(self) -> bool:
        """Whether a job may be begun. When that changes, the log says so. Any thread may ask."""
        free = shutil.disk_usage(self.path).free
        is_full = free < self._free_bytes
        with self._looking:
            has_changed, self._was_full = is_full != self._was_full, is_full
        if has_changed and is_full:
            log.error("scratch_full", path=str(self.path), free_bytes=free, needed_bytes=self._free_bytes)
        elif has_changed:
            log.info("scratch_has_room", free_bytes=free)
        return not is_full

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def check_directory(parent: Path) -> None:
    """Raise `ValueError` unless a replica could make its directory below `parent`, with room for a short clip."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent), tempfile.TemporaryDirectory(dir=parent) as probe:
            _check_lock(parent, Path(probe))
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise ValueError(f"RUSHES_SCRATCH={parent} cannot be written: {error.strerror}") from error
    if free < _MIN_FREE_BYTES:
        raise ValueError(f"RUSHES_SCRATCH={parent} has {free} bytes free, needed are at least {_MIN_FREE_BYTES}")


def _check_lock(parent: Path, probe: Path) -> None:
    try:
        os.close(_lock(probe))
    except OSError as error:
        raise ValueError(f"RUSHES_SCRATCH={parent} is on a file system without locks: {error.strerror}") from error


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # it is held, gone or another user's
        with suppress(OSError):
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of directory `path`.

    Raises:
        BlockingIOError: another one holds it.
        OSError: it cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
