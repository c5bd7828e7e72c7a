"""A stream of events whose client is slow, vanishes, or never was."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from rushes_api import event_stream
from rushes_api.event_stream import EventStream, event
from starlette.types import Message


class Client:
    """The server's side of a connection. `reads` messages are taken, then none any more."""

    def __init__(self, *, reads: int = 1_000) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._reads = reads

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_an_event_is_a_block_of_lines() -> None:
    assert event("status", "{}", event_id=3) == "id: 3\nevent: status\ndata: {}\n\n"
    assert event("progress", "{}") == "event: progress\ndata: {}\n\n"


def test_the_whole_stream_is_sent() -> None:
    async def chunks(gone: asyncio.Task[None]) -> AsyncGenerator[str]:
        yield "one\n\n"
        yield "two\n\n"

    async def run() -> None:
        client = Client()
        await EventStream(chunks)({}, client.receive, client.send)
        assert client.body == b"one\n\ntwo\n\n"
        assert client.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SEND_SECONDS", 0.05)
    is_closed = False

    async def chunks(gone: asyncio.Task[None]) -> AsyncGenerator[str]:
        nonlocal is_closed
        try:
            while True:
                yield "more\n\n"
        finally:
            is_closed = True

    async def run() -> None:
        client = Client(reads=3)
        await asyncio.wait_for(EventStream(chunks)({}, client.receive, client.send), 10)
        # not whole: the server cuts the connection
        assert client.sent[-1]["more_body"] is True
        assert is_closed

    asyncio.run(run())


def test_what_fails_before_the_first_chunk_is_not_started() -> None:
    async def chunks(gone: asyncio.Task[None]) -> AsyncGenerator[str]:
        raise LookupError("no seat")
        yield ""

    async def run() -> None:
        client = Client()
        with pytest.raises(LookupError):
            await EventStream(chunks)({}, client.receive, client.send)
        assert client.sent == []

    asyncio.run(run())
