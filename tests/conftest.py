"""Fixtures that more than one tier uses. Nothing of the servers is imported or started until a test asks for it."""

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import structlog

# several pytests and their processes share the cores: what torch divides among threads waits until all have had a turn
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["support.stack"]

# the heap of all collected tests is large: at Python's own threshold the collector takes a tenth of the run
gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


# structlog's own choice of a traceback takes seconds to draw
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that runs in this process sends its logs to the test's own stderr, which is closed after it."""
    root, config = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers != handlers:
        root.handlers[:] = handlers
    if root.level != level:
        root.setLevel(level)
    if structlog.get_config() != config:
        structlog.configure(**config)
