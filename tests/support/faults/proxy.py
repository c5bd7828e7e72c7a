"""Proxies that break what passes through them: one for any TCP protocol, one that understands S3's HTTP.

Each listens on a free port of 127.0.0.1 and runs in a thread of its own. A mode is changed from any thread and holds
for open connections too.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

_CHUNK = 65_536
_POLL_SECONDS = 0.02
_HANG_SECONDS = 120.0


class Mode(StrEnum):
    """What a TCP proxy does to a connection."""

    PASS = "pass"
    LATENCY = "latency"
    """Every chunk waits for `seconds`."""
    BLACK_HOLE = "black hole"
    """Nothing passes and nothing is closed; what was sent meanwhile arrives when the mode changes."""
    RST = "rst"
    """Every connection, open or new, is reset."""
    HALF_CLOSE = "half close"
    """The client sees the end of the server's stream, and may go on sending."""
    BANDWIDTH = "bandwidth"
    """`bytes_per_second` in each direction of each connection."""
    CUT_AFTER = "cut after"
    """Reset once the server has sent `num_bytes` on a connection."""
    LOSE_REPLY = "lose reply"
    """The server gets what holds one of `triggers`, and its answer is lost with the connection."""
    REPLY_THEN_CUT = "reply then cut"
    """The same, with the connection reset after the answer."""


@dataclass
class Fault:
    """A mode and its numbers; `budget` bounds how often LOSE_REPLY and REPLY_THEN_CUT strike."""

    mode: Mode = Mode.PASS
    seconds: float = 0.0
    bytes_per_second: int = 10_000
    num_bytes: int = 0
    # to the NUL that ends it: a transaction may also begin with ISOLATION LEVEL READ COMMITTED
    triggers: tuple[bytes, ...] = (b"COMMIT\0",)
    probability: float = 1.0
    budget: int = 1_000_000


class _Proxy:
    """The thread, the loop and the listener."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self.strikes = 0
        """How often the fault did something to a request."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, sock=self._listener)
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # transports that were aborted are closed in the next turns of the loop
        await asyncio.sleep(0.05)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._handle(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class TcpProxy(_Proxy):
    """Breaks connections of any protocol."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        super().__init__(host, port, seed=seed)
        self._fault = Fault()
        self._open: set[_Connection] = set()

    def set(self, mode: Mode, **numbers: Any) -> None:
        """Change the mode of all connections, open and new."""
        self._fault = Fault(mode, **numbers)
        if mode is Mode.RST:
            self.cut()
        if mode is Mode.HALF_CLOSE:
            self._loop.call_soon_threadsafe(lambda: [one.half_close() for one in list(self._open)])

    def cut(self) -> None:
        """Reset every open connection."""
        self._loop.call_soon_threadsafe(lambda: [one.reset() for one in list(self._open)])

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault.mode is Mode.RST:
            _reset(writer)
            return
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        connection = _Connection(writer, server_writer)
        self._open.add(connection)
        upward = asyncio.create_task(self._pump(connection, reader, server_writer, up=True))
        downward = asyncio.create_task(self._pump(connection, server_reader, writer, up=False))
        try:
            await asyncio.gather(upward, downward)
        finally:
            upward.cancel()
            downward.cancel()
            await asyncio.gather(upward, downward, return_exceptions=True)
            self._open.discard(connection)
            server_writer.transport.abort()

    async def _pump(
        self, connection: "_Connection", reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        try:
            while data := await reader.read(_CHUNK):
                while self._fault.mode is Mode.BLACK_HOLE:
                    await asyncio.sleep(_POLL_SECONDS)
                if not await self._passes(connection, data, writer, up=up):
                    connection.reset()
                    return
            writer.write_eof()
        except OSError:
            connection.reset()

    async def _passes(self, connection: "_Connection", data: bytes, writer: asyncio.StreamWriter, *, up: bool) -> bool:
        """Hand `data` on as the mode has it; False: the connection is to be reset."""
        fault = self._fault
        if fault.mode is Mode.RST:
            return False
        if fault.mode is Mode.LATENCY:
            await asyncio.sleep(fault.seconds)
        if fault.mode is Mode.BANDWIDTH:
            await asyncio.sleep(len(data) / fault.bytes_per_second)
        if fault.mode is Mode.HALF_CLOSE and not up:
            connection.half_close()
            return True
        if fault.mode in (Mode.LOSE_REPLY, Mode.REPLY_THEN_CUT) and up:
            holds = any(trigger in data for trigger in fault.triggers)
            struck = holds and fault.budget > 0 and self._random.random() < fault.probability
            if struck:
                fault.budget -= 1
                self.strikes += 1
                connection.doomed = fault.mode
        if not up and connection.doomed is Mode.LOSE_REPLY:
            return False
        if fault.mode is Mode.CUT_AFTER and not up:
            connection.num_down += len(data)
            if connection.num_down > fault.num_bytes:
                writer.write(data[: max(0, len(data) - (connection.num_down - fault.num_bytes))])
                self.strikes += 1
                return False
        writer.write(data)
        await writer.drain()
        if not up and connection.doomed is Mode.REPLY_THEN_CUT:
            # the answer must have left before the connection is reset
            await asyncio.sleep(0.05)
            return False
        return True


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    doomed: Mode | None = None
    num_down: int = 0

    def reset(self) -> None:
        for writer in (self.client, self.server):
            _reset(writer)

    def half_close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.client.write_eof()


@dataclass
class Request:
    """One HTTP request on its way to the store."""

    method: str
    target: str
    head: bytes
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class S3Fault(StrEnum):
    """What the S3 proxy does to a request."""

    PASS = "pass"
    SLOW_DOWN = "503"
    """503 SlowDown before anything is forwarded."""
    ERROR_AFTER_BODY = "500"
    """The body is received, nothing is stored, 500."""
    REPLY_LOST = "reply lost"
    """The store answers, and the connection is reset instead."""
    HANG_AFTER_BODY = "hang"
    """The store has the object, and no answer ever comes."""
    FLIP = "flip"
    """One bit of the body is another."""
    TRUNCATE_REPLY = "truncate reply"
    """Half of the answer's body, then the end of the connection."""
    SLOW = "slow"
    """The body is taken at `bytes_per_second`."""
    REFUSE = "refuse"
    """The connection is reset at once."""
    MOVED = "301"
    """301 without more, as what stands before a store says of http:// when it wants https://."""
    NO_UPLOAD = "no upload"
    """404 NoSuchUpload, as some stores say of a multipart upload that was completed already."""
    NO_CHECKSUMS = "no checksums"
    """The answer tells none, as that of a store that keeps none."""
    WHOLE_CHECKSUM = "whole checksum"
    """Whoever asks for the checksum of a part is told that of the whole, as some stores do."""
    NO_RANGE = "no range"
    """The answer does not say that it is a part."""


Rule = Callable[[Request], S3Fault]


class S3Proxy(_Proxy):
    """Breaks requests to an S3 store. `rule` decides for each; the Host header passes unchanged, for it is signed."""

    def __init__(self, host: str, port: int, *, seed: int = 0) -> None:
        super().__init__(host, port, seed=seed)
        self.rule: Rule = _all_pass
        self.bytes_per_second = 10_000
        self.seen: list[tuple[str, str, S3Fault]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Let everything pass."""
        self.rule = _all_pass

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _read_head(reader):
            method, target, headers = _parse_head(head)
            request = Request(method, target, head, b"", headers)
            fault = self.rule(request)
            self.seen.append((method, target, fault))
            if fault is not S3Fault.PASS:
                self.strikes += 1
            if fault is S3Fault.REFUSE:
                _reset(writer)
                return
            if fault is S3Fault.SLOW_DOWN:
                await _answer(writer, 503, "SlowDown")
                # the body that the client may be sending would be read as the next request
                return
            request.body = await self._read_body(reader, writer, headers, slow=fault is S3Fault.SLOW)
            if fault is S3Fault.ERROR_AFTER_BODY:
                await _answer(writer, 500, "InternalError")
                return
            if fault is S3Fault.MOVED:
                await _answer(writer, 301, "Moved")
                return
            if fault is S3Fault.NO_UPLOAD:
                await _answer(writer, 404, "NoSuchUpload")
                return
            if fault is S3Fault.FLIP and request.body:
                middle = len(request.body) // 2
                flipped = bytes([request.body[middle] ^ 1])
                request.body = request.body[:middle] + flipped + request.body[middle + 1 :]
            if not await self._forward(request, writer, fault):
                return

    async def _read_body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str], *, slow: bool
    ) -> bytes:
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        left = int(headers.get("content-length", "0"))
        parts = []
        while left > 0:
            part = await reader.read(min(left, 1_000 if slow else _CHUNK))
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            parts.append(part)
            left -= len(part)
            if slow:
                await asyncio.sleep(len(part) / self.bytes_per_second)
        return b"".join(parts)

    async def _forward(self, request: Request, writer: asyncio.StreamWriter, fault: S3Fault) -> bool:
        """Ask the store on a connection of its own; False: the client's connection is over."""
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        try:
            lines = request.head.split(b"\r\n")[:-2]
            kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
            server_writer.write(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + request.body)
            await server_writer.drain()
            answer = await server_reader.read(-1)
        finally:
            server_writer.transport.abort()
        if fault is S3Fault.REPLY_LOST:
            _reset(writer)
            return False
        if fault is S3Fault.HANG_AFTER_BODY:
            for _ in range(int(_HANG_SECONDS / _POLL_SECONDS)):
                if self.rule is _all_pass:
                    break
                await asyncio.sleep(_POLL_SECONDS)
            _reset(writer)
            return False
        if fault is S3Fault.NO_CHECKSUMS:
            answer = _without(answer, b"x-amz-checksum-")
        if fault is S3Fault.WHOLE_CHECKSUM and "x-amz-checksum-mode" in request.headers:
            answer = answer.replace(b"\r\n", b"\r\nx-amz-checksum-crc32: 4AAr8A==\r\n", 1)
        if fault is S3Fault.NO_RANGE:
            answer = _without(answer, b"content-range:").replace(b" 206 Partial Content\r\n", b" 200 OK\r\n", 1)
        if fault is S3Fault.TRUNCATE_REPLY:
            head, _, body = answer.partition(b"\r\n\r\n")
            answer = head + b"\r\n\r\n" + body[: len(body) // 2]
        writer.write(answer)
        await writer.drain()
        # the store was told to close, and its answer says so to the client
        writer.close()
        return False


def _all_pass(request: Request) -> S3Fault:
    return S3Fault.PASS


def _without(answer: bytes, header: bytes) -> bytes:
    head, end, body = answer.partition(b"\r\n\r\n")
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(header)) + end + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: the peer sees a connection that broke, not one that ended."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines if line)
    return method, target, {name.lower(): value.strip() for name, _, value in pairs}


async def _answer(writer: asyncio.StreamWriter, status: int, code: str) -> None:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>fault</Message></Error>'.encode()
    writer.write(
        b"HTTP/1.1 %d Fault\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % (status, len(body))
        + body
    )
    await writer.drain()
    writer.close()
