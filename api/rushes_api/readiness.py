"""Whether this process can serve, and if not, why."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rushes_core import replicas
from rushes_core.errors import StorageError
from rushes_core.models import Replica
from rushes_core.schema import CURRENT_REVISION, mismatch
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.time_limit import within
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

CHECK_SECONDS = 4.0
"""How long a check may take before its server counts as down."""

OK = "ok"


class Readiness:
    """The checks behind `/readyz`. Each runs at most once at a time, however often it is asked for."""

    def __init__(
        self, settings: Settings, *, model: str, sessions: async_sessionmaker[AsyncSession], store: ObjectStore
    ) -> None:
        self._settings = settings
        self._model = model
        self._sessions = sessions
        self._store = store
        self._running: dict[str, asyncio.Task[dict[str, str]]] = {}

    async def check(self) -> dict[str, str]:
        """`ok`, or what is wrong, for each of `database`, `migrations`, `storage` and `workers`."""
        database, storage = await asyncio.gather(
            self._once("database", self._check_database), self._once("storage", self._check_storage)
        )
        return {**database, **storage}

    async def _once(self, name: str, check: Callable[[], Coroutine[Any, Any, dict[str, str]]]) -> dict[str, str]:
        task = self._running.get(name)
        if task is None or task.done():
            task = self._running[name] = asyncio.create_task(check())
        # not cancelled when it is late: a driver that waits for a frozen server would not notice
        done, _ = await asyncio.wait({task}, timeout=CHECK_SECONDS)
        return task.result() if done else {name: f"did not answer within {CHECK_SECONDS:g} seconds"}

    async def _check_storage(self) -> dict[str, str]:
        for store in self._store.buckets:
            try:
                await asyncio.to_thread(store.check)
            except StorageError:
                return {"storage": f"bucket {store.bucket} cannot be reached"}
        return {"storage": OK}

    async def _check_database(self) -> dict[str, str]:
        try:
            return {"database": OK, **await within(self._check_schema())}
        except (DBAPIError, PoolTimeout, OSError):
            return {"database": "cannot be reached"}

    async def _check_schema(self) -> dict[str, str]:
        async with self._sessions() as session:
            try:
                found: str | None = (await session.execute(CURRENT_REVISION)).scalar_one_or_none()
            except ProgrammingError:
                found = None
            if problem := mismatch(found):
                return {"migrations": problem}
            return {"migrations": OK, **await self._check_workers(session)}

    async def _check_workers(self, session: AsyncSession) -> dict[str, str]:
        up = replicas.up(seen_within_seconds=self._settings.lease_seconds).where(Replica.model == self._model)
        states = set((await session.execute(up.with_only_columns(Replica.state))).scalars())
        if states & {"ready", "busy"}:
            return {"workers": OK}
        why = ": there is no room in RUSHES_SCRATCH" if "full" in states else ""
        return {"workers": f"no replica is ready for model {self._model}{why}"}
