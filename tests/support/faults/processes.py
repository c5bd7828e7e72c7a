"""The processes of Rushes under fault, which end with the harness."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rushes_cli.stack.process import guarded
from rushes_core.settings import Settings
from rushes_worker.child import settings_environment
from support.processes import children, descendants
from support.stack import settings_env

TESTS = Path(__file__).parents[2]


class Process:
    """One process of Rushes, with its log."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path, *, fds: Sequence[int] = ()) -> None:
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                # ended with the harness, however that ends
                guarded([sys.executable, "-P", "-m", "rushes_core.starting", *command], signal.SIGKILL, None),
                env=env
                | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def wait(self, seconds: float) -> int:
        return self._popen.wait(seconds)

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of its log."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


class Worker(Process):
    """A worker on the scripted pipeline."""

    def __init__(self, name: str, settings: Settings, log: Path, env: dict[str, str], *, layout: str) -> None:
        self.name = name
        self.layout = layout
        environment = settings_environment(settings) | env
        super().__init__(["support.faults.worker", layout], environment, log)

    @property
    def supervisors(self) -> list[int]:
        return children(self.pid)

    def resume(self) -> None:
        """Let go on whatever of it is stopped."""
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Api(Process):
    """An API process on a socket that outlives it."""

    def __init__(self, settings: Settings, log: Path, env: dict[str, str], fd: int) -> None:
        environment = os.environ | settings_env(settings) | env
        super().__init__(["support.faults.api", str(fd)], environment, log, fds=[fd])
