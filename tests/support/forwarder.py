"""A door to a server that a test can open and shut: TCP connections are passed on while it is open, refused and cut
while it is not."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Forwarder:
    """Forwards `127.0.0.1:port` to the host and port of `url`; shut until `open`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._bind(0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{parts.scheme}://127.0.0.1:{self.port}"
        self._acceptor: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut()
        self._listener.close()

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.listen()
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def shut(self) -> None:
        """Cut every connection and refuse new ones."""
        self._cut()
        self._listener.close()
        self._bind(self.port)

    def _bind(self, port: int) -> None:
        # bound and not listening: the port is refused, and nobody else's
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))

    def _cut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor is not None:
            self._acceptor.join()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()
        self._threads, self._sockets = [], []

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    # nobody is behind the door yet, or any more
                    client.close()
                    continue
                self._sockets += [client, server]
                self._start(_copy, client, server)
                self._start(_copy, server, client)

    def _start(self, target: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
