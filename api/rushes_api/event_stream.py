"""Server-sent events: a stream that beats while there is nothing to tell, and lets slow or vanished clients go."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rushes_core.log import get_logger
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rushes_api.watch import Gone, until_gone

log = get_logger(__name__)

MEDIA_TYPE = "text/event-stream"
RECONNECT_MS = 2_000
SEND_SECONDS = 20.0
"""How long a client may take nothing of what is sent before it is let go."""
BEAT = ": \n\n"
"""A comment, which keeps proxies from taking the connection for dead."""

Chunks = Callable[[asyncio.Task[None]], AsyncGenerator[str]]
"""Makes the text of a stream; what it is given ends when the client has gone away."""


def event(name: str, data: str, *, event_id: int | None = None) -> str:
    """One event. `data` is one line."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data}\n\n"


class EventStream(Response):
    """Sends what `chunks` makes until it ends or the client goes. It is not started before its first chunk is there."""

    media_type = MEDIA_TYPE

    def __init__(self, chunks: Chunks) -> None:
        self.status_code = 200
        self.background = None
        # nginx collects a stream that does not forbid it
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(until_gone(receive))
        is_started = False

        async def pass_on(text: str, *, is_last: bool = False) -> None:
            nonlocal is_started
            async with asyncio.timeout(SEND_SECONDS):
                if not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

        try:
            # closed at once, and what it holds with it
            async with aclosing(self._chunks(gone)) as chunks:
                async for chunk in chunks:
                    await pass_on(chunk)
            await pass_on("", is_last=True)
        except TimeoutError:
            log.info("stream_given_up", seconds=SEND_SECONDS)
        except Gone:
            pass
        finally:
            gone.cancel()
