"""Ranks that are processes of this machine: started, heard and ended."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from rushes_core.log import get_logger

from rushes_worker.child import environment_without_secrets, exit_status, has_exited, how_it_ended, spawn
from rushes_worker.commands import Boot, Command, Report
from rushes_worker.devices import VISIBLE

log = get_logger(__name__)

_REAP_SECONDS = 5.0


class LocalRanks:
    """Some or all ranks of one epoch. Used by the main thread alone.

    Args:
        listener: where the ranks of all nodes find each other; rank 0, which must be one of these, inherits it.
    """

    def __init__(self, boots: Sequence[Boot], *, env: Mapping[str, str], listener: socket.socket | None = None) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._open: dict[Connection, int] = {}
        for boot in boots:
            if boot.rank == 0 and listener is not None:
                self._spawn(replace(boot, listener=listener.fileno()), env, [listener.fileno()])
            else:
                self._spawn(boot, env, [])

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    @property
    def waitables(self) -> Sequence[Any]:
        """What `multiprocessing.connection.wait` finds readable when there is something to receive."""
        return list(self._open)

    def send(self, rank: int, command: Boot | Command) -> None:
        # a rank that is gone is noticed by who looks for exits
        with suppress(OSError):
            self._connections[rank].send(command)

    def receive(self, readable: Collection[Any]) -> list[tuple[int, Report]]:
        """What was said on those connections of `waitables` that are readable."""
        reports: list[tuple[int, Report]] = []
        for connection, rank in list(self._open.items()):
            if connection not in readable:
                continue
            try:
                while connection.poll():
                    reports.append((rank, connection.recv()))
            except (EOFError, OSError):
                del self._open[connection]
                self._await_exit(rank)
        return reports

    def exits(self) -> dict[int, str | None]:
        """The ranks that have ended, and how; None for one that has closed its connection and does not end."""
        silenced = self._processes.keys() - self._open.values()
        found: dict[int, str | None] = {}
        for rank, process in self._processes.items():
            status = exit_status(process)
            if status is not None:
                found[rank] = how_it_ended(status)
            elif rank in silenced:
                found[rank] = None
        return found

    def dump_stacks(self) -> None:
        """Have what still runs write the stacks of its threads to the log."""
        for process in self._processes.values():
            if not has_exited(process):
                process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """Kill what is left and wait for it."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_SECONDS
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("rank_unkillable", rank=rank, pid=process.pid)
        for connection in self._connections.values():
            connection.close()
        self._open.clear()

    def _spawn(self, boot: Boot, env: Mapping[str, str], descriptors: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes[boot.rank] = spawn(
                "rushes_worker.rank",
                [str(theirs.fileno())],
                env=env,
                pass_fds=(theirs.fileno(), *descriptors),
                leaves_signals=True,
            )
        connection = Connection(ours.detach())
        self._connections[boot.rank] = connection
        self._open[connection] = boot.rank
        self.send(boot.rank, boot)

    def _await_exit(self, rank: int) -> None:
        """Wait for rank's process, whose socket has closed, to be gone: moments, unless a driver holds it."""
        deadline = time.monotonic() + _REAP_SECONDS
        while not has_exited(self._processes[rank]) and time.monotonic() < deadline:
            time.sleep(0.005)


def rank_environment(*, kind: str, visible: Sequence[str], threads: int, interface: str | None) -> dict[str, str]:
    """What ranks inherit.

    Args:
        interface: network interface that they talk over; None leaves the choice to the operator and the libraries.
    """
    env = environment_without_secrets()
    if kind == "cuda":
        env[VISIBLE] = ",".join(visible)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # ranks that spin while they wait take the cores that the others compute on
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    for name, value in defaults.items():
        env.setdefault(name, value)
    return env
