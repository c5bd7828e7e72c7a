"""Two nodes of one replica on this machine."""

import socket
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from rushes_core.settings import Settings
from support.stack import SharedStack
from support.worker import SCRIPTED, write_contract

HOST = "127.0.0.2"
"""Of the first node."""


def settings_of_two_nodes(stack: SharedStack, folder: Path, **changes: Any) -> Settings:
    with socket.create_server((HOST, 0)) as one:
        port = one.getsockname()[1]
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
    return stack.settings(**values | changes)
