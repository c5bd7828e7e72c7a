"""Who is calling: the operator's own key, or one of the database, by way of a cache that is at most a second old."""

import asyncio
import hmac
import re
import time
from collections.abc import Coroutine, Iterable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from rushes_core import keys
from rushes_core.database import create_api_engine
from rushes_core.fields import PRIORITIES
from rushes_core.log import get_logger
from rushes_core.models import ApiKey
from rushes_core.settings import Settings
from rushes_core.time_limit import end, within
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.errors import Unauthorized, database_unavailable

log = get_logger(__name__)

DEFAULT_PROJECT = "default"
KEY_ID_CHARACTERS = 16

MAX_AGE_SECONDS = 1.0
"""How long a revoked key, a changed limit or a rotated secret may go unnoticed."""
REFRESH_SECONDS = 0.5
"""Entries of this age are looked up again while they still serve."""
STALE_SECONDS = 30.0
"""How old an entry may become while the database does not answer."""
MISS_SECONDS = 5.0
"""How long a secret that is not in the database is refused without another look: none becomes valid later."""
LOOKUP_SECONDS = 0.8
"""Bound of one look; with the look before it that a request may have to wait for, it stays below two seconds."""
NOTE_SECONDS = 60.0
MAX_ENTRIES = 10_000
MAX_BATCH = 500

_KEY = re.compile(r"[\x21-\x7e]{1,512}", re.ASCII)
_NEVER = float("-inf")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the project, an id of the key that says nothing about the key, and what the key may do."""

    project: str
    api_key: str
    scopes: frozenset[str] = frozenset(keys.SCOPES)
    """With `admin`, all of them."""
    priorities: frozenset[str] = frozenset(PRIORITIES)
    compat: str | None = None
    requests_per_minute: int | None = None
    max_queued: int | None = None
    max_running: int | None = None
    daily_gpu_seconds: int | None = None
    is_stored: bool = False
    """Whether the key is a row of `api_keys`."""

    @classmethod
    def of(cls, key: ApiKey) -> Self:
        return cls(
            project=key.project,
            api_key=key.id,
            scopes=frozenset(keys.SCOPES if keys.ADMIN in key.scopes else key.scopes),
            priorities=frozenset(key.priorities),
            compat=key.compat,
            requests_per_minute=key.requests_per_minute,
            max_queued=key.max_queued,
            max_running=key.max_running,
            daily_gpu_seconds=key.daily_gpu_seconds,
            is_stored=True,
        )


class ApiKeys:
    """The keys that are accepted, as digests."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ValueError: there is no key, or it holds characters that a header cannot carry.
        """
        key = settings.api_key.get_secret_value()
        if not key:
            raise ValueError("RUSHES_API_KEY is not set: the API does not start without a key")
        if not _KEY.fullmatch(key):
            raise ValueError("RUSHES_API_KEY must be 1 to 512 visible ASCII characters without spaces")
        self._operator_digest = keys.digest_of(key)
        self._operator = Caller(DEFAULT_PROJECT, self._operator_digest.hex()[:KEY_ID_CHARACTERS])
        self._stored = _StoredKeys(settings)

    async def caller(self, authorization: list[str]) -> Caller:
        """The caller who sent these Authorization headers. Waits for nothing while the key's cache entry is fresh.

        Raises:
            Unauthorized: no key was sent, or not one of ours; an unknown, a revoked and an expired key are all alike.
            Unavailable, SQLAlchemyError: the database did not answer, and the key was not seen for a while.
        """
        if len(authorization) != 1:
            raise Unauthorized("an API key is required: send one header `Authorization: Bearer <key>`")
        scheme, _, rest = authorization[0].strip().partition(" ")
        secret = rest.strip()
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized("the Authorization header must be `Bearer <key>`")
        digest = keys.digest_of(secret)
        if hmac.compare_digest(digest, self._operator_digest):
            return self._operator
        caller = await self._stored.find(digest) if keys.is_secret(secret) else None
        if caller is None:
            raise Unauthorized("the API key is not valid")
        return caller

    def forget(self) -> None:
        """Look every key up again: one was changed by way of this process, which is to know at once."""
        self._stored.forget()

    async def close(self) -> None:
        await self._stored.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    caller: Caller
    at: float
    """When it was asked for, by the monotonic clock."""


class _StoredKeys:
    """The keys of the database. One query at a time answers for everybody who waits, whatever they send."""

    def __init__(self, settings: Settings) -> None:
        self._engine = create_api_engine(settings, pool_size=2).execution_options(isolation_level="AUTOCOMMIT")
        self._hits: dict[bytes, _Entry] = {}
        self._misses: dict[bytes, float] = {}
        self._asked: dict[bytes, asyncio.Future[Caller | Exception | None]] = {}
        self._noted: dict[str, float] = {}
        self._is_asking = False
        self._failed_at = _NEVER
        self._num_forgotten = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, digest: bytes) -> Caller | None:
        now = time.monotonic()
        entry = self._hits.get(digest)
        age = now - entry.at if entry is not None else 0.0
        if entry is not None and (
            age < MAX_AGE_SECONDS or (age < STALE_SECONDS and now - self._failed_at < MAX_AGE_SECONDS)
        ):
            if age > REFRESH_SECONDS:
                self._ask(digest)
            return entry.caller
        if now - self._misses.get(digest, _NEVER) < MISS_SECONDS:
            return None
        # shielded: others wait for the same answer
        answer = await asyncio.shield(self._ask(digest))
        if not isinstance(answer, Exception):
            return answer
        if entry is not None and age < STALE_SECONDS:
            return entry.caller
        raise answer

    def forget(self) -> None:
        self._hits.clear()
        self._num_forgotten += 1

    async def close(self) -> None:
        await end(self._tasks)
        await self._engine.dispose()

    def _ask(self, digest: bytes) -> "asyncio.Future[Caller | Exception | None]":
        future = self._asked.get(digest)
        if future is None:
            future = self._asked[digest] = asyncio.get_running_loop().create_future()
            if not self._is_asking:
                self._is_asking = True
                self._start(self._answer_all())
        return future

    async def _answer_all(self) -> None:
        try:
            while self._asked:
                await self._answer(list(self._asked)[:MAX_BATCH])
        finally:
            self._is_asking = False
            for future in self._asked.values():
                future.cancel()
            self._asked.clear()

    async def _answer(self, digests: list[bytes]) -> None:
        asked_at, num_forgotten = time.monotonic(), self._num_forgotten
        found: dict[bytes, Caller] = {}
        error: Exception | None = None
        try:
            found = await within(self._query(digests), LOOKUP_SECONDS)
        except TimeoutError:
            error = database_unavailable()
        except Exception as failure:  # whatever it is, those who wait have to be told
            error = failure
        if error is not None:
            self._failed_at = time.monotonic()
        if error is None and num_forgotten != self._num_forgotten:
            # what was read may be older than the change: those who wait are answered by another query
            return
        for digest in digests:
            caller = found.get(digest)
            if error is None:
                self._remember(digest, caller, asked_at)
            self._asked.pop(digest).set_result(caller if error is None else error)
        self._note({caller.api_key for caller in found.values()})

    async def _query(self, digests: list[bytes]) -> dict[bytes, Caller]:
        found: dict[bytes, Caller] = {}
        async with AsyncSession(self._engine) as session:
            for key, overlaps in await session.execute(keys.find(digests)):
                caller = Caller.of(key)
                found[key.digest] = caller
                if overlaps and key.previous_digest is not None:
                    found[key.previous_digest] = caller
        return found

    def _remember(self, digest: bytes, caller: Caller | None, asked_at: float) -> None:
        if caller is None:
            self._hits.pop(digest, None)
            _put(self._misses, digest, asked_at)
        else:
            _put(self._hits, digest, _Entry(caller, asked_at))

    def _note(self, key_ids: Iterable[str]) -> None:
        now = time.monotonic()
        due = [key_id for key_id in key_ids if now - self._noted.get(key_id, _NEVER) >= NOTE_SECONDS]
        for key_id in due:
            _put(self._noted, key_id, now)
        if due:
            self._start(self._write_use(due))

    async def _write_use(self, key_ids: list[str]) -> None:
        try:
            await within(self._note_use(key_ids))
        except (SQLAlchemyError, OSError) as error:
            log.warning("use_of_keys_not_noted", error=str(error).splitlines()[0])

    async def _note_use(self, key_ids: list[str]) -> None:
        async with self._engine.connect() as connection:
            await connection.execute(keys.note_use(key_ids))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # not in the context of the request that happens to be the first: its id would be in the logs of all
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


Key = TypeVar("Key")


def _put(entries: dict[Key, Value], key: Key, value: Value) -> None:
    """Put a value at the end; the ones that were put first make room."""
    entries.pop(key, None)
    while len(entries) >= MAX_ENTRIES:
        del entries[next(iter(entries))]
    entries[key] = value
