"""Fixtures that more than one tier uses. Nothing of the servers is imported or started until a test asks for it."""

import structlog

pytest_plugins = ["support.stack"]

# structlog's own choice of a traceback takes seconds to draw
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
