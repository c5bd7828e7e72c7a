"""One request to a receiver that nobody trusts: addresses that were checked, one deadline, a bounded answer."""

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from rushes_core.errors import InvalidRequest
from rushes_core.settings import Settings
from rushes_core.webhooks.guard import Address, Guard, Lookup, look_up
from yarl import URL

MAX_ANSWER_BYTES = 65_536
"""How much of an answer's body is read before the connection is closed."""
MAX_RECEIVED_BYTES = 1_048_576
"""How much is taken from a connection in all: extensions of chunks and interim answers need have no end either."""
MAX_EXCERPT_BYTES = 1_024
LOOKUP_THREADS = 1_024
"""Names whose servers are silent hold a thread each for as long as the system's resolver waits, maybe longer than the
request: twice as many as requests at once, so that no name has to wait for another."""
USER_AGENT = "Rushes-Webhooks/1"

# what the resolver found for the request of this context
_connected_to: ContextVar[list[Address]] = ContextVar("connected_to")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request went.

    Exactly one of three: `error` None, it was taken; `error` and `status`, it was answered; `error` alone.
    """

    status: int | None
    error: str | None
    duration_ms: int
    retry_after: str | None = None
    excerpt: str | None = None


class _GuardedResolver(AbstractResolver):
    """Resolves a name once and gives out only what may be connected to."""

    def __init__(self, guard: Guard, executor: ThreadPoolExecutor, lookup: Lookup) -> None:
        self._guard = guard
        self._executor = executor
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self._guard.resolve, host, port, self._lookup)
        _connected_to.get().extend(found)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in found
        ]

    async def close(self) -> None:
        pass


class _BoundedProtocol(ResponseHandler):
    """One connection, which ends when more than `MAX_RECEIVED_BYTES` came."""

    _num_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_RECEIVED_BYTES:
            super().data_received(data)
        elif self.transport is not None:
            # whoever reads the answer is told when the connection is lost
            self.transport.abort()


class _BoundedConnector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # aiohttp bounds what it keeps of a connection, and not what it reads
        self._factory = partial(_BoundedProtocol, loop=self._loop)


class Transport:
    """Makes requests between `async with` and its end.

    Args:
        lookup: addresses of a name; the system's resolver unless a test has another.
    """

    def __init__(self, settings: Settings, guard: Guard, *, lookup: Lookup = look_up) -> None:
        self._guard = guard
        self._timeout_seconds = settings.webhook_timeout_seconds
        self._executor = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")
        self._lookup = lookup

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # a connection for each request: one that was kept could have died, or its name could have moved
            connector=_BoundedConnector(
                resolver=_GuardedResolver(self._guard, self._executor, self._lookup),
                use_dns_cache=False,
                force_close=True,
                limit=0,
                ssl=ssl.create_default_context(),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            # no proxies and no passwords of the environment
            trust_env=False,
            headers={"User-Agent": USER_AGENT, "Accept": "*/*", "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send `body` once. Never raises for what the other side does."""
        began = time.monotonic()
        addresses: list[Address] = []
        _connected_to.set(addresses)
        status = retry_after = excerpt = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                target = self._guard.check_url(url)
                if target.address is not None:
                    addresses.append(target.address)
                async with self._session.post(
                    URL(target.url, encoded=True),
                    data=body,
                    headers={"Content-Type": "application/json", **headers},
                    allow_redirects=False,
                ) as response:
                    status = response.status
                    retry_after = response.headers.get("Retry-After")
                    start = await _read(response)
                    # what stands on a private network is not to be read from outside
                    if not any(map(self._guard.is_private, addresses)):
                        excerpt = _printable(start)
            error = _error_of(status)
        except Exception as problem:
            error = _word_for(problem)
        duration_ms = round((time.monotonic() - began) * 1_000)
        return Answer(status, error, duration_ms, retry_after, excerpt)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The first KB of a body that is read to its end, or to `MAX_ANSWER_BYTES`."""
    start = b""
    num_bytes = 0
    while num_bytes < MAX_ANSWER_BYTES and (chunk := await response.content.read(MAX_ANSWER_BYTES)):
        start += chunk[: MAX_EXCERPT_BYTES - len(start)]
        num_bytes += len(chunk)
    if num_bytes >= MAX_ANSWER_BYTES:
        # without reading what is still to come
        response.close()
    return start


def _printable(start: bytes) -> str | None:
    text = start.decode("utf-8", "replace")
    cleaned = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    # a character that was not UTF-8 takes more bytes now
    return cleaned.encode()[:MAX_EXCERPT_BYTES].decode("utf-8", "ignore") or None


def _error_of(status: int) -> str | None:
    if 200 <= status < 300:
        return None
    if status == HTTPStatus.GONE:
        return "gone"
    return "redirect" if 300 <= status < 400 else "http_error"


def _word_for(problem: Exception) -> str:
    """What a client is told of a failure that was no answer."""
    match problem:
        case InvalidRequest():
            return "blocked_address"
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorDNSError() | socket.gaierror() | UnicodeError():
            return "dns_failed"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return "tls_failed"
        case aiohttp.ClientConnectorError():
            return "connect_failed"
        case aiohttp.ClientResponseError():
            return "invalid_answer"
        case aiohttp.ClientError() | OSError():
            return "connection_lost"
        case _:
            raise problem
