"""Two nodes of one replica on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from rushes_core.settings import Settings
from support.ports import kept_port
from support.stack import SharedStack
from support.worker import SCRIPTED, write_contract

HOST = "127.0.0.2"
"""Of the first node."""


@contextmanager
def settings_of_two_nodes(stack: SharedStack, folder: Path, **changes: Any) -> Iterator[Settings]:
    """Settings with a port that is nobody else's meanwhile."""
    with kept_port(HOST) as port:
        values: dict[str, Any] = {
            "checkpoint": write_contract(folder / "checkpoint"),
            "pipeline": SCRIPTED,
            "scratch": folder / "scratch",
            "poll_seconds": 0.1,
            "heartbeat_seconds": 0.2,
            "provenance": "off",
            "node_host": HOST,
            "node_port": port,
            "node_secret": SecretStr("what two nodes know"),
        }
        yield stack.settings(**values | changes)
