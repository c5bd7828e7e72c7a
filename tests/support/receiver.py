"""Receivers of webhooks in tests: what clients run, and what hostile ones do instead."""

import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def event_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def signed(self) -> dict[str, str]:
        """What a verifier looks at."""
        return {name: value for name, value in self.headers.items() if name.startswith("webhook-")}


Behaviour = Callable[[socket.socket, Received], None]
"""What is done with a connection after the request was read."""


def reply(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    """An answer; underscores in names of headers stand for hyphens."""

    def behave(connection: socket.socket, received: Received) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    return behave


def hang(connection: socket.socket, received: Received) -> None:
    """Say nothing until the other side leaves."""
    while connection.recv(65_536):
        pass


def reset(connection: socket.socket, received: Received) -> None:
    """End the connection in the middle of the body."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drip(start: bytes, piece: bytes, seconds: float = 0.05) -> Behaviour:
    """Send `start`, then `piece` again and again until the other side leaves."""

    def behave(connection: socket.socket, received: Received) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            time.sleep(seconds)

    return behave


class Receiver:
    """Listens on 127.0.0.1 between `with` and its end. Every path answers 200 unless it was told otherwise.

    Args:
        tls: a certificate with its key, as one PEM file.
        greet: False: connections are accepted and not read, so that a TLS handshake never ends.
    """

    def __init__(self, *, tls: Path | None = None, greet: bool = True) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.scheme = "http" if tls is None else "https"
        self._tls = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls)
        self._greet = greet
        self.received: list[Received] = []
        self._scripts: dict[str, deque[Behaviour]] = defaultdict(deque)
        self._always: dict[str, Behaviour] = {}
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def script(self, path: str, *behaviours: Behaviour) -> None:
        """What the next requests to `path` meet, one after the other."""
        self._scripts[path].extend(behaviours)

    def always(self, path: str, behaviour: Behaviour) -> None:
        """What every request to `path` meets that has no script."""
        self._always[path] = behaviour

    def at(self, path: str) -> list[Received]:
        """Requests to `path` so far."""
        return [one for one in self.received if one.path == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End every connection."""
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        with suppress(OSError), connection:
            if not self._greet:
                while connection.recv(65_536):
                    pass
                return
            if self._tls is not None:
                with self._tls.wrap_socket(connection, server_side=True) as wrapped:
                    self._answer(wrapped)
            else:
                self._answer(connection)
        self._open.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65_536)
            if not piece:
                return
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        while len(body) < int(headers.get("content-length", "0")):
            body += connection.recv(65_536)
        received = Received(first.split(" ")[1], headers, body)
        script = self._scripts[received.path]
        behaviour = script.popleft() if script else self._always.get(received.path, reply(200))
        self.received.append(received)
        behaviour(connection, received)


def make_certificate(folder: Path, name: str, *, address: str | None = None, days: int = 1) -> Path:
    """A certificate that signs itself, for `name` and `address`; negative `days`: it has expired. One PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names: list[Any] = [x509.DNSName(name)]
    if address is not None:
        names.append(x509.IPAddress(IPv4Address(address)))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}-{days}.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
