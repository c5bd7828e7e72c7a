"""An end for what waits for a server that fell silent: a driver would wait for ever, and is slow to be cancelled."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

WAIT_SECONDS = 10.0
"""How long what a process asks of its own accord may take: as long as the database lets a statement run."""
_CANCEL_SECONDS = 1.0
"""How long the server may take to cancel what is given up."""

_Result = TypeVar("_Result")
_ending: "set[asyncio.Task[None]]" = set()


async def within(work: Coroutine[Any, Any, _Result], seconds: float | None = None) -> _Result:
    """What `work` returns.

    Args:
        seconds: `WAIT_SECONDS` without it.

    Raises:
        TimeoutError: it takes longer. It is ended while the caller goes on.
        asyncio.CancelledError: it has ended, unless this was cancelled twice.
    """
    seconds = WAIT_SECONDS if seconds is None else seconds
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        # whoever is told a second time to end does not take along what ends the work
        await asyncio.shield(_end_meanwhile(task))
        raise
    if done:
        return task.result()
    _end_meanwhile(task)
    raise TimeoutError(f"no answer within {seconds:g} s")


def _end_meanwhile(task: "asyncio.Task[Any]") -> "asyncio.Task[None]":
    ending = asyncio.create_task(end({task}))
    _ending.add(ending)
    ending.add_done_callback(_ending.discard)
    return ending


async def end(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel them, and return when they have ended. The driver has the server cancel what it does, and waits for that;
    told again, it cuts the connection."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=_CANCEL_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # nobody wants to know any more
