"""Fixtures that more than one tier uses. Nothing of the servers is imported or started until a test asks for it."""

import os

import structlog

# several pytests and their processes share the cores: what torch divides among threads waits until all have had a turn
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["support.stack"]

# structlog's own choice of a traceback takes seconds to draw
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
