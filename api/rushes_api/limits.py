"""Requests per minute of a key: counted in Redis, or in this process while Redis is away."""

# redis types its options loosely
# pyright: standard

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from limits import RateLimitItemPerMinute, WindowStats
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from rushes_core.log import get_logger
from rushes_core.settings import Settings

from rushes_api.errors import ApiError

log = get_logger(__name__)

WINDOW_SECONDS = 60
REDIS_SECONDS = 0.2
"""How long a request waits for Redis before it is counted in the process instead."""
AWAY_SECONDS = 2.0
"""How long Redis is left alone after it failed to answer."""

MAX_REMEMBERED = 10_000
"""Keys that are known to be over their limit."""

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a key stands after a request."""

    is_over: bool
    limit: int
    remaining: int
    reset_seconds: int
    """Until the oldest of the requests that count no longer does, 1..60."""

    @property
    def headers(self) -> dict[str, str]:
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.reset_seconds}s",
        }

    def error(self) -> ApiError:
        return too_many(
            f"this API key may send {self.limit} requests per minute",
            code="rate_limit_exceeded",
            retry_after=self.reset_seconds,
        )


def too_many(
    message: str, *, code: str, retry_after: float, param: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """429. `Retry-After` is a whole number of seconds, 1..60: clients misread or disregard everything else."""
    return ApiError(
        message,
        param=param,
        code=code,
        status=HTTPStatus.TOO_MANY_REQUESTS,
        headers={"Retry-After": str(_whole(retry_after)), **(headers or {})},
    )


class RequestLimits:
    """Counts the requests of keys over the last minute."""

    def __init__(self, settings: Settings) -> None:
        self._pool = BlockingConnectionPool.from_url(
            settings.redis_url,
            max_connections=16,
            timeout=REDIS_SECONDS,
            socket_timeout=REDIS_SECONDS,
            socket_connect_timeout=REDIS_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        options: dict[str, Any] = {"connection_pool": self._pool}
        self._shared = MovingWindowRateLimiter(
            RedisStorage(settings.redis_url, implementation="redispy", key_prefix="rushes:requests", **options)
        )
        # cheaper than a moving window where every request passes through one process
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._over_until: dict[tuple[str, int], float] = {}
        self._away_since: float | None = None
        self._failed_at = _NEVER

    async def count(self, api_key: str, *, per_minute: int) -> Standing:
        """Count a request, unless it is one too many. A key that is over its limit is not kept out for longer by
        what it sends meanwhile, and costs nothing but the answer."""
        key = (api_key, per_minute)
        over_for = self._over_until.get(key, _NEVER) - time.time()
        if over_for > 0:
            return Standing(is_over=True, limit=per_minute, remaining=0, reset_seconds=_whole(over_for))
        is_within, stats = await self._hit(RateLimitItemPerMinute(per_minute), api_key)
        if is_within:
            self._over_until.pop(key, None)
        elif stats.remaining <= 0:
            # until then no request that counts is old enough to make room
            self._over_until[key] = stats.reset_time
            while len(self._over_until) > MAX_REMEMBERED:
                del self._over_until[next(iter(self._over_until))]
        return Standing(
            is_over=not is_within,
            limit=per_minute,
            remaining=max(0, stats.remaining) if is_within else 0,
            reset_seconds=_whole(stats.reset_time - time.time()),
        )

    async def _hit(self, item: RateLimitItemPerMinute, api_key: str) -> tuple[bool, WindowStats]:
        if time.monotonic() - self._failed_at >= AWAY_SECONDS:
            try:
                async with asyncio.timeout(REDIS_SECONDS):
                    found = await _hit(self._shared, item, api_key)
            except (RedisError, OSError, TimeoutError) as error:
                self._note_away(error)
            else:
                self._note_back()
                return found
        return await _hit(self._own, item, api_key)

    async def close(self) -> None:
        await self._pool.disconnect()

    def _note_away(self, error: Exception) -> None:
        self._failed_at = time.monotonic()
        if self._away_since is None:
            self._away_since = self._failed_at
            log.warning("request_limits_in_process", error=f"{type(error).__name__}: {error}")

    def _note_back(self) -> None:
        if self._away_since is not None:
            log.info("request_limits_shared_again", seconds=round(time.monotonic() - self._away_since, 1))
            self._away_since = None


async def _hit(limiter: RateLimiter, item: RateLimitItemPerMinute, api_key: str) -> tuple[bool, WindowStats]:
    return await limiter.hit(item, api_key), await limiter.get_window_stats(item, api_key)


def _whole(seconds: float) -> int:
    """`seconds` as clients understand it: a whole number, 1..60."""
    return min(WINDOW_SECONDS, max(1, math.ceil(seconds)))
