"""Where the first node of a replica waits for the second one, and takes it back when it returns."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from rushes_core.log import get_logger

from rushes_worker.node_link import (
    SILENCE_SECONDS,
    Joined,
    NodeLink,
    Occupied,
    Welcome,
    hear,
    is_readable,
    prove,
)

log = get_logger(__name__)

_TICK_SECONDS = 0.5


class NodePort:
    """Listens until it is closed. One node is joined at a time.

    Args:
        on_change: called from another thread when a node has joined or is gone.

    Raises:
        ValueError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, secret: bytes, welcome: Welcome, on_change: Callable[[], None]) -> None:
        self._secret = secret
        self._welcome = welcome
        self._on_change = on_change
        self._lock = threading.Lock()
        self._link: NodeLink | None = None
        self._taken: NodeLink | None = None
        self._turned_away: tuple[str, str] | None = None
        """Who came in vain last, and why."""
        self._closing = threading.Event()
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            # of `create_server`, which names the address again
            reason = os.strerror(error.errno) if error.errno else error
            where = f"RUSHES_NODE_HOST={host} with RUSHES_NODE_PORT={port}"
            raise ValueError(f"{where} cannot be listened on for the other node: {reason}") from error
        self._thread = threading.Thread(target=self._run, name="node-port", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def link(self) -> NodeLink | None:
        """To the node that has joined; None while there is none."""
        link = self._link
        return None if link is None or link.is_lost else link

    def take(self) -> NodeLink | None:
        """`link`, to be used until this is called again; the one that was taken before is closed if it is lost."""
        with self._lock:
            if self._taken is not None and self._taken.is_lost:
                self._taken.close()
            link = self._taken = self.link
            return link

    def close(self) -> None:
        """Hang up and listen no more."""
        self._closing.set()
        # somebody who came a moment ago may not have proved anything yet
        self._thread.join(SILENCE_SECONDS)
        self._listener.close()
        for link in (self._link, self._taken):
            if link is not None:
                link.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if is_readable(self._listener, _TICK_SECONDS):
                with suppress(OSError):
                    connected, (address, *_) = self._listener.accept()
                    self._admit(connected, address)

    def _admit(self, connected: socket.socket, address: str) -> None:
        try:
            connection = prove(connected, self._secret, first=True)
            try:
                if self.link is not None:
                    connection.send(Occupied())
                    connected.close()
                    return
                connection.send(self._welcome)
                answer = hear(connection, 10 * SILENCE_SECONDS)
            finally:
                connection.close()
        except Exception as error:
            # also what another release of a node says and this one cannot read: the next one must find the port open
            connected.close()
            # it comes again every second
            if self._turned_away != (address, str(error)):
                self._turned_away = (address, str(error))
                log.warning("node_turned_away", address=address, error=str(error))
            return
        if not isinstance(answer, Joined):
            log.error("node_declined", address=address, reason=str(answer))
            connected.close()
            return
        self._turned_away = None
        log.info("node_joined", address=address, name=answer.name)
        with self._lock:
            before, self._link = self._link, NodeLink(connected, on_loss=self._lost)
            if before is not None and before is not self._taken:
                # it was lost before anybody needed it
                before.close()
        self._on_change()

    def _lost(self) -> None:
        if not self._closing.is_set():
            log.warning("node_lost")
            self._on_change()
