"""The fault proxies do to a connection what their modes say."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from support.faults.proxy import Mode, S3Fault, S3Proxy, TcpProxy


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65_536):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                threading.Thread(target=serve, args=(accepted[-1],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in accepted:
        connection.close()


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[TcpProxy]:
    with TcpProxy(*echo) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        yield client


def until_reset(client: socket.socket) -> bytes:
    """What arrives before the connection is reset; it must not end otherwise."""
    got = b""
    try:
        while data := client.recv(100):
            got += data
    except ConnectionResetError:
        return got
    raise AssertionError(f"ended in peace after {got!r}")


class TestTcp:
    def test_black_hole_keeps_what_it_swallows(self, proxy: TcpProxy, client: socket.socket) -> None:
        proxy.set(Mode.BLACK_HOLE)
        client.sendall(b"lost?")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(100)
        client.settimeout(5)
        proxy.set(Mode.PASS)
        assert client.recv(100) == b"lost?"

    def test_rst_breaks_open_and_new_connections(self, proxy: TcpProxy, client: socket.socket) -> None:
        proxy.set(Mode.RST)
        assert until_reset(client) == b""
        # a new one may be reset before it is even told that it is open
        address = ("127.0.0.1", proxy.port)
        with contextlib.suppress(ConnectionResetError), socket.create_connection(address, timeout=5) as another:
            assert until_reset(another) == b""

    def test_half_closed_connection_still_takes_data(self, proxy: TcpProxy, client: socket.socket) -> None:
        proxy.set(Mode.HALF_CLOSE)
        assert client.recv(100) == b""
        client.sendall(b"still here")

    def test_latency_and_bandwidth_delay(self, proxy: TcpProxy, client: socket.socket) -> None:
        for mode, numbers in ((Mode.LATENCY, {"seconds": 0.2}), (Mode.BANDWIDTH, {"bytes_per_second": 100})):
            proxy.set(mode, **numbers)
            began = time.monotonic()
            client.sendall(b"x" * 20)
            assert client.recv(100) == b"x" * 20
            assert time.monotonic() - began >= 0.4

    def test_connection_is_cut_after_so_many_bytes(self, proxy: TcpProxy, client: socket.socket) -> None:
        proxy.set(Mode.CUT_AFTER, num_bytes=3)
        client.sendall(b"abcdef")
        assert until_reset(client) in (b"", b"abc")
        assert proxy.strikes == 1

    @pytest.mark.parametrize(("mode", "answer"), [(Mode.LOSE_REPLY, b""), (Mode.REPLY_THEN_CUT, b"COMMIT\0")])
    def test_only_what_holds_the_trigger_is_struck(
        self, proxy: TcpProxy, client: socket.socket, mode: Mode, answer: bytes
    ) -> None:
        proxy.set(mode, budget=1)
        client.sendall(b"SELECT")
        assert client.recv(100) == b"SELECT"
        client.sendall(b"COMMIT\0")
        assert until_reset(client) == answer


class _Store(BaseHTTPRequestHandler):
    bodies: list[bytes]
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def bodies() -> list[bytes]:
    """What the store was sent."""
    return []


@pytest.fixture
def s3(bodies: list[bytes]) -> Iterator[S3Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Store", (_Store,), {"bodies": bodies}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with S3Proxy("127.0.0.1", server.server_port) as proxy:
        yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def put(s3: S3Proxy, fault: S3Fault) -> httpx.Response:
    s3.rule = lambda request: fault
    return httpx.put(f"{s3.url}/bucket/results/a", content=b"0123456789", timeout=1, trust_env=False)


class TestS3:
    def test_passes(self, s3: S3Proxy, bodies: list[bytes]) -> None:
        assert put(s3, S3Fault.PASS).text == "done"
        assert bodies == [b"0123456789"]

    @pytest.mark.parametrize(("fault", "status"), [(S3Fault.SLOW_DOWN, 503), (S3Fault.ERROR_AFTER_BODY, 500)])
    def test_refuses_and_stores_nothing(self, s3: S3Proxy, bodies: list[bytes], fault: S3Fault, status: int) -> None:
        assert put(s3, fault).status_code == status
        assert bodies == []

    @pytest.mark.parametrize("fault", [S3Fault.REPLY_LOST, S3Fault.HANG_AFTER_BODY])
    def test_stores_and_does_not_say_so(self, s3: S3Proxy, bodies: list[bytes], fault: S3Fault) -> None:
        with pytest.raises(httpx.TransportError):
            put(s3, fault)
        assert bodies == [b"0123456789"]

    def test_flips_one_bit(self, s3: S3Proxy, bodies: list[bytes]) -> None:
        assert put(s3, S3Fault.FLIP).text == "done"
        assert bodies == [b"0123446789"]

    def test_truncates_the_answer(self, s3: S3Proxy) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            put(s3, S3Fault.TRUNCATE_REPLY)

    def test_takes_its_time(self, s3: S3Proxy, bodies: list[bytes]) -> None:
        s3.bytes_per_second = 20
        began = time.monotonic()
        assert put(s3, S3Fault.SLOW).text == "done"
        assert time.monotonic() - began >= 0.5
        assert bodies == [b"0123456789"]
