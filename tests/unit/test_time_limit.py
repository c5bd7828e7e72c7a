"""What takes too long is ended, whatever becomes of those who wanted it."""

import asyncio

import pytest
from rushes_core import time_limit


def test_work_ends_though_its_caller_is_cancelled_once_more_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "_CANCEL_SECONDS", 0.05)

    async def tell() -> None:
        told, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            # as the driver does: first it waits for the server to cancel what it does
            for event in (told, ended):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    event.set()
            raise asyncio.CancelledError

        caller = asyncio.create_task(time_limit.within(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await told.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        async with asyncio.timeout(10):
            await ended.wait()

    asyncio.run(tell())
