"""The embedded stack: three servers started together, stopped together, all state below one directory."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rushes_cli.signals import deferred
from rushes_cli.stack.errors import StackError
from rushes_cli.stack.postgres import Postgres
from rushes_cli.stack.process import Child, spawn, stop_all
from rushes_cli.stack.seaweedfs import SeaweedFS
from rushes_cli.stack.server import Server
from rushes_cli.stack.state import Secrets, StateDirectory
from rushes_cli.stack.valkey import Valkey


class EmbeddedStack:
    """Real Postgres, Valkey and SeaweedFS on free loopback ports, for one machine.

    Args:
        state_dir: holds all data, passwords and logs; made when missing. A later stack on it finds all data again.
    """

    def __init__(self, state_dir: str | Path) -> None:
        self._state = StateDirectory(Path(state_dir))
        self._servers: list[Server] = []
        self._parts: list[Child] = []

    @property
    def state_dir(self) -> Path:
        return self._state.path

    @property
    def logs(self) -> Path:
        return self._state.logs

    @property
    def secrets(self) -> Secrets:
        return self._state.secrets

    @property
    def settings_env(self) -> dict[str, str]:
        """Environment variables that point Rushes at the running servers."""
        return {key: value for server in self._servers for key, value in server.settings_env().items()}

    def start(self) -> None:
        """Start the servers and return when each has answered a real request. Main thread only.

        Raises:
            StackError: the directory is in use or not writable, or a server did not come up; nothing is left running.
        """
        if sys.platform != "linux":
            raise StackError(f"the embedded servers run on Linux only, and this is {sys.platform}")
        self._state.acquire()
        try:
            # Postgres last: at a first start it is busy for a second before its server exists
            for kind in (SeaweedFS, Valkey, Postgres):
                server = kind(self._state)
                self._servers.append(server)
                server.launch()
            waiting = list(self._servers)
            while waiting := [server for server in waiting if not server.is_ready()]:
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise

    def spawn(self, name: str, command: Sequence[str | Path], *, env: dict[str, str], cwd: Path) -> Child:
        """Start a part of Rushes beside the servers; it is stopped before they are."""
        # killed with its starter: without servers it could not finish or give back what it does
        child = spawn(name, command, log=self.logs / f"{name}.log", cwd=cwd, env=env, death_signal=signal.SIGKILL)
        self._parts.append(child)
        self._state.remember_child(child)
        return child

    def run(self, name: str, command: Sequence[str | Path], *, env: dict[str, str], cwd: Path) -> None:
        """Run a command to its end beside the servers.

        Raises:
            StackError: it failed; holds the last lines of its log.
        """
        child = spawn(name, command, log=self.logs / f"{name}.log", cwd=cwd, env=env)
        try:
            status = child.popen.wait()
        finally:
            child.ask_to_stop()
            child.wait_stopped()
        if status != 0:
            raise child.failure(f"ended with status {status}")

    def list_bucket(self) -> list[tuple[str, int]]:
        """Key and size of every object in the bucket, as the store lists them."""
        store = next(server for server in self._servers if isinstance(server, SeaweedFS))
        return store.list_bucket()

    def check_running(self) -> None:
        """Raises StackError when a server or a part has ended on its own, with the last lines of its log."""
        for server in self._servers:
            server.check_running()
        for part in self._parts:
            if (status := part.poll()) is not None:
                raise part.failure(f"ended with status {status}")

    def stop(self) -> None:
        """Stop the parts, then the servers, and let go of the directory. Harmless when nothing runs."""
        with deferred():
            try:
                stop_all(self._parts)
                stop_all(server.child for server in self._servers if server.child)
                for server in self._servers:
                    server.clean_up()
                if self._servers:
                    self._state.forget_children()
            finally:
                self._parts, self._servers = [], []
                self._state.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
