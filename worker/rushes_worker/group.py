"""The rank group of a replica: started together, ended together.

Any rank's exit, and silence for longer than was agreed, ends all of them; a group is never partial. The supervisor then
starts another one under the next epoch.
"""

import multiprocessing.connection
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rushes_core.errors import RushesError, WorkerLost
from rushes_core.log import get_logger

from rushes_worker.child import environment_without_secrets, has_exited, how_it_ended, spawn
from rushes_worker.commands import Boot, Command, Failed, Ready, Render, Report, Stop, Unfit
from rushes_worker.devices import VISIBLE
from rushes_worker.pipeline.base import RenderRequest

log = get_logger(__name__)

_TICK_SECONDS = 0.5
"""How often the ranks' processes are looked at; their sockets tell at once."""
_DUMP_SECONDS = 1.0
_REAP_SECONDS = 5.0


class GroupLost(WorkerLost):
    """A rank ended, or all fell silent; no process of the group is left.

    `rank` is the one that ended; None if the group was ended for its silence.
    """

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class GroupUnfit(RushesError):
    """The ranks can never serve as they were asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What every epoch of a replica's rank group is started with."""

    sp: int
    kind: str
    """`cpu` or `cuda`."""
    visible: tuple[str, ...]
    """On CUDA, the entry of `CUDA_VISIBLE_DEVICES` for each rank."""
    threads: int
    """CPU threads of a rank."""
    pipeline: str
    checkpoint: Path
    start_timeout_seconds: float
    stage_timeout_seconds: float
    log_level: str
    log_json: bool
    options: tuple[str, ...] = ()
    """Options of the pipeline."""


class RankGroup:
    """One epoch of a replica's ranks. Used by the main thread alone.

    Args:
        epoch: counts the groups of this supervisor.
        directory: the replica's scratch directory, for the rendezvous of this epoch.
    """

    def __init__(self, plan: GroupPlan, *, epoch: int, directory: Path) -> None:
        self.epoch = epoch
        self.ended = False
        self._plan = plan
        self._serial = 0
        self._ready: set[int] = set()
        self._patience: float | None = None
        self._heard_at = 0.0
        self._waiting_for = ""
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._open: dict[Connection, int] = {}
        self._devices: dict[int, Ready] = {}
        self._failed: set[int] = set()
        self._silenced: set[int] = set()
        self._rendezvous = directory / f"rendezvous-{epoch}"
        for rank in range(plan.sp):
            self._spawn(rank)
        self.expect(plan.start_timeout_seconds, "loading")
        log.info("group_starting", epoch=epoch, pids=self.pids)

    @property
    def size(self) -> int:
        return self._plan.sp

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    @property
    def devices(self) -> list[Ready]:
        """What the ranks that have loaded their share run on, in order."""
        return [self._devices[rank] for rank in sorted(self._devices)]

    @property
    def is_ready(self) -> bool:
        """Whether every rank has loaded its share."""
        return len(self._ready) == self._plan.sp

    def render(self, request: RenderRequest, directory: Path) -> int:
        """Have every rank render `request`; returns the serial number that its reports carry."""
        self._serial += 1
        self.expect(self._plan.stage_timeout_seconds, "rendering")
        for rank in range(self._plan.sp):
            self._send(rank, Render(self._serial, request, directory))
        return self._serial

    def stop(self) -> None:
        """Have the current render given up at the next boundary."""
        self._send(0, Stop(self._serial))

    def expect(self, seconds: float, what: str) -> None:
        """From now on the group ends when no rank says anything for `seconds`."""
        self._patience, self._waiting_for, self._heard_at = seconds, what, time.monotonic()

    def relax(self) -> None:
        """Silence is all right: there is nothing to do."""
        self._patience = None

    def wait(self, timeout: float, *others: Any) -> list[tuple[int, Report]]:
        """What the ranks said, each with the rank's number; empty when something of `others` is readable, or in time.

        Raises:
            GroupLost: a rank ended, or all were silent for too long. The group has ended.
            GroupUnfit: the ranks can never be loaded as asked. The group has ended.
        """
        reports = self._receive(timeout, others)
        for rank, report in reports:
            self._note(rank, report)
        if reports:
            self._heard_at = time.monotonic()
            return reports
        for rank, process in enumerate(self._ranks):
            # a rank that reported its failure leaves because of it; the render's owner decides what that means
            if rank not in self._failed and (rank in self._silenced or has_exited(process)):
                self._lose(rank)
        if self._patience is not None and time.monotonic() - self._heard_at > self._patience:
            self._time_out(self._patience)
        return []

    def end(self, reason: str, **fields: Any) -> None:
        """Kill what is left of the group and wait for it."""
        if self.ended:
            return
        self.ended = True
        for process in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for rank, process in enumerate(self._ranks):
            try:
                process.wait(_REAP_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("rank_unkillable", rank=rank, pid=process.pid)
        for connection in self._connections:
            connection.close()
        self._rendezvous.unlink(missing_ok=True)
        log.info("group_ended", epoch=self.epoch, reason=reason, **fields)

    def _spawn(self, rank: int) -> None:
        plan = self._plan
        ours, theirs = socket.socketpair()
        with theirs:
            self._ranks.append(
                spawn(
                    "rushes_worker.rank",
                    [str(theirs.fileno())],
                    env=self._environment(),
                    pass_fds=(theirs.fileno(),),
                )
            )
        connection = Connection(ours.detach())
        self._connections.append(connection)
        self._open[connection] = rank
        self._send(
            rank,
            Boot(
                rank=rank,
                sp=plan.sp,
                epoch=self.epoch,
                device=f"cuda:{rank}" if plan.kind == "cuda" else "cpu",
                pipeline=plan.pipeline,
                options=plan.options,
                checkpoint=plan.checkpoint,
                rendezvous=self._rendezvous,
                # a rank may wait for a slower one as long as the group may be silent, and a little longer: the
                # supervisor's deadline is the one that says what was waited for
                collective_timeout_seconds=max(plan.start_timeout_seconds, plan.stage_timeout_seconds) + 30,
                log_level=plan.log_level,
                log_json=plan.log_json,
            ),
        )

    def _environment(self) -> dict[str, str]:
        env = environment_without_secrets()
        if self._plan.kind == "cuda":
            env[VISIBLE] = ",".join(self._plan.visible)
        for name, value in {
            "OMP_NUM_THREADS": str(self._plan.threads),
            # ranks that spin while they wait take the cores that the others compute on
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }.items():
            env.setdefault(name, value)
        return env

    def _send(self, rank: int, command: Boot | Command) -> None:
        # a rank that is gone is noticed by the next wait
        with suppress(OSError):
            self._connections[rank].send(command)

    def _receive(self, timeout: float, others: Sequence[Any]) -> list[tuple[int, Report]]:
        seconds = min(timeout, _TICK_SECONDS)
        if self._patience is not None:
            seconds = min(seconds, self._heard_at + self._patience - time.monotonic())
        readable = multiprocessing.connection.wait([*self._open, *others], max(0.0, seconds))
        reports: list[tuple[int, Report]] = []
        for connection, rank in list(self._open.items()):
            if connection not in readable:
                continue
            try:
                while connection.poll():
                    reports.append((rank, connection.recv()))
            except (EOFError, OSError):
                del self._open[connection]
                self._silenced.add(rank)
                self._await_exit(rank)
        return reports

    def _note(self, rank: int, report: Report) -> None:
        if isinstance(report, Ready):
            self._ready.add(rank)
            self._devices[rank] = report
        elif isinstance(report, Failed) and not report.intact:
            self._failed.add(rank)
        elif isinstance(report, Unfit):
            self.end("unfit")
            raise GroupUnfit(report.message)

    def _await_exit(self, rank: int) -> None:
        """Wait for rank's process, whose socket has closed, to be gone: moments, unless a driver holds it."""
        deadline = time.monotonic() + _REAP_SECONDS
        while not has_exited(self._ranks[rank]) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _lose(self, rank: int) -> None:
        self.end("rank_died", rank=rank)
        process = self._ranks[rank]
        ended = "could not be ended" if process.returncode is None else how_it_ended(process.returncode)
        log.warning("rank_died", epoch=self.epoch, rank=rank, pid=process.pid, ended=ended)
        raise GroupLost(f"Rank {rank} of the worker {ended}.", rank=rank)

    def _time_out(self, seconds: float) -> None:
        for process in self._ranks:
            if not has_exited(process):
                # writes the stacks of its threads to the log
                process.send_signal(signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        self.end("deadline", waiting_for=self._waiting_for, seconds=seconds)
        raise GroupLost(f"The ranks of the worker were silent for {seconds:g} s of {self._waiting_for}.", rank=None)
