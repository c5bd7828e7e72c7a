"""Figures of several processes of the API behind one port: each counts into files of one folder, and whichever is
scraped tells of all (prometheus_client's multiprocess mode)."""

# prometheus_client annotates only in part
# pyright: standard

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from prometheus_client.multiprocess import mark_process_dead

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported, and so to be set before a process is started."""

_PREFIX = "rushes-figures-"
_OF_PROCESS = re.compile(rf"{_PREFIX}([0-9]+)-.*")
_LIVE_GAUGE = re.compile(r"gauge_live[a-z]+_([0-9]+)\.db")


@contextmanager
def shared_figures() -> Generator[None]:
    """Have processes that are started inside the context share their figures, in a folder that is removed at its end,
    or in the operator's where that is set."""
    if os.environ.get(FOLDER_VARIABLE):
        yield
        return
    _remove_leftovers()
    folder = mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    os.environ[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        del os.environ[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def figures_folder() -> str | None:
    """Where this process counts together with others; None: it counts for itself."""
    return os.environ.get(FOLDER_VARIABLE) or None


def forget_dead(folder: str) -> None:
    """Leave out what processes were doing that have ended. What they counted stays."""
    for path in Path(folder).glob("gauge_live*.db"):
        found = _LIVE_GAUGE.fullmatch(path.name)
        if found is not None and not _is_alive(int(found[1])):
            mark_process_dead(int(found[1]), folder)


def _remove_leftovers() -> None:
    """Of servers that were killed."""
    for path in Path(gettempdir()).glob(f"{_PREFIX}*"):
        found = _OF_PROCESS.fullmatch(path.name)
        if found is not None and not _is_alive(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
