"""The second node of a replica: `rushes worker --join HOST`.

It holds a share of the ranks and nothing else: no lease, no database, no store. It does what the first node says,
starts its ranks for the epoch that it is told, and ends them when the first node says so or is gone.
"""

import multiprocessing.connection
import os
import shutil
import socket
import sys
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from rushes_core.contract import InferenceContract, load_contract
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_core.log import configure_logging, get_logger
from rushes_core.settings import Settings

from rushes_worker.commands import AudioReady, Boot, Done, Failed, Refused, Render, Report, Stopped, UnitReady
from rushes_worker.devices import Devices, Driver, find_devices
from rushes_worker.layout import NODES, Layout
from rushes_worker.local_ranks import LocalRanks, rank_environment
from rushes_worker.network import interface_of
from rushes_worker.node_link import (
    SILENCE_SECONDS,
    DumpStacks,
    EndRanks,
    FromRank,
    Joined,
    Leaving,
    NodeLink,
    NotTrusted,
    Occupied,
    RankExited,
    StartRanks,
    ToRank,
    Welcome,
    hear,
    prove,
    secret_of,
)
from rushes_worker.pipeline.options import check_devices_serve
from rushes_worker.scratch import Scratch, check_directory
from rushes_worker.stopping import Stopping, ignore_signals, on_stop
from rushes_worker.wake import Wake

log = get_logger(__name__)

_TICK_SECONDS = 0.5
_RETRY_SECONDS = 1.0
_STOP_MARGIN_SECONDS = 10.0
"""How much longer than its grace period this node waits for the first one, which may have been asked to stop at the
same time, and gives its job back at the end of its own."""


class Node:
    """Joins the first node again and again until it is asked to stop.

    Args:
        kind: `cpu`, `cuda` or `auto`.
        layout: what that of the first node must be; None: whatever it is.
    """

    def __init__(
        self, settings: Settings, address: tuple[str, int], kind: str, *, layout: Layout | None, scratch: Scratch
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._address = address
        self._kind = kind
        self._scratch = scratch
        self._secret = secret_of(settings.node_secret.get_secret_value())
        # what is wrong with it is told now, not when the first node comes
        load_contract(settings.checkpoint)
        self._visible: tuple[str, ...] = ()
        self._wake = Wake()
        self._stopping = Stopping(settings.shutdown_grace_seconds + _STOP_MARGIN_SECONDS)
        self._reason: str | None = None

    def request_stop(self) -> None:
        """Safe in a signal handler."""
        self._stopping.request()
        self._wake.poke()

    def run(self) -> int:
        """Returns the exit status.

        Raises:
            ValueError: this node cannot be what the first one needs.
        """
        while not self._stopping.requested:
            link = self._join()
            if link is None:
                multiprocessing.connection.wait([self._wake.fileno()], _RETRY_SECONDS)
                self._wake.clear()
                continue
            self._reason = None
            log.info("node_joined", address=self._address[0])
            _Epochs(self._settings, link, self._kind, self._visible, self._scratch).serve(self._wake, self._stopping)
            link.close()
            log.info("node_left", address=self._address[0])
        return 0

    def _join(self) -> NodeLink | None:
        """A link to the first node; None if there is none now.

        Raises:
            ValueError: this node does not match the first one.
        """
        try:
            connected = socket.create_connection(self._address, SILENCE_SECONDS)
        except OSError as error:
            self._note(str(error))
            return None
        connected.settimeout(None)
        try:
            connection = prove(connected, self._secret, first=False)
            try:
                welcome = hear(connection, SILENCE_SECONDS)
                if isinstance(welcome, Occupied):
                    self._note("another node has joined")
                    connected.close()
                    return None
                try:
                    # of the checkpoint that its ranks would load, which may be another one by now
                    contract = load_contract(self._settings.checkpoint)
                    devices = match(welcome, contract=contract, kind=self._kind, layout=self._layout)
                except (CheckpointError, ValueError) as error:
                    connection.send(str(error))
                    raise
                self._kind, self._visible = devices.kind, devices.visible
                connection.send(Joined(socket.gethostname()))
            finally:
                connection.close()
        except (NotTrusted, CheckpointUnreadable, OSError) as error:
            self._note(str(error))
            connected.close()
            return None
        return NodeLink(connected, on_loss=self._wake.poke)

    def _note(self, reason: str) -> None:
        """Log why it is not joined, once."""
        if reason != self._reason:
            self._reason = reason
            log.warning("node_not_joined", address="{}:{}".format(*self._address), reason=reason)


class _Epochs:
    """Serves the first node over one link: one epoch's ranks after another's."""

    def __init__(
        self, settings: Settings, link: NodeLink, kind: str, visible: tuple[str, ...], scratch: Scratch
    ) -> None:
        self._settings = settings
        self._link = link
        self._kind = kind
        self._visible = visible
        self._directory = scratch.path / "render"
        self._ranks: LocalRanks | None = None
        self._epoch = self._leaves = 0
        self._told: set[int] = set()

    def serve(self, wake: Wake, stopping: Stopping) -> None:
        """Until the link is lost, or this node is to stop and has no ranks or no time left. No rank is left then."""
        try:
            while not self._link.is_lost:
                if stopping.requested and not self._may_stay(stopping):
                    return
                waitables: list[Any] = [self._link, wake, *(self._ranks.waitables if self._ranks else ())]
                readable = multiprocessing.connection.wait(waitables, _TICK_SECONDS)
                wake.clear()
                for message in self._link.receive():
                    self._obey(message)
                if self._ranks is not None:
                    self._tell(self._ranks, readable)
        finally:
            self._end()

    def _may_stay(self, stopping: Stopping) -> bool:
        """Whether the first node ends the ranks in time; it is told that this one leaves."""
        if self._ranks is not None and self._leaves != self._epoch:
            self._leaves = self._epoch
            self._link.send(Leaving(self._epoch))
        return self._ranks is not None and not stopping.grace_is_over

    def _obey(self, message: object) -> None:
        if isinstance(message, StartRanks):
            self._end()
            self._start(message)
            return
        # what was said to an epoch that has ended since is of no use to the next
        if self._ranks is None or getattr(message, "epoch", None) != self._epoch:
            return
        if isinstance(message, ToRank):
            command = message.command
            if isinstance(command, Render):
                command = replace(command, directory=self._make_directory(message.rank, command))
            self._ranks.send(message.rank, command)
        elif isinstance(message, DumpStacks):
            self._ranks.dump_stacks()
        elif isinstance(message, EndRanks):
            self._end()

    def _start(self, order: StartRanks) -> None:
        boots = [self._own(boot, place) for place, boot in enumerate(order.boots)]
        env = rank_environment(
            kind=self._kind,
            visible=self._visible,
            threads=max(1, len(os.sched_getaffinity(0)) // len(boots)),
            interface=interface_of(self._link.own_address),
        )
        self._epoch, self._told = order.epoch, set()
        self._ranks = LocalRanks(boots, env=env)
        log.info("ranks_starting", epoch=self._epoch, pids=self._ranks.pids)

    def _own(self, boot: Boot, place: int) -> Boot:
        """What is this node's own affair put into a rank's first command."""
        return replace(
            boot,
            device=f"cuda:{place}" if self._kind == "cuda" else "cpu",
            checkpoint=self._settings.checkpoint,
            log_level=self._settings.log_level,
            log_json=self._settings.log_json,
        )

    def _tell(self, ranks: LocalRanks, readable: Collection[Any]) -> None:
        for rank, report in ranks.receive(readable):
            if isinstance(report, Done | Stopped | Refused | Failed):
                shutil.rmtree(self._directory_of(rank, report.serial), ignore_errors=True)
            self._link.send(FromRank(self._epoch, rank, report, self._contents(report)))
        for rank, how in ranks.exits().items():
            if rank not in self._told:
                self._told.add(rank)
                log.warning("rank_ended", epoch=self._epoch, rank=rank, ended=how)
                self._link.send(RankExited(self._epoch, rank, how))

    def _make_directory(self, rank: int, command: Render) -> Path:
        """For what `rank` leaves of a render: it may be at the next one before all of that is read."""
        if not command.behind:
            # the rank has told how all before it ended; of what it was told in vain it says nothing
            for old in self._directory.glob(f"rank-{rank}-*"):
                shutil.rmtree(old, ignore_errors=True)
        directory = self._directory_of(rank, command.serial)
        directory.mkdir(parents=True)
        return directory

    def _directory_of(self, rank: int, serial: int) -> Path:
        return self._directory / f"rank-{rank}-render-{serial}"

    def _contents(self, report: Report) -> bytes | None:
        """What a rank left in a file for the first node; nothing is kept here."""
        if not isinstance(report, UnitReady | AudioReady):
            return None
        data = report.path.read_bytes()
        report.path.unlink()
        return data

    def _end(self) -> None:
        if self._ranks is None:
            return
        self._ranks.end()
        self._ranks = None
        shutil.rmtree(self._directory, ignore_errors=True)
        log.info("ranks_ended", epoch=self._epoch)


def match(
    welcome: Welcome,
    *,
    contract: InferenceContract,
    kind: str,
    layout: Layout | None,
    driver: Driver | None = None,
) -> Devices:
    """The devices of a node that joins for its share of the ranks.

    Args:
        contract: of its checkpoint.
        kind: `cpu`, `cuda` or `auto`.
        layout: what the first node's must be; None: whatever it is.
        driver: what the driver of devices says; asked if not given.

    Raises:
        ValueError: version, checkpoint, layout or devices are not what the first node needs.
    """
    wanted = Layout.parse(welcome.layout)
    for what, ours, theirs in (
        ("version", version("rushes"), welcome.version),
        ("checkpoint", contract.model_id, welcome.contract.model_id),
        ("contract of the checkpoint", contract, welcome.contract),
        ("--layout", layout or wanted, wanted),
    ):
        if ours != theirs:
            raise ValueError(f"this node's {what} is {ours}, the first node's is {theirs}")
    devices = find_devices(wanted, kind, nodes=NODES, driver=driver)
    if devices.kind != welcome.kind:
        raise ValueError(f"this node's ranks would run on {devices.kind}, the first node's run on {welcome.kind}")
    try:
        check_devices_serve(welcome.options, devices)
    except ValueError as error:
        raise ValueError(f"the first node's {error}") from error
    return devices


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """`HOST` or `HOST:PORT`.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(default_port)
    if not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"--join takes HOST or HOST:PORT, got {text!r}")
    return host, int(port)


def _check_host(host: str) -> None:
    """Raise `ValueError` when there is no machine of this name. Whether it answers yet is another matter."""
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            return
        raise ValueError(f"--join {host} cannot be resolved: {error}") from error


def run(settings: Settings, *, join: str, device: str = "auto", layout: str | None = None) -> int:
    """Be the second node of a replica until SIGTERM or SIGINT; returns the exit status. Call from the main thread.

    The status is 2 for what the operator gave, and 1 for a checkpoint that does not serve or a first node that wants
    another one.

    Args:
        layout: what the first node's must be; None: whatever it is.
    """
    configure_logging(settings.log_level, json=settings.log_json)
    try:
        address = parse_address(join, settings.node_port)
        wanted = None if layout is None else Layout.parse(layout)
        if wanted is not None:
            wanted.ranks_per_node(NODES)
        _check_host(address[0])
        check_directory(settings.scratch)
        secret_of(settings.node_secret.get_secret_value())
    except ValueError as error:
        return _refuse(error, 2)
    scratch = Scratch(settings.scratch)
    try:
        return _serve(Node(settings, address, device, layout=wanted, scratch=scratch))
    except (ValueError, CheckpointError, CheckpointUnreadable) as error:
        return _refuse(error, 1)
    finally:
        scratch.remove()


def _refuse(error: Exception, status: int) -> int:
    print(f"rushes worker: {error}", file=sys.stderr, flush=True)
    return status


def _serve(node: Node) -> int:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        node.request_stop()

    on_stop(on_signal)
    status = node.run()
    ignore_signals()
    return status
