"""`rushes worker` with the supervisors of `support.faults.supervisor`: `python -m support.faults.worker LAYOUT`."""

import subprocess
import sys
from typing import Any

from rushes_core.settings import get_settings
from rushes_worker import launcher
from rushes_worker.child import spawn

_STAND_INS = {"rushes_worker.supervisor": "support.faults.supervisor"}


def _spawn(module: str, arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
    return spawn(_STAND_INS.get(module, module), arguments, **options)


if __name__ == "__main__":
    launcher.spawn = _spawn
    sys.exit(launcher.run(get_settings(), layout=sys.argv[1], device="cpu"))
