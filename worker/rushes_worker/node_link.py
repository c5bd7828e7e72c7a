"""What the two nodes of a replica say to each other, over one connection that tells soon when the other is gone.

Messages are pickled, so they are read only from a peer that has proved that it knows the secret; the network between
the nodes is taken to be private, as the ranks' own traffic has to take it.
"""

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from rushes_core.contract import InferenceContract
from rushes_core.errors import RushesError
from rushes_core.log import get_logger

from rushes_worker.commands import Boot, Command, Report
from rushes_worker.wake import Wake

log = get_logger(__name__)

PULSE_SECONDS = 0.5
SILENCE_SECONDS = 3.0
"""Without a word for so long the other node counts as lost, on both; the time to end the ranks comes on top. Tests hold
that ranks end then, not how soon."""

MIN_SECRET = 16


class NotTrusted(RushesError):
    """The other side does not know the secret, or is no node of Rushes."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the node that joins must match, and what it is to run."""

    version: str
    contract: InferenceContract
    kind: str
    layout: str
    options: tuple[str, ...] | None
    """What the pipeline is asked for; None: it is another than this repository's."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """Another node has joined and is alive."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The node that joins matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Pulse:
    pass


@dataclass(frozen=True, slots=True)
class StartRanks:
    epoch: int
    boots: tuple[Boot, ...]


@dataclass(frozen=True, slots=True)
class ToRank:
    epoch: int
    rank: int
    command: Command


@dataclass(frozen=True, slots=True)
class DumpStacks:
    epoch: int


@dataclass(frozen=True, slots=True)
class EndRanks:
    epoch: int


@dataclass(frozen=True, slots=True)
class FromRank:
    epoch: int
    rank: int
    report: Report
    data: bytes | None
    """What is in the file that the report names."""


@dataclass(frozen=True, slots=True)
class RankExited:
    epoch: int
    rank: int
    how: str | None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The second node was asked to stop: it goes when this epoch has ended, or its grace period."""

    epoch: int


class NodeLink:
    """One side of the connection. Threads of its own listen and say that this side lives.

    Args:
        connected: a socket on which both sides have proved themselves.
        on_loss: called once from a thread of the link when the other side is gone.
    """

    def __init__(self, connected: socket.socket, *, on_loss: Callable[[], None] = lambda: None) -> None:
        self._socket = connected
        self._connection = Connection(socket.dup(connected.fileno()))
        self._on_loss = on_loss
        self._sending = threading.Lock()
        self._inbox: deque[Any] = deque()
        self._wake = Wake()
        self._lost = threading.Event()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._listen, name="node-listener", daemon=True),
            threading.Thread(target=self._pulse, name="node-pulse", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    @property
    def own_address(self) -> str:
        """Of this machine, as the other side sees it."""
        address: str = self._socket.getsockname()[0]
        return address

    def fileno(self) -> int:
        """Readable when there is something to receive or the other side is gone."""
        return self._wake.fileno()

    def send(self, message: object) -> None:
        """Say `message`; what cannot be said because the other side is gone shows in `is_lost`."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self._lose()

    def receive(self) -> list[Any]:
        """What has come, pulses apart."""
        self._wake.clear()
        messages = []
        with suppress(IndexError):
            while True:
                messages.append(self._inbox.popleft())
        return messages

    def close(self) -> None:
        """Hang up; nobody may wait for the link any more."""
        if self._closed:
            return
        self._closed = True
        self._lose()
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self._socket.close()
        self._wake.close()

    def _listen(self) -> None:
        try:
            while self._connection.poll(SILENCE_SECONDS):
                message = self._connection.recv()
                if not isinstance(message, Pulse):
                    self._inbox.append(message)
                    self._wake.poke()
        except (EOFError, OSError):
            pass
        except Exception as error:
            # of another release, perhaps: this one would wait for what it cannot read
            log.warning("node_unreadable", error=repr(error))
        finally:
            self._lose()

    def _pulse(self) -> None:
        while not self._lost.wait(PULSE_SECONDS):
            self.send(Pulse())

    def _lose(self) -> None:
        if self._lost.is_set():
            return
        self._lost.set()
        # the listener may be in the middle of a read
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._wake.poke()
        self._on_loss()


def bound_waits(connected: socket.socket) -> None:
    """Have every read and write fail that makes no progress for `SILENCE_SECONDS`."""
    limit = struct.pack("ll", int(SILENCE_SECONDS), int(SILENCE_SECONDS % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def prove(connected: socket.socket, secret: bytes, *, first: bool) -> Connection:
    """A connection over a copy of the socket whose two ends have proved to each other that they know the secret.

    Args:
        first: whether this side challenges before it is challenged.

    Raises:
        NotTrusted: the other side does not know it.
        OSError: the connection broke, or the other side was silent.
    """
    bound_waits(connected)
    connection = Connection(socket.dup(connected.fileno()))
    try:
        for challenge in (first, not first):
            (deliver_challenge if challenge else answer_challenge)(connection, secret)
    except (AuthenticationError, EOFError, AssertionError, ValueError) as error:
        connection.close()
        raise NotTrusted("the other node does not know RUSHES_NODE_SECRET, or is none") from error
    except OSError as error:
        connection.close()
        if isinstance(error, BlockingIOError):
            raise _silence(SILENCE_SECONDS) from error
        raise
    return connection


def hear(connection: Connection, seconds: float) -> Any:
    """The next message of a peer that has proved itself.

    Raises:
        OSError: none came in time, or the connection broke.
    """
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv()
    except EOFError as error:
        raise ConnectionResetError("the other node hung up") from error
    raise _silence(seconds)


def _silence(seconds: float) -> TimeoutError:
    return TimeoutError(f"the other node said nothing for {seconds:g} s")


def secret_of(text: str) -> bytes:
    """The secret as the nodes use it.

    Raises:
        ValueError: it is too short to be one.
    """
    if len(text) < MIN_SECRET:
        raise ValueError(f"RUSHES_NODE_SECRET must have at least {MIN_SECRET} characters, got {len(text)}")
    return text.encode()


def is_readable(connected: socket.socket, seconds: float) -> bool:
    """Whether something, or the end, can be read within `seconds`."""
    return bool(select.select([connected], [], [], seconds)[0])
