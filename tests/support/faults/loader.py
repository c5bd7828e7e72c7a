"""`rushes loader` with short leases and chunks, slow by `FAULT_CHUNK_SECONDS` before each chunk's commit."""

import os
import time
from typing import Any

from rushes_core.campaigns import loading
from rushes_core.log import configure_logging
from rushes_core.settings import get_settings
from support.faults import canvas  # noqa: F401
from support.faults.mutants import install

# whoever imports them by name is imported afterwards
loading.LEASE_SECONDS = 4.0


def _slow_down(seconds: float) -> None:
    advance = loading.advance

    def slowly(*arguments: Any, **values: Any) -> Any:
        time.sleep(seconds)
        return advance(*arguments, **values)

    loading.advance = slowly


def main(arguments: list[str]) -> int:
    from rushes_worker.campaigns import chunks, process

    install()
    chunks.CHUNK_LINES = 4
    _slow_down(float(os.environ.get("FAULT_CHUNK_SECONDS", "0")))
    settings = get_settings()
    configure_logging(settings.log_level, json=settings.log_json)
    return process.run(settings)
