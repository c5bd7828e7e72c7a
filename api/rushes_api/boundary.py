"""The outermost layer of a request: its id, CORS, the last resort for errors, and a bound on how long it may hang."""

import asyncio
import re
import time
from collections.abc import Iterable
from http import HTTPStatus

from rushes_core.ids import new_request_id
from rushes_core.log import get_logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from rushes_api.errors import (
    ApiError,
    OutcomeUnknown,
    Unavailable,
    body_too_slow,
    database_unavailable,
    internal_error,
    is_get_without_body,
    render,
    to_api_error,
)
from rushes_api.once import OUTCOME_UNKNOWN
from rushes_api.pulse import BEAT_SECONDS, Pulse

log = get_logger(__name__)

ANSWER_HEADERS = "rushes_answer_headers"
"""Headers in a request's scope that its answer gets, whatever it is."""

ANSWER_WITHIN = "rushes_answer_within"
"""Set in a request's scope by what may take longer than others: seconds, from the request's start."""
ASKS_DATABASE = "rushes_asks_database"
"""Set in such a request's scope once it waits for the database: one that is silent is not waited for."""
WAIT_SECONDS = 1.75
"""How long a request waits for a database that does not answer anybody."""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32_768
MAX_LOGGED_PATH = 200

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?", re.ASCII)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_EXPOSED = (
    "Accept-Ranges, Content-Disposition, Content-Length, Content-Range, ETag, Idempotent-Replayed, Retry-After, "
    "Preference-Applied, openai-poll-after-ms, x-inference-time-s, x-model, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-request-id, x-should-retry, x-video-id"
)
_ALLOWED_HEADERS = (
    "Authorization, Cancel-After, Content-Type, Idempotency-Key, If-None-Match, If-Range, Last-Event-ID, Prefer, "
    "Range, X-Request-Id"
)
_ALLOWED_METHODS = "GET, HEAD, POST, PATCH, DELETE, OPTIONS"
_HEADER_LIST = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}", re.ASCII)


class Boundary:
    """ASGI middleware around everything else: whatever happens inside, the client gets an answer with its headers."""

    def __init__(self, app: ASGIApp, *, cors_origins: Iterable[str], answer_within_seconds: float) -> None:
        self.app = app
        self._origins = frozenset(cors_origins)
        self._answer_within = answer_within_seconds
        self._abandoned: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        method = scope["method"]
        if method == "HEAD" and is_get_without_body(scope["path"]):
            # the server, which keeps its own scope, leaves the body out
            scope = {**scope, "method": "GET"}
        scope["request_id"] = request_id
        with bound_contextvars(request_id=request_id, **_trace(headers)):
            exchange = _Exchange(scope, send, {"x-request-id": request_id, **self._cors(headers)})
            try:
                if (refusal := _too_many_headers(headers)) is not None:
                    await exchange.refuse(refusal)
                elif _is_preflight(scope, headers) and self._allowed(headers):
                    await exchange.answer(_preflight(headers))
                else:
                    await self._run(scope, receive, exchange)
            finally:
                milliseconds = 1_000 * (time.perf_counter() - began)
                path = scope["path"][:MAX_LOGGED_PATH]
                log.info(
                    "request_answered", method=method, path=path, status=exchange.status, ms=round(milliseconds, 2)
                )

    async def _run(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        # a task of its own: a driver that waits for a frozen server may not react even to cancellation
        task = asyncio.create_task(self._guarded(scope, receive, exchange))
        refusal: ApiError | None = None
        try:
            await asyncio.wait({task}, timeout=min(WAIT_SECONDS, self._answer_within))
            if not task.done():
                refusal = await self._refusal(scope, exchange, task)
            if refusal is None:
                await task
                return
        except asyncio.CancelledError:
            task.cancel()
            raise
        log.warning("request_abandoned", method=scope["method"], code=refusal.code)
        exchange.closed_to_app = True
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        await exchange.refuse(refusal)

    async def _refusal(self, scope: Scope, exchange: "_Exchange", task: asyncio.Task[None]) -> ApiError | None:
        """What to answer instead of a request that takes long; None once it is being answered."""
        loop = asyncio.get_running_loop()
        began = loop.time() - WAIT_SECONDS
        pulse: Pulse | None = scope.get("state", {}).get("pulse")
        while True:
            if exchange.started or task.done():
                return None
            left = began + scope.get(ANSWER_WITHIN, self._answer_within) - loop.time()
            is_silent = pulse is not None and pulse.is_silent and not exchange.waits_for_client
            if left <= 0 or (is_silent and (ANSWER_WITHIN not in scope or ASKS_DATABASE in scope)):
                break
            await asyncio.wait({task}, timeout=min(left, BEAT_SECONDS))
        if scope.get(OUTCOME_UNKNOWN):
            return OutcomeUnknown()
        if left > 0:
            return database_unavailable()
        if exchange.waits_for_client:
            return body_too_slow()
        return Unavailable("The service did not answer in time. Try again later.", code="timeout")

    async def _guarded(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        try:
            await self.app(scope, exchange.watched(receive), exchange.send_from_app)
        except Exception as error:
            if exchange.closed_to_app:
                return
            answer = to_api_error(error)
            if answer is None:
                log.error("request_crashed", method=scope["method"], exc_info=error)
                answer = internal_error()
            if exchange.started:
                # the head is sent: only a cut connection tells the client that the body is not whole
                raise
            await exchange.refuse(answer)

    def _allowed(self, headers: Headers) -> bool:
        return "*" in self._origins or headers.get("origin", "") in self._origins

    def _cors(self, headers: Headers) -> dict[str, str]:
        if not self._origins:
            return {}
        if "origin" not in headers or not self._allowed(headers):
            return {"Vary": "Origin"}
        origin = "*" if "*" in self._origins else headers["origin"]
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin"}


class _Exchange:
    """One response on its way out."""

    def __init__(self, scope: Scope, send: Send, headers: dict[str, str]) -> None:
        self.started = False
        self.status = 0
        self.closed_to_app = False
        self.waits_for_client = False
        self._scope = scope
        self._send = send
        self._headers = headers

    def watched(self, receive: Receive) -> Receive:
        """`receive`, noting while it waits for more of the body."""

        async def noting() -> Message:
            self.waits_for_client = True
            try:
                return await receive()
            finally:
                self.waits_for_client = False

        return noting

    async def send_from_app(self, message: Message) -> None:
        if not self.closed_to_app:
            await self._forward(message)

    async def _forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            # an HTTPStatus is shown by its name
            self.status = int(message["status"])
            out = MutableHeaders(scope=message)
            for name, value in (self._headers | self._scope.get(ANSWER_HEADERS, {})).items():
                if name == "Vary":
                    out.add_vary_header(value)
                else:
                    out[name] = value
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        headers = Headers(scope=self._scope)
        await self.answer(
            render(
                error,
                request_id=self._scope["request_id"],
                path=ascii(self._scope["path"])[1:-1],
                accept=headers.get("accept", ""),
            )
        )

    async def answer(self, response: Response) -> None:
        await response(self._scope, _never, self._forward)


def _too_many_headers(headers: Headers) -> ApiError | None:
    num_bytes = sum(len(name) + len(value) for name, value in headers.raw)
    if len(headers.raw) <= MAX_HEADERS and num_bytes <= MAX_HEADER_BYTES:
        return None
    return ApiError(
        f"the request has {len(headers.raw)} headers of {num_bytes} bytes, more than the {MAX_HEADERS} headers of "
        f"{MAX_HEADER_BYTES} bytes that are read",
        code="headers_too_large",
        status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        headers={"Connection": "close"},
    )


def _trace(headers: Headers) -> dict[str, str]:
    """The trace that the request belongs to, for the log, if it says one."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return {} if found is None else {"trace_id": found[1]}


async def _never() -> Message:
    return {"type": "http.disconnect"}


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _preflight(headers: Headers) -> Response:
    wanted = headers.get("access-control-request-headers", "")
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": _ALLOWED_METHODS,
            # SDKs in a browser send headers of their own; none of them grants anything
            "Access-Control-Allow-Headers": wanted if _HEADER_LIST.fullmatch(wanted) else _ALLOWED_HEADERS,
            "Access-Control-Max-Age": "600",
            "Vary": "Access-Control-Request-Headers, Access-Control-Request-Method",
        },
    )
