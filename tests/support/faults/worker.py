"""`rushes worker` with the supervisors of `support.faults.supervisor`: `python -m rushes_core.starting
support.faults.worker LAYOUT`."""

import subprocess
from typing import Any

from rushes_core.settings import get_settings
from rushes_worker import launcher
from rushes_worker.child import spawn

_STAND_INS = {"rushes_worker.supervisor": "support.faults.supervisor"}


def _spawn(module: str, arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
    return spawn(_STAND_INS.get(module, module), arguments, **options)


def main(arguments: list[str]) -> int:
    launcher.spawn = _spawn
    return launcher.run(get_settings(), layout=arguments[0], device="cpu")
