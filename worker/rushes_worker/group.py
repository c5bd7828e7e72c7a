"""The rank group of a replica: started together, ended together.

Any rank's exit, and silence for longer than was agreed, ends all of them; a group is never partial. The supervisor then
starts another one under the next epoch.
"""

import multiprocessing.connection
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rushes_core.contract import InferenceContract
from rushes_core.errors import RushesError, WorkerLost
from rushes_core.log import get_logger

from rushes_worker.commands import (
    Boot,
    Command,
    Failed,
    Loading,
    MemoryUsed,
    NotLoaded,
    Ready,
    Render,
    Report,
    Stop,
    Unfit,
)
from rushes_worker.layout import NODES
from rushes_worker.local_ranks import LocalRanks, rank_environment
from rushes_worker.network import interface_of
from rushes_worker.node_link import NodeLink
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.remote_ranks import RemoteRanks

log = get_logger(__name__)

_TICK_SECONDS = 0.5
"""How often the ranks' processes are looked at; their sockets tell at once."""
_DUMP_SECONDS = 1.0


class GroupLost(WorkerLost):
    """A rank ended, the other node was lost, or all fell silent; no process of the group is left on this machine.

    `rank` is the one that ended; None if the group was ended for another reason.
    """

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class GroupNotLoaded(GroupLost):
    """A rank could not be loaded, and another one may be.

    `is_unreadable`: for the checkpoint's file system.
    """

    def __init__(self, message: str, *, rank: int, is_unreadable: bool) -> None:
        super().__init__(message, rank=rank)
        self.is_unreadable = is_unreadable


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
    contract: InferenceContract | None = None
    """That every epoch's checkpoint is to have; None: whichever it has."""
    host: str = ""
    """Address by which the other node's ranks find these; empty where there is no other node."""


class RankGroup:
    """One epoch of a replica's ranks. Used by the main thread alone.

    Args:
        epoch: counts the groups of this supervisor.
        directory: the replica's scratch directory, for the rendezvous of this epoch.
        link: to the node that runs the second half of the ranks; None where all are of this machine.
    """

    def __init__(self, plan: GroupPlan, *, epoch: int, directory: Path, link: NodeLink | None = None) -> None:
        self.epoch = epoch
        self.ended = False
        self.lost_because: str | None = None
        """What `GroupLost` said, whoever took it."""
        self._plan = plan
        self._serial = 0
        self._patience: float | None = None
        self._heard_at = 0.0
        self._waiting_for = ""
        self._devices: dict[int, Ready] = {}
        self._loading: dict[int, Loading] = {}
        self._failed: set[int] = set()
        self._rendezvous = directory / f"rendezvous-{epoch}"
        self._remote: RemoteRanks | None = None
        if link is None:
            self._local = self._start(self._boots(self._rendezvous.as_uri()), interface="lo")
        else:
            self._local, self._remote = self._start_with(link)
        self._parts = [self._local] if self._remote is None else [self._local, self._remote]
        self.expect(plan.start_timeout_seconds, "loading")
        log.info("group_starting", epoch=epoch, pids=self.pids)

    @property
    def size(self) -> int:
        return self._plan.sp

    @property
    def pids(self) -> list[int]:
        """Of the ranks of this machine."""
        return self._local.pids

    @property
    def devices(self) -> list[Ready]:
        """What the ranks that have loaded their share run on, in order; memory as it was after the last render."""
        return [self._devices[rank] for rank in sorted(self._devices)]

    @property
    def is_ready(self) -> bool:
        """Whether every rank has loaded its share."""
        return len(self._devices) == self._plan.sp

    @property
    def is_leaving(self) -> bool:
        """Whether the other node was asked to stop: it waits for what the ranks are at, and for the group to end."""
        return self._remote is not None and self._remote.is_leaving

    @property
    def loading(self) -> Loading | None:
        """How far the slowest rank is that is not ready."""
        waited_for = [self._loading[rank] for rank in self._loading.keys() - self._devices.keys()]
        return min(waited_for, key=lambda one: one.done_bytes, default=None)

    def render(self, request: RenderRequest, directory: Path, *, behind: int = 0) -> int:
        """Have every rank render `request`; returns the serial number that its reports carry.

        Args:
            behind: the render that they are at; they begin this one when all work of that one is queued on their
                devices. What is expected of them does not change.
        """
        self._serial += 1
        if not behind:
            self.expect(self._plan.stage_timeout_seconds, "rendering")
        for rank in range(self._plan.sp):
            self._send(rank, Render(self._serial, request, directory, behind))
        return self._serial

    def stop(self, serial: int | None = None) -> None:
        """Have a render given up at its next boundary: the one that was said last, or `serial`."""
        self._send(0, Stop(self._serial if serial is None else serial))

    def expect(self, seconds: float, what: str) -> None:
        """From now on the group ends when no rank says anything for `seconds`."""
        self._patience, self._waiting_for, self._heard_at = seconds, what, time.monotonic()

    def relax(self) -> None:
        """Silence is all right: there is nothing to do."""
        self._patience = None

    def wait(self, timeout: float, *others: Any) -> list[tuple[int, Report]]:
        """What the ranks said, each with the rank's number; empty when something of `others` is readable, or in time.

        Raises:
            GroupLost: a rank ended, the other node was lost, or all were silent for too long. The group has ended.
            GroupNotLoaded: a rank ended before it was ready, and said why.
            GroupUnfit: the ranks can never be loaded as asked. The group has ended.
        """
        reports = self._receive(timeout, others)
        if self._remote is not None and self._remote.is_lost:
            self.end("node_lost")
            raise self._loss(GroupLost("The other node of the worker was lost.", rank=None))
        # a rank that reported its failure leaves because of it; the render's owner decides what that means
        exits = {} if reports else {rank: how for part in self._parts for rank, how in part.exits().items()}
        if not exits.keys() <= self._failed:
            # it may have reported since
            reports = self._receive(0.0, ())
        for rank, report in reports:
            self._note(rank, report)
        self._check_loads(reports)
        if reports:
            self._heard_at = time.monotonic()
            return reports
        for rank, how in exits.items():
            if rank not in self._failed:
                self._lose(rank, how)
        if self._patience is not None and time.monotonic() - self._heard_at > self._patience:
            self._time_out(self._patience)
        return []

    def end(self, reason: str, **fields: Any) -> None:
        """Kill what is left of the group and wait for it; what is of the other node ends there as soon as it hears."""
        if self.ended:
            return
        self.ended = True
        for part in self._parts:
            part.end()
        self._rendezvous.unlink(missing_ok=True)
        log.info("group_ended", epoch=self.epoch, reason=reason, **fields)

    def _boots(self, rendezvous: str) -> list[Boot]:
        plan = self._plan
        token = secrets.token_hex(16)
        return [
            Boot(
                rank=rank,
                sp=plan.sp,
                epoch=self.epoch,
                device=f"cuda:{rank}" if plan.kind == "cuda" else "cpu",
                pipeline=plan.pipeline,
                options=plan.options,
                checkpoint=plan.checkpoint,
                rendezvous=rendezvous,
                token=token,
                listener=None,
                # a rank may wait for a slower one as long as the group may be silent, and a little longer: the
                # supervisor's deadline is the one that says what was waited for
                collective_timeout_seconds=max(plan.start_timeout_seconds, plan.stage_timeout_seconds) + 30,
                log_level=plan.log_level,
                log_json=plan.log_json,
                contract=plan.contract,
            )
            for rank in range(plan.sp)
        ]

    def _start(
        self, boots: Sequence[Boot], *, interface: str | None, listener: socket.socket | None = None
    ) -> LocalRanks:
        plan = self._plan
        env = rank_environment(kind=plan.kind, visible=plan.visible, threads=plan.threads, interface=interface)
        return LocalRanks(boots, env=env, listener=listener)

    def _start_with(self, link: NodeLink) -> tuple[LocalRanks, RemoteRanks]:
        """The first ranks here, where they wait for the others, and the others at the end of `link`."""
        host, num_local = self._plan.host, self._plan.sp // NODES
        # bound before anybody is told, so that no other process can have the port
        with socket.create_server((host, 0)) as listener:
            boots = self._boots(f"tcp://{host}:{listener.getsockname()[1]}")
            local = self._start(boots[:num_local], interface=interface_of(host), listener=listener)
        return local, RemoteRanks(boots[num_local:], epoch=self.epoch, link=link)

    def _send(self, rank: int, command: Command) -> None:
        part = self._local if self._remote is None or rank < self._plan.sp // NODES else self._remote
        part.send(rank, command)

    def _receive(self, timeout: float, others: Sequence[Any]) -> list[tuple[int, Report]]:
        seconds = min(timeout, _TICK_SECONDS)
        if self._patience is not None:
            seconds = min(seconds, self._heard_at + self._patience - time.monotonic())
        waitables = [one for part in self._parts for one in part.waitables]
        readable = multiprocessing.connection.wait([*waitables, *others], max(0.0, seconds))
        return [report for part in self._parts for report in part.receive(readable)]

    def _note(self, rank: int, report: Report) -> None:
        if isinstance(report, Loading):
            self._loading[rank] = report
        elif isinstance(report, Ready):
            self._devices[rank] = report
        elif isinstance(report, MemoryUsed):
            self._devices[rank] = replace(self._devices[rank], memory_used_bytes=report.used_bytes)
        elif isinstance(report, Failed) and not report.intact:
            self._failed.add(rank)

    def _check_loads(self, reports: Sequence[tuple[int, Report]]) -> None:
        """End when a rank could not be loaded.

        Of several reasons what is final counts, then what could not be read, then what came first.
        """
        for _, report in reports:
            if isinstance(report, Unfit):
                self.end("unfit")
                raise GroupUnfit(report.message)
        faults = [(rank, report) for rank, report in reports if isinstance(report, NotLoaded)]
        if faults:
            rank, fault = min(faults, key=lambda one: (not one[1].is_unreadable, one[1].at))
            self.end("not_loaded", rank=rank)
            log.warning("rank_not_loaded", epoch=self.epoch, rank=rank, reason=fault.message)
            raise self._loss(GroupNotLoaded(fault.message, rank=rank, is_unreadable=fault.is_unreadable))

    def _loss(self, lost: GroupLost) -> GroupLost:
        self.lost_because = str(lost)
        return lost

    def _lose(self, rank: int, how: str | None) -> None:
        self.end("rank_died", rank=rank)
        ended = how or "could not be ended"
        log.warning("rank_died", epoch=self.epoch, rank=rank, ended=ended)
        raise self._loss(GroupLost(f"Rank {rank} of the worker {ended}.", rank=rank))

    def _time_out(self, seconds: float) -> None:
        for part in self._parts:
            part.dump_stacks()
        time.sleep(_DUMP_SECONDS)
        self.end("deadline", waiting_for=self._waiting_for, seconds=seconds)
        said = f"The ranks of the worker were silent for {seconds:g} s of {self._waiting_for}."
        raise self._loss(GroupLost(said, rank=None))
