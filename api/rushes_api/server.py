"""The HTTP server: uvicorn, with bounds on what it reads before there is a request."""

import asyncio
import gc
import resource
import socket
from contextlib import nullcontext
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI
from rushes_core.errors import RushesError
from rushes_core.ids import new_request_id
from rushes_core.log import get_logger
from rushes_core.settings import Settings
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rushes_api.app import create_app
from rushes_api.errors import ApiError, Unavailable, render
from rushes_api.figures import shared_figures

log = get_logger(__name__)

GRACEFUL_SHUTDOWN_SECONDS = 10


class Protocol(HttpToolsProtocol):
    """Closes connections whose request line and headers are too long or do not arrive, and says why.

    The parser itself would read them for ever. The application's own bounds are tighter and answer in its own words;
    these are for what never gets so far.
    """

    MAX_HEAD_BYTES = 131_072
    HEAD_SECONDS = 10.0
    REST_SECONDS = 10.0
    """How long the rest of a body may take that nobody reads, because its request is answered already."""
    SILENT_SECONDS = 60.0
    """How long a client may take nothing of what is sent to it, or confirm nothing, before the kernel drops it."""

    HARD_SHARE = 1.25
    """Of the connections that are served, how many may be open: those between are told so, further ones are closed."""
    IDLE_SHARE = 0.5
    """Of the connections that are served, how many may lie idle: a request that comes while more are open is answered
    with `Connection: close`."""

    _max_for_idle = float("inf")
    _head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        settings: Settings | None = self.app_state.get("settings")
        if settings is not None:
            self.timeout_keep_alive = settings.api_keepalive_seconds
            self._max_for_idle = self.IDLE_SHARE * settings.api_max_connections
            if len(self.connections) > self.HARD_SHARE * settings.api_max_connections:
                transport.abort()
                return
            if len(self.connections) > settings.api_max_connections:
                self.app = _Overloaded(self.app)  # pyright: ignore[reportAttributeAccessIssue]  the same in other words
        _bound_silence(transport, self.SILENT_SECONDS)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    "headers_too_large",
                    f"the request's headers are longer than {self.MAX_HEAD_BYTES} bytes",
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        if not self._is_in_head:
            self._expect_head()
            self._head_bytes = 1

    def on_header(self, name: bytes, value: bytes) -> None:
        # what follows a body in chunks looks the same, but was seen by nobody who vouches for the headers
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._is_in_body = True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        is_crowded = len(self.connections) > self._max_for_idle
        if is_crowded:
            # not before all has come: a client that still sends when the connection is closed may lose its answer
            self.cycle.keep_alive = False
        super().on_message_complete()
        if self._rest_timer is not None:
            self._stop_rest_timer()
            # uvicorn waits for the next request from the answer on, and no more since the rest has come
            self.timeout_keep_alive_task = self.loop.call_later(
                0 if is_crowded else self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(self.REST_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when it could not parse what came."""
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "what was sent is no valid HTTP request")

    def _expect_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._head_bytes:
            message = f"the request's headers did not arrive within {self.HEAD_SECONDS:g} seconds"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message)
        elif not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        request_id = new_request_id()
        log.warning("request_refused", code=code, request_id=request_id)
        error = ApiError(message, code=code, status=status, headers={"Connection": "close"})
        response = render(error, request_id=request_id, path="", accept="")
        head = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode("ascii"))]
        head += [
            b"%s: %s" % header for header in [*response.raw_headers, (b"x-request-id", request_id.encode("ascii"))]
        ]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()


class _Overloaded:
    """What serves a connection beyond those that a process serves: it says so, and closes. Whoever asks whether the
    process lives is answered: it does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/healthz":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        log.warning("request_refused", code=Overloaded.code, request_id=request_id)
        response = render(Overloaded(), request_id=request_id, path=ascii(scope["path"])[1:-1], accept="")
        response.headers["x-request-id"] = request_id
        await response(scope, receive, send)


class Overloaded(Unavailable):
    code = "overloaded"

    def __init__(self) -> None:
        super().__init__("Too many connections are open at present. Try again later.")
        self.headers["Connection"] = "close"


def _bound_silence(transport: asyncio.Transport, seconds: float) -> None:
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # the application only waits until there is room: it cannot tell a slow client from one that never reads
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1_000 * seconds))


def _allow_open_files() -> None:
    """As many as the system lets this process have: each connection is one, and the usual limit is a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_app() -> FastAPI:
    """The application of a worker process."""
    app = create_app()
    _keep_for_good()
    return app


def _keep_for_good() -> None:
    """Have the garbage collector look no more at what start-up has made, which takes longer than many a request."""
    gc.collect()
    gc.freeze()


def check_address(host: str, port: int) -> None:
    """See that this process may listen there. Uvicorn would find out once the application has started, say so between
    other lines of the log, and end with a status of its own.

    Raises:
        RushesError: it may not.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            _bind(family, kind, protocol, address)
    except OSError as error:
        raise RushesError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose another with --host and --port"
        ) from None


def _bind(family: int, kind: int, protocol: int, address: Any) -> None:
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError:
        # a family that this machine lacks, which the server passes over as well
        return
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)


def serve(app: FastAPI, *, host: str, port: int, workers: int = 1) -> None:
    """Serve until a signal. Several workers are processes that make an application each, from the environment."""
    _keep_for_good()
    _allow_open_files()
    with shared_figures() if workers > 1 else nullcontext():
        _run(app, host=host, port=port, workers=workers)


def _run(app: FastAPI, *, host: str, port: int, workers: int) -> None:
    uvicorn.run(
        app if workers == 1 else f"{__name__}:{make_app.__name__}",
        factory=workers > 1,
        workers=workers,
        host=host,
        port=port,
        loop="uvloop",
        http=Protocol,
        ws="none",
        log_config=None,
        # the application writes a line for each request itself
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
        # a worker that has to share its core with too much else is slow, not dead
        timeout_worker_healthcheck=30,
    )
