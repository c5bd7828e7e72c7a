"""What the jobs of a key may take: places in the queue, GPU time of a day, classes of priority."""

from http import HTTPStatus

from rushes_core import keys
from rushes_core.fields import PRIORITIES, counted
from rushes_core.holds import open_holds
from rushes_core.models import Job
from rushes_core.video import PRIORITY_NAMES
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.auth import Caller
from rushes_api.errors import ApiError
from rushes_api.limits import WINDOW_SECONDS, too_many

QUEUE_FULL_RETRY_SECONDS = 10


def check_priority(priority: int, *, caller: Caller) -> None:
    """
    Raises:
        ApiError: 403 `priority_not_allowed`: the caller's jobs may not have it.
    """
    word = PRIORITY_NAMES[priority]
    if word not in caller.priorities:
        allowed = ", ".join(one for one in PRIORITIES if one in caller.priorities)
        raise ApiError(
            f"this API key may not use priority {word}; allowed: {allowed}",
            param="priority",
            code="priority_not_allowed",
            status=HTTPStatus.FORBIDDEN,
        )


async def reserve_place(session: AsyncSession, *, caller: Caller, api_key: str | None, priority: int) -> None:
    """Make sure that a job may be queued. To be called in the transaction that inserts it or queues it again, before
    that: until its end no other one queues a job of a key with `max_queued`. The GPU-seconds of the day need no such
    lock: they are counted when attempts end, so that what is accepted at the same time changes nothing of them.

    Args:
        api_key: the key that the job counts against; of a job that is queued again, the one that it was sent with.

    Raises:
        ApiError: 403 `priority_not_allowed`, 429 `queue_full` or `quota_exceeded`.
    """
    check_priority(priority, caller=caller)
    is_unlimited = caller.max_queued is None and caller.daily_gpu_seconds is None
    if api_key is None or (api_key == caller.api_key and is_unlimited):
        return
    found = None
    if api_key == caller.api_key and caller.max_queued is None:
        found = (await session.execute(keys.limits(api_key))).first()
    if found is None or found[0] is not None:
        found = (await session.execute(keys.lock_limits(api_key))).first()
    if found is None:
        return
    max_queued, daily_gpu_seconds = found
    if max_queued is not None:
        num_queued = (await session.execute(keys.num_queued(api_key, at_most=max_queued))).scalar_one()
        if num_queued >= max_queued:
            raise too_many(
                f"this API key may have {counted(max_queued, 'job')} waiting in the queue at once, and it has",
                code="queue_full",
                retry_after=QUEUE_FULL_RETRY_SECONDS,
            )
    if daily_gpu_seconds is not None:
        await check_day(session, api_key=api_key, daily_gpu_seconds=daily_gpu_seconds)


async def check_day(session: AsyncSession, *, api_key: str, daily_gpu_seconds: int) -> None:
    """
    Raises:
        ApiError: 429 `quota_exceeded`: the key's jobs have used the GPU time of the day.
    """
    used = (await session.execute(keys.gpu_seconds_today(api_key))).scalar_one_or_none() or 0.0
    if used >= daily_gpu_seconds:
        raise too_many(
            f"this API key may use {daily_gpu_seconds} GPU-seconds a day (UTC), and has used {used:.1f} today",
            code="quota_exceeded",
            retry_after=WINDOW_SECONDS,
            # the day does not end within the minutes that clients repeat requests for
            headers={"x-should-retry": "false"},
        )


async def take_place(session: AsyncSession, job: Job) -> None:
    """Let a job that was just inserted or queued again run if its key has room for it; otherwise it waits."""
    if job.hold is not None and job.api_key is not None:
        await session.execute(open_holds(job.api_key))
        await session.refresh(job)
