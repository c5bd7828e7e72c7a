"""Hearing that the server is about to stop, before it waits for the requests that are still being answered."""

import asyncio
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_termination(callback: Callable[[], None]) -> Generator[None]:
    """Call `callback` in the running loop at SIGTERM or SIGINT, and have the server's own handler called as well.

    A server ends the application's lifespan only when every answer is sent: those that are sent for as long as somebody
    listens would hold it up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def hear(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(callback)
        handler = previous[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    # where nobody handles a signal, the process ends with it
    heard = [number for number, handler in previous.items() if callable(handler)]
    for number in heard:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number in heard:
            if signal.getsignal(number) is hear:
                signal.signal(number, previous[number])
