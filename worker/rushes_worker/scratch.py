"""The directory in which a replica keeps raw frames and unfinished clips."""

import fcntl
import os
import shutil
import tempfile
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
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            lock = _lock(self.path)
            # the sweep of another replica may have come between making and locking
            if lock is not None and self.path.exists():
                self._lock = lock
                return

    @property
    def has_room(self) -> bool:
        """Whether a job may be begun. When that changes, the log says so."""
        free = shutil.disk_usage(self.path).free
        is_full = free < self._free_bytes
        if is_full and not self._was_full:
            log.error("scratch_full", path=str(self.path), free_bytes=free, needed_bytes=self._free_bytes)
        elif self._was_full and not is_full:
            log.info("scratch_has_room", free_bytes=free)
        self._was_full = is_full
        return not is_full

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def check_directory(parent: Path) -> None:
    """Raise `ValueError` unless a replica could make its directory below `parent`, with room for a short clip."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise ValueError(f"RUSHES_SCRATCH={parent} cannot be written: {error.strerror}") from error
    if free < _MIN_FREE_BYTES:
        raise ValueError(f"RUSHES_SCRATCH={parent} has {free} bytes free, needed are at least {_MIN_FREE_BYTES}")


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of directory `path`; None if it is held, gone or another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
