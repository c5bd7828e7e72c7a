"""A small HTTP client for load: keep-alive connections, ready-made requests, one event loop in a process of its own.

It costs some 30 microseconds a request, so that on shared cores the server's figures are the server's.
"""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import uvloop

WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests from some connections: each sends its next when the answer is there, or at the next full interval."""

    requests: Sequence[bytes]
    """Sent in turn, each connection from a place of its own; one that holds `NONCE` gets a number there."""
    connections: int
    interval_seconds: float = 0.0
    """0: the next request follows the answer at once."""


@dataclass(slots=True)
class Outcome:
    """What one `Load` saw."""

    latencies: list[float] = field(default_factory=list[float])
    statuses: Counter[int] = field(default_factory=Counter[int])
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The outcomes of loads that ran side by side."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float
    """Of this client."""


NONCE = b"{nonce}"


def get(path: str, key: str) -> bytes:
    """A GET request as it goes over the wire."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


def post(path: str, key: str, body: dict[str, Any]) -> bytes:
    """A POST request of JSON. A value may hold `NONCE`, which must then be as long as what takes its place."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load, place: int, outcome: Outcome, until: Callable[[], float]) -> None:
        self._load = load
        self._requests: Iterator[bytes] = itertools.cycle(
            [*load.requests[place % len(load.requests) :], *load.requests[: place % len(load.requests)]]
        )
        self._outcome = outcome
        self._until = until
        self._buffer = b""
        self._due = 0.0
        self._numbers = itertools.count(place * 1_000_000)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        loop = asyncio.get_running_loop()
        # pollers do not come in step
        wait = self._load.interval_seconds * (hash(id(self)) % 997) / 997
        self._due = loop.time() + wait
        loop.call_later(wait, self._send) if wait else self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self._until():
            self._transport.close()
            return
        request = next(self._requests)
        if NONCE in request:
            request = request.replace(NONCE, b"%07d" % (next(self._numbers) % 10_000_000))
        self._sent = time.perf_counter()
        self._transport.write(request)  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        fields = self._buffer[:head].lower()
        place = fields.find(b"\r\ncontent-length:") + len(b"\r\ncontent-length:")
        length = int(fields[place : fields.find(b"\r\n", place) if fields.find(b"\r\n", place) > 0 else None])
        if len(self._buffer) < head + 4 + length:
            return
        self._outcome.latencies.append(time.perf_counter() - self._sent)
        self._outcome.statuses[int(fields[9:12])] += 1
        self._outcome.num_bytes += len(self._buffer)
        self._buffer = b""
        if not self._load.interval_seconds:
            self._send()
            return
        loop = asyncio.get_running_loop()
        self._due = max(self._due + self._load.interval_seconds, loop.time())
        loop.call_at(self._due, self._send)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _run(port: int, loads: Sequence[Load], seconds: float) -> tuple[list[Outcome], float]:
    loop = asyncio.get_running_loop()
    outcomes = [Outcome() for _ in loads]
    until = time.perf_counter() + 3_600
    connections: list[_Connection] = []
    for load, outcome in zip(loads, outcomes, strict=True):
        for place in range(load.connections):
            _, made = await loop.create_connection(
                lambda load=load, place=place, outcome=outcome: _Connection(load, place, outcome, lambda: until),
                "127.0.0.1",
                port,
            )
            connections.append(made)
    began = time.perf_counter()
    until = began + seconds
    await asyncio.wait([connection.done for connection in connections], timeout=seconds + 30)
    return outcomes, time.perf_counter() - began


def _in_process(port: int, loads: Sequence[Load], seconds: float, sending: Any) -> None:
    used = time.process_time()
    outcomes, took = uvloop.run(_run(port, loads, seconds))
    sending.send(Run(outcomes, took, time.process_time() - used))


def run(port: int, loads: Sequence[Load], *, seconds: float) -> Run:
    """Put `loads` side by side on the server at `port` for `seconds`."""
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(port, loads, seconds, sending))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()
