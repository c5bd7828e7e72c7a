"""The server as it speaks HTTP: what it reads, for how long, and what it says to those who send something else."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rushes_api.app import create_app
from rushes_api.server import Protocol
from rushes_core.settings import Settings
from support.api import API_KEY, offline_settings, served
from support.checkpoints import tiny_checkpoint
from support.commands import RUSHES, descendants
from support.ports import kept_port
from support.stack import settings_env
from support.waiting import wait_until

LINES = f"Host: a\r\nAuthorization: Bearer {API_KEY}\r\n"


class QuickProtocol(Protocol):
    """The same with less patience: a test need not wait for the real one."""

    HEAD_SECONDS = 1.0
    REST_SECONDS = 0.3


class ImpatientProtocol(Protocol):
    """Notes when a connection has ended."""

    SILENT_SECONDS = 1.0
    ended = threading.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


@contextmanager
def serving(checkpoint: Path, protocol: type[Protocol], **values: Any) -> Iterator[int]:
    """The port of a server in this process; no database, store or Redis stands behind it."""
    with served(create_app(offline_settings(checkpoint, api_max_body_bytes=50_000, **values)), protocol) as port:
        yield port


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def port(checkpoint: Path) -> Iterator[int]:
    with serving(checkpoint, Protocol) as port:
        yield port


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield connection


def received(connection: socket.socket, *, until: bytes = b"") -> bytes:
    """What comes until the server closes, or until `until` has come."""
    data = b""
    while not (until and until in data):
        try:
            chunk = connection.recv(65_536)
        except ConnectionResetError:
            break
        if not chunk:
            break
        data += chunk
    return data


def exchange(port: int, request: str | bytes) -> bytes:
    with connected(port) as connection:
        connection.sendall(request.encode() if isinstance(request, str) else request)
        return received(connection)


def error_code(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    error = json.loads(body)["error"]
    assert f"x-request-id: {error['request_id']}".encode() in head
    code: str = error["code"]
    return code


class TestHead:
    def test_it_is_get_without_the_body(self, port: int) -> None:
        got = exchange(port, f"GET /v1/models HTTP/1.1\r\n{LINES}Connection: close\r\n\r\n")
        headed = exchange(port, f"HEAD /v1/models HTTP/1.1\r\n{LINES}Connection: close\r\n\r\n")
        length = b"content-length: %d\r\n" % len(got.partition(b"\r\n\r\n")[2])
        assert headed.startswith(b"HTTP/1.1 200 ")
        assert length in headed
        assert headed.endswith(b"\r\n\r\n")

    def test_of_an_error_too(self, port: int) -> None:
        headed = exchange(port, f"HEAD /v1/nothing HTTP/1.1\r\n{LINES}Connection: close\r\n\r\n")
        assert headed.startswith(b"HTTP/1.1 404 ")
        assert headed.endswith(b"\r\n\r\n")


class TestBody:
    @pytest.mark.parametrize(("num_bytes", "is_asked_for"), [(10, True), (50_001, False)])
    def test_is_asked_for_only_when_it_would_be_read(self, port: int, num_bytes: int, is_asked_for: bool) -> None:
        lines = f"{LINES}Content-Type: application/json\r\nContent-Length: {num_bytes}\r\nExpect: 100-continue\r\n"
        with connected(port) as connection:
            connection.sendall(f"POST /v1/videos HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
            answer = received(connection, until=b"\r\n\r\n")
            if is_asked_for:
                assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
                connection.sendall(b"x" * num_bytes)
                assert error_code(received(connection), 400) == "invalid_body"
            else:
                assert error_code(answer + received(connection), 413) == "file_too_large"

    def test_one_in_chunks_is_refused_as_soon_as_it_is_too_long(self, port: int) -> None:
        with connected(port) as connection:
            lines = f"{LINES}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
            connection.sendall(f"POST /v1/videos HTTP/1.1\r\n{lines}\r\n".encode())
            connection.sendall(b"c400\r\n" + b"x" * 0xC400 + b"\r\n")
            # the last chunk never comes
            assert error_code(received(connection, until=b"}}"), 413) == "file_too_large"

    @pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
    def test_one_that_nobody_reads_is_not_waited_for(self, checkpoint: Path, framing: str) -> None:
        with serving(checkpoint, QuickProtocol) as port, connected(port) as connection:
            connection.sendall(f"POST /v1/videos HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
            answer = received(connection, until=b"}}")
            assert error_code(answer, 401) == "invalid_api_key"
            ended = threading.Event()

            def drip() -> None:
                with suppress(OSError):
                    while not ended.wait(0.05):
                        connection.sendall(b"1\r\n1\r\n")

            dripping = threading.Thread(target=drip)
            dripping.start()
            try:
                assert received(connection) == b""
            finally:
                ended.set()
                dripping.join()

    def test_one_that_comes_after_its_answer_leaves_a_connection_that_can_be_used(self, checkpoint: Path) -> None:
        with serving(checkpoint, Protocol, api_keepalive_seconds=8) as port, connected(port) as connection:
            connection.sendall(b"POST /v1/videos HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345")
            assert error_code(received(connection, until=b"}}"), 401) == "invalid_api_key"
            connection.sendall(b"67890GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert received(connection, until=b"}").startswith(b"HTTP/1.1 200 ")
            # and does not stay for ever when it is not
            assert received(connection) == b""

    def test_a_connection_is_given_up_when_nothing_follows_the_rest_of_one(self, checkpoint: Path) -> None:
        with serving(checkpoint, Protocol, api_keepalive_seconds=1) as port, connected(port) as connection:
            connection.sendall(b"POST /v1/videos HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345")
            assert error_code(received(connection, until=b"}}"), 401) == "invalid_api_key"
            connection.sendall(b"67890")
            assert received(connection) == b""

    def test_what_follows_one_in_chunks_is_no_header(self, port: int) -> None:
        lines = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        start = f"POST /v1/videos HTTP/1.1\r\nHost: a\r\n{lines}"
        end = "\r\n2\r\n[]\r\n0\r\nX-Request-Id: late\r\n"
        key = f"Authorization: Bearer {API_KEY}\r\n"
        with_key, without = (f"{start}{key}{end}Content-Type: a/b\r\n\r\n", f"{start}{end}{key}\r\n")
        for request, status, code in ((with_key, 400, "invalid_body"), (without, 401, "invalid_api_key")):
            with connected(port) as connection:
                connection.sendall(request.encode())
                answer = received(connection, until=b"}}")
            assert error_code(answer, status) == code
            assert b"x-request-id: late" not in answer


class TestBeforeThereIsARequest:
    @pytest.mark.parametrize(
        "noise",
        [
            b"hello\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /v1/\xff HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHo st: a\r\n\r\n",
        ],
        ids=["text", "tls", "http2", "path", "lengths", "smuggled", "header"],
    )
    def test_what_is_no_http_is_said_to_be_none(self, port: int, noise: bytes) -> None:
        assert error_code(exchange(port, noise), 400) == "invalid_http"

    @pytest.mark.parametrize(
        "start",
        [b"GET /", b"GET / HTTP/1.1\r\nX-Long: ", b"GET / HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 12_000],
        ids=["path", "header", "headers"],
    )
    def test_headers_without_end_are_not_read_to_it(self, port: int, start: bytes) -> None:
        assert error_code(exchange(port, start + b"a" * 200_000), 431) == "headers_too_large"

    def test_more_headers_than_anybody_needs_are_refused(self, port: int) -> None:
        many = "".join(f"X-{number}: 1\r\n" for number in range(100))
        assert error_code(exchange(port, f"GET /v1/models HTTP/1.1\r\n{LINES}{many}\r\n"), 431) == "headers_too_large"

    def test_headers_that_do_not_arrive_are_not_waited_for(self, checkpoint: Path) -> None:
        with serving(checkpoint, QuickProtocol) as port:
            assert error_code(exchange(port, "GET /healthz HTTP/1.1\r\nHost: a\r\n"), 408) == "request_timeout"
            assert exchange(port, "") == b""

    def test_a_second_request_has_its_own_time(self, checkpoint: Path) -> None:
        with serving(checkpoint, QuickProtocol) as port, connected(port) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert received(connection, until=b"}").startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert error_code(received(connection), 408) == "request_timeout"

    def test_requests_in_one_packet_are_answered_in_their_order(self, port: int) -> None:
        first = f"GET /v1/models HTTP/1.1\r\n{LINES}X-Request-Id: first\r\n\r\n"
        second = f"GET /v1/nothing HTTP/1.1\r\n{LINES}X-Request-Id: second\r\nConnection: close\r\n\r\n"
        answer = exchange(port, first + second)
        assert answer.index(b"x-request-id: first") < answer.index(b"x-request-id: second")
        assert answer.count(b"HTTP/1.1 200 ") == 1


GET_HEALTH = "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Pair:
    """A running `rushes api --workers 2`."""

    pid: int
    port: int
    folder: Path
    """Its temporary files."""

    def serving(self) -> set[int]:
        """The processes that serve."""
        found: set[int] = set()
        for pid in descendants(self.pid):
            with suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
        return found


@pytest.fixture(scope="class")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    env = os.environ | settings_env(offline_settings(checkpoint)) | {"TMPDIR": str(folder)}
    with kept_port() as port:
        command = [*RUSHES, "api", "--port", str(port), "--workers", "2"]
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                wait_until(lambda: is_up(port))
                yield Pair(server.pid, port, folder)
            finally:
                server.terminate()
        # and nothing is left of it
        assert server.returncode == 0
        assert not is_up(port)
    assert not list(folder.glob("rushes-figures-*"))


def is_up(port: int) -> bool:
    try:
        return exchange(port, GET_HEALTH)[9:12] == b"200"
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "Address already in use"), ("192.0.2.1", "Cannot assign requested address")]
)
def test_an_address_that_it_cannot_have_is_told_in_one_line(
    checkpoint: Path, host: str, reason: str, workers: str
) -> None:
    env = os.environ | settings_env(offline_settings(checkpoint)) | {"RUSHES_LOG_LEVEL": "ERROR"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*RUSHES, "api", "--host", host, "--port", str(port), "--workers", workers]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    told = f"rushes api: cannot listen on port {port} of {host}: {reason}; choose another with --host and --port\n"
    assert (ended.returncode, ended.stderr) == (1, told)


class TestTwoProcesses:
    """That serve one port."""

    def test_an_idle_connection_outlives_those_in_the_pools_of_clients(self, pair: Pair) -> None:
        assert len(pair.serving()) == 2
        patience = httpx.Limits().keepalive_expiry
        assert patience is not None
        # nginx and the load balancers of AWS keep theirs for 60 seconds
        assert Settings.model_fields["api_keepalive_seconds"].default > max(patience, 60)
        with connected(pair.port) as connection:
            for pause in (patience + 0.5, 0.0):
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
                assert received(connection, until=b"}").startswith(b"HTTP/1.1 200 ")
                time.sleep(pause)

    def test_whichever_is_scraped_tells_of_all(self, pair: Pair) -> None:
        def counted() -> list[float]:
            answer = exchange(pair.port, f"GET /metrics HTTP/1.1\r\n{LINES}Connection: close\r\n\r\n").decode()
            samples = [
                sample
                for family in text_string_to_metric_families(answer.partition("\r\n\r\n")[2])
                for sample in family.samples
            ]
            return [
                sample.value
                for sample in samples
                if (sample.name, sample.labels.get("route"))
                in (("rushes_http_requests_total", "/healthz"), ("rushes_http_request_seconds_count", "/healthz"))
            ]

        def counting() -> set[int]:
            return {int(path.stem.partition("_")[2]) for path in pair.folder.glob("rushes-figures-*/counter_*.db")}

        wait_until(lambda: is_up(pair.port) and counting() == pair.serving())
        (total, _) = counted()
        for _ in range(20):
            assert is_up(pair.port)
        assert [counted() for _ in range(10)] == [[total + 20] * 2] * 10
        # one that is killed leaves what it has counted
        victim = min(pair.serving())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(pair.serving() - {victim}) == 2)
        assert counted() == [total + 20] * 2


def test_an_idle_connection_is_closed_after_the_seconds_of_the_settings(checkpoint: Path) -> None:
    with serving(checkpoint, Protocol, api_keepalive_seconds=1) as port, connected(port) as connection:
        connection.settimeout(30)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"connection: close" not in received(connection).lower()


def test_idle_connections_take_no_more_than_half_of_the_room(checkpoint: Path) -> None:
    request = f"GET /v1/models HTTP/1.1\r\n{LINES}\r\n"
    with serving(checkpoint, Protocol, api_max_connections=10) as port, ExitStack() as stack:
        answers: list[bytes] = []
        for _ in range(30):
            connection = stack.enter_context(connected(port))
            connection.sendall(request.encode())
            answers.append(received(connection, until=b"}]}"))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        is_closed = [b"connection: close\r\n" in answer.lower() for answer in answers]
        assert is_closed == [False] * 5 + [True] * 25
        # of a request that is answered before its body has come, too
        late = stack.enter_context(connected(port))
        late.sendall(b"POST /v1/videos HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
        assert received(late, until=b"}}").startswith(b"HTTP/1.1 401 ")
        late.sendall(b"{}")
        late.settimeout(30)
        assert received(late) == b""


def test_connections_beyond_the_limit_are_told_so(checkpoint: Path) -> None:
    request = f"GET /v1/models HTTP/1.1\r\n{LINES}\r\n"
    with serving(checkpoint, Protocol, api_max_connections=10) as port, ExitStack() as stack:
        held = [stack.enter_context(connected(port)) for _ in range(10)]
        for connection in held:
            # is served, and not closed before its body has come
            connection.sendall(
                f"POST /v1/videos HTTP/1.1\r\n{LINES}Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert received(connection, until=b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        answer = exchange(port, request)
        assert error_code(answer, 503) == "overloaded"
        assert b"retry-after: 5\r\n" in answer.lower()
        assert b"connection: close\r\n" in answer.lower()
        # the process lives, and nobody is to end it
        assert is_up(port)
        # idle ones beyond that are not kept at all
        extra = [stack.enter_context(connected(port)) for _ in range(4)]
        assert received(extra[-1]) == b""
        for connection in [*extra, held[0]]:
            connection.close()
        wait_until(lambda: exchange(port, request.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n"))[9:12] == b"200")


def test_a_client_that_reads_nothing_is_dropped(checkpoint: Path) -> None:
    with serving(checkpoint, ImpatientProtocol) as port, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", port))
        # answers of far more than the kernel keeps for a connection
        connection.settimeout(5)
        with suppress(OSError):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 1_000)
        assert ImpatientProtocol.ended.wait(30)
