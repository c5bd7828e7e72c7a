"""Guarantees taken away, and places to stop at: changes that a test process makes to itself before it runs Rushes.

`FAULT_MUTANT` names what is taken away, `FAULT_POINT` a place and what happens there, `place:action`; it happens once
in all processes that share the file `FAULT_ONCE`. `FAULT_CLOCK_SECONDS` is what Python's clock of the process is ahead.
The product knows nothing of any of these.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from rushes_core import claims, jobs, storage
from rushes_core.models import Job
from rushes_core.predicates import in_states
from rushes_core.states import JobState, sources
from rushes_worker.ledger import Ledger
from sqlalchemy import and_
from sqlalchemy.sql.elements import ColumnElement


def install() -> None:
    """Change this process as the environment says."""
    mutant = os.environ.get("FAULT_MUTANT", "")
    if mutant in MUTANTS:
        MUTANTS[mutant]()
    if ahead := os.environ.get("FAULT_CLOCK_SECONDS"):
        _skew_clock(float(ahead))
    place, _, action = os.environ.get("FAULT_POINT", "").partition(":")
    if place:
        _arm(place, action)


def _skew_clock(seconds: float) -> None:
    """Wall-clock time is off; monotonic time is not, as when an administrator sets the clock."""
    from datetime import timedelta

    from botocore import auth

    wall_clock, now = time.time, auth.get_current_datetime
    time.time = lambda: wall_clock() + seconds
    # requests to the store are signed with their time
    auth.get_current_datetime = lambda *arguments: now(*arguments) + timedelta(seconds=seconds)


def _no_fence() -> None:
    """Transitions ask for the state alone."""

    def held(job_id: str, fence: int, target: JobState) -> ColumnElement[bool]:
        return and_(Job.id == job_id, in_states(*sources(target)))

    jobs._held = held  # pyright: ignore[reportPrivateUsage]


def _bare_statements() -> None:
    """Transitions ask for nothing: what still refuses them is the database's guard."""

    def held(job_id: str, fence: int, target: JobState) -> ColumnElement[bool]:
        return and_(Job.id == job_id)

    def complete(job_id: str, *, fence: int, result: dict[str, Any], timings: dict[str, float]) -> Any:
        from sqlalchemy import func, update

        return (
            update(Job)
            .where(Job.id == job_id)
            .values(
                state=JobState.COMPLETED,
                result=result,
                timings=timings,
                error=None,
                progress=100,
                phase=None,
                finished_at=func.now(),
                lease_owner=None,
                lease_until=None,
            )
            .returning(Job)
        )

    jobs._held = held  # pyright: ignore[reportPrivateUsage]
    jobs.complete = complete


def _ack_lost() -> None:
    """A worker believes that it completed the job, and nobody wrote it down."""
    complete = Ledger.complete

    def forgets(self: Ledger, lease: Any, **values: Any) -> bool:
        return True if _once() else complete(self, lease, **values)

    Ledger.complete = forgets


def _no_sweeper() -> None:
    from rushes_core.sweeper import Sweeper

    Sweeper.sweep = lambda self: None


def _no_verification() -> None:
    """What the store was sent is taken for what it holds."""

    def put_file(
        self: storage.ObjectStore, key: str, path: Any, *, content_type: str, sha256: str
    ) -> storage.StoredObject:
        import urllib.request

        # the client library would add checksums of its own
        url = self._client.generate_presigned_url("put_object", Params={"Bucket": self.bucket, "Key": key})
        urllib.request.urlopen(urllib.request.Request(url, data=path.read_bytes(), method="PUT")).close()
        return storage.StoredObject(key, path.stat().st_size, sha256)

    storage.ObjectStore.put_file = put_file


def _start_ignores_cancel() -> None:
    """A job is started although its cancel was asked for."""

    def start(job_id: str, fence: int, lease_seconds: float) -> Any:
        from datetime import timedelta

        from sqlalchemy import func, update

        return (
            update(Job)
            .where(jobs._held(job_id, fence, JobState.RUNNING))
            .values(
                state=JobState.RUNNING,
                started_at=func.now(),
                lease_until=func.now() + timedelta(seconds=lease_seconds),
            )
        )

    jobs._start = start  # pyright: ignore[reportPrivateUsage]


def _no_pause() -> None:
    """Claims take jobs of paused projects."""
    paused = "ARRAY(SELECT project FROM queue_pauses)"
    for name in ("_CANDIDATE", "_CLAIM"):
        setattr(claims, name, getattr(claims, name).replace(paused, "ARRAY[]::text[]"))
    assert paused not in claims._CANDIDATE + claims._CLAIM  # pyright: ignore[reportPrivateUsage]


def commit_after_answer(*, seconds: float) -> None:
    """Requests are answered before their transaction is committed, `seconds` later."""
    from rushes_api import app

    late: set[asyncio.Task[None]] = set()

    class LateSessions(app.async_sessionmaker):  # type: ignore[type-arg, name-defined, misc]
        @asynccontextmanager
        async def begin(self) -> AsyncGenerator[Any]:  # type: ignore[override]
            opened = self()
            try:
                yield opened
            except BaseException:
                await opened.close()
                raise

            async def commit() -> None:
                await asyncio.sleep(seconds)
                await opened.commit()
                await opened.close()

            task = asyncio.create_task(commit())
            late.add(task)
            task.add_done_callback(late.discard)

    app.async_sessionmaker = LateSessions  # type: ignore[misc, assignment]


MUTANTS: dict[str, Callable[[], None]] = {
    "no fence": _no_fence,
    "bare statements": _bare_statements,
    "ack lost": _ack_lost,
    "no sweeper": _no_sweeper,
    "no verification": _no_verification,
    "start ignores cancel": _start_ignores_cancel,
    "no pause": _no_pause,
}


def _arm(place: str, action: str) -> None:
    name, _, when = place.rpartition(" ")
    method = getattr(Ledger, {"start": "start", "complete": "complete"}[when])

    def struck(self: Ledger, lease: Any, *arguments: Any, **values: Any) -> Any:
        if name == "before" and _once():
            _act(action)
        result = method(self, lease, *arguments, **values)
        if name == "after" and _once():
            _act(action)
        return result

    setattr(Ledger, method.__name__, struck)


def _act(action: str) -> None:
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])


def _once() -> bool:
    """Whether this is the first call of all."""
    with suppress(FileExistsError):
        os.close(os.open(os.environ["FAULT_ONCE"], os.O_CREAT | os.O_EXCL))
        return True
    return False
