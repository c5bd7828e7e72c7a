"""A TCP relay that can be frozen: connections stay open and nothing passes, as with a host that stopped answering."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rushes_core.settings import Settings
from sqlalchemy import make_url


class FreezableProxy:
    """Relays a free port of 127.0.0.1 to `host:port`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._flowing = threading.Event()
        self._flowing.set()
        self._stranded: list[threading.Event] = []
        self._num_held = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def strand(self) -> None:
        """Freeze the connections of now for good; new ones flow."""
        self._flowing.clear()
        self._stranded.append(self._flowing)
        self._flowing = threading.Event()
        self._flowing.set()

    @property
    def num_held(self) -> int:
        """How often something was sent on a frozen or stranded connection, and did not arrive at once."""
        return self._num_held

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for flowing in (self._flowing, *self._stranded):
            flowing.set()
        # what is just being accepted is among the sockets once nothing is accepted any more
        _close(self._listener)
        self._threads[0].join()
        for open_socket in self._sockets:
            _close(open_socket)
        for thread in self._threads:
            thread.join()

    def _spawn(self, run: object, *args: object) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target)
                self._sockets.append(server)
                flowing = self._flowing
                self._spawn(self._relay, client, server, flowing)
                self._spawn(self._relay, server, client, flowing)

    def _relay(self, source: socket.socket, target: socket.socket, flowing: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if not flowing.is_set():
                    self._num_held += 1
                flowing.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _close(open_socket: socket.socket) -> None:
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
    open_socket.close()


@contextmanager
def relayed(settings: Settings) -> Iterator[tuple[Settings, FreezableProxy]]:
    """The settings with the database behind a proxy."""
    url = make_url(settings.database_url)
    assert url.host is not None
    assert url.port is not None
    with FreezableProxy(url.host, url.port) as proxy:
        yield behind(proxy, settings), proxy


def behind(proxy: FreezableProxy, settings: Settings) -> Settings:
    url = make_url(settings.database_url).set(host="127.0.0.1", port=proxy.port)
    return settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})
