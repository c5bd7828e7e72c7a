"""Which processes run, from /proc, and what they inherit."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    return [number for number, parent in _parents().items() if parent == pid]


def descendants(pid: int) -> list[int]:
    """Every process that `pid` started, and theirs."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    return pid in _parents()


@contextmanager
def hangup_is(action: signal.Handlers) -> Iterator[None]:
    """What is started within inherits this, whether the tests run under nohup or not."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _parents() -> dict[int, int]:
    """Every running process with its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] not in "ZX":
            found[int(path.parent.name)] = int(fields[1])
    return found
