"""Following jobs for clients that wait: one task of the process asks for all of them at once.

A client that waits holds a seat and no connection to the database. While the database is away it hears nothing; what
happened meanwhile it hears afterwards.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from rushes_core import events
from rushes_core.database import EACH_ALONE
from rushes_core.events import Glimpse, Step
from rushes_core.log import get_logger
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.time_limit import within
from sqlalchemy import Select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.types import Receive

from rushes_api.errors import ApiError, Unavailable, database_unavailable
from rushes_api.limits import too_many
from rushes_api.shutdown import on_termination

log = get_logger(__name__)

LOOK_SECONDS = 0.25
"""How often the followed jobs are looked at."""
_RETRY_AFTER_SECONDS = 5
_MAX_STORIES = 200
"""Jobs that are read at once."""


class Closing(Exception):
    """The process is about to stop."""


class Gone(Exception):
    """The client has gone away."""


@dataclass(frozen=True, slots=True)
class Story:
    """A job with its history, both of the same moment."""

    job: Job
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What changed of a followed job."""

    glimpse: Glimpse | None
    """None: the row is gone."""
    story: Story | None
    """There if the job's state changed, or was retried or deleted; None where only its progress did."""


class Seat:
    """One request's place among those that wait. Follows at most one job."""

    __slots__ = ("_pending", "_wake", "_watcher", "job_id", "seen")

    def __init__(self, watcher: "Watcher") -> None:
        self.job_id: str | None = None
        self.seen: Glimpse | None = None
        self._watcher = watcher
        self._pending: Update | None = None
        self._wake: asyncio.Future[None] | None = None

    def follow(self, seen: Glimpse) -> None:
        """Hear of everything about the job that differs from `seen`."""
        self.job_id, self.seen = seen.id, seen
        self._watcher.add(self)

    async def next(self, gone: asyncio.Task[None], *, timeout_seconds: float) -> Update | None:
        """The next change; None when there is none in this time. Changes that nobody waited for are told as one.

        Raises:
            Closing: the process is about to stop.
            Gone: `gone` has ended.
        """
        if self._pending is None and not self._watcher.closing and not gone.done():
            self._wake = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._wake, gone}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            self._wake = None
        update, self._pending = self._pending, None
        if gone.done():
            raise Gone
        # what came first is told first
        if update is None and self._watcher.closing:
            raise Closing
        return update

    def offer(self, update: Update) -> None:
        """Tell this seat, if `update` is news to it."""
        if update.glimpse == self.seen:
            return
        earlier = self._pending
        # a later change of progress must not hide an earlier one of state
        story = update.story or (earlier.story if earlier else None)
        self._pending = Update(update.glimpse, story)
        self.seen = update.glimpse
        self.wake()

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Watcher:
    """Every seat of this process, and the one task that looks for all of them."""

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        *,
        max_waiting: int,
        max_waiting_per_key: int,
        on_change: Callable[[int], None],
    ) -> None:
        self.closing = False
        self._sessions = sessions
        self._max_waiting = max_waiting
        self._max_waiting_per_key = max_waiting_per_key
        self._on_change = on_change
        self._taken: Counter[str] = Counter()
        self._num_taken = 0
        self._seats: dict[str, set[Seat]] = {}
        self._anybody = asyncio.Event()
        self._asked: dict[tuple[str, str], list[asyncio.Future[Story | None]]] = {}
        self._answering: asyncio.Task[None] | None = None
        self._is_reachable = True

    @contextmanager
    def seat(self, api_key: str) -> Generator[Seat]:
        """A seat for a request of this key.

        Raises:
            ApiError: there is none left, for this key or for anybody.
        """
        refusal = self._refusal(api_key)
        if refusal is not None:
            raise refusal
        seat = Seat(self)
        self._taken[api_key] += 1
        self._num_taken += 1
        self._on_change(self._num_taken)
        try:
            yield seat
        finally:
            self._num_taken -= 1
            self._on_change(self._num_taken)
            self._taken[api_key] -= 1
            if not self._taken[api_key]:
                del self._taken[api_key]
            self._remove(seat)

    @contextmanager
    def maybe_seat(self, api_key: str) -> Generator[Seat | None]:
        """A seat for a request of this key; None when there is none left."""
        if self._refusal(api_key) is not None:
            yield None
            return
        with self.seat(api_key) as seat:
            yield seat

    @property
    def num_waiting(self) -> int:
        return self._num_taken

    def add(self, seat: Seat) -> None:
        assert seat.job_id is not None
        self._seats.setdefault(seat.job_id, set()).add(seat)
        self._anybody.set()

    def close(self) -> None:
        """Send everybody home: the process is about to stop."""
        self.closing = True
        for seat in self._everybody():
            seat.wake()

    async def run(self) -> None:
        """Look for as long as anybody follows a job, until this task is cancelled."""
        while True:
            await self._anybody.wait()
            await self._look_once()
            await asyncio.sleep(LOOK_SECONDS)

    async def story(self, job_id: str, *, project: str) -> Story | None:
        """The job with its history, deleted or not; None: the project has none with this id.

        Who asks while another question is being answered is answered with all others who do: after a restart everybody
        comes back at once, and an `EventSource` that is refused does not come again.

        Raises:
            Unavailable, SQLAlchemyError: the database did not answer, in time or at all.
        """
        answer: asyncio.Future[Story | None] = asyncio.get_running_loop().create_future()
        self._asked.setdefault((job_id, project), []).append(answer)
        if self._answering is None or self._answering.done():
            # not in the context of the request that happens to be the first: its id would be in the logs of all
            self._answering = asyncio.get_running_loop().create_task(self._answer_all(), context=Context())
        return await answer

    async def _answer_all(self) -> None:
        while self._asked:
            asked = {pair: self._asked.pop(pair) for pair in list(self._asked)[:_MAX_STORIES]}
            found: dict[str, Story] = {}
            failure: Exception | None = None
            try:
                found = await within(self._read(events.stories_of(list(asked))))
            except TimeoutError:
                failure = database_unavailable()
            except Exception as error:  # whatever it is, those who wait have to be told
                failure = error
            for (job_id, project), answers in asked.items():
                story = found.get(job_id)
                for answer in answers:
                    if answer.done():
                        continue
                    if failure is None:
                        answer.set_result(story if story is not None and story.job.project == project else None)
                    else:
                        answer.set_exception(failure)

    async def _read(self, statement: Select[Job, Any]) -> dict[str, Story]:
        async with self._sessions() as session:
            await session.connection(execution_options=EACH_ALONE)
            rows = (await session.execute(statement)).all()
        return {job.id: Story(job, Step.story(steps)) for job, steps in rows}

    def _refusal(self, api_key: str) -> ApiError | None:
        if self._taken[api_key] >= self._max_waiting_per_key:
            return too_many(
                f"{self._max_waiting_per_key} requests of this API key wait for videos, which is the most that may do "
                "so at once: poll instead, or follow fewer",
                code="rate_limit_exceeded",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        if self._num_taken >= self._max_waiting:
            return Unavailable(
                "Too many requests wait for videos at present. Poll instead, or try again later.", code="overloaded"
            )
        return None

    async def _look_once(self) -> None:
        try:
            await self._look()
        except (SQLAlchemyError, OSError) as error:
            if self._is_reachable:
                log.warning("watch_failed", error=str(error).splitlines()[0])
            self._is_reachable = False
        except Exception:
            log.exception("watch_failed")
        else:
            if not self._is_reachable:
                log.info("watch_recovered")
            self._is_reachable = True

    async def _look(self) -> None:
        # who sits down meanwhile may have seen more than this look
        seated = {job_id: tuple(seats) for job_id, seats in self._seats.items()}
        # each may take as long as the database lets it: what is slow is not asked in vain, again and again
        found = await within(self._glimpses(list(seated)))
        changed = [
            glimpse.id
            for glimpse in found.values()
            if any(seat.seen and seat.seen.status != glimpse.status for seat in seated[glimpse.id])
        ]
        stories = await within(self._read(events.stories(changed))) if changed else {}
        for job_id, seats in seated.items():
            story = stories.get(job_id)
            glimpse = found.get(job_id) if story is None else Glimpse.of(story.job)
            for seat in seats:
                seat.offer(Update(glimpse, story))

    async def _glimpses(self, job_ids: list[str]) -> dict[str, Glimpse]:
        async with self._sessions() as session:
            await session.connection(execution_options=EACH_ALONE)
            rows = (await session.execute(events.glimpses(job_ids))).all()
            return {glimpse.id: glimpse for glimpse in (Glimpse(*row) for row in rows)}

    def _everybody(self) -> list[Seat]:
        return [seat for seats in self._seats.values() for seat in seats]

    def _remove(self, seat: Seat) -> None:
        seats = self._seats.get(seat.job_id or "")
        if seats is None:
            return
        seats.discard(seat)
        if not seats:
            del self._seats[seat.job_id or ""]
        if not self._seats:
            self._anybody.clear()


@asynccontextmanager
async def watching(
    settings: Settings, sessions: async_sessionmaker[AsyncSession], *, on_change: Callable[[int], None]
) -> AsyncGenerator[Watcher]:
    """A watcher that looks until the end of the context, and sends everybody home when the process is asked to stop.

    Args:
        on_change: told how many wait whenever that changes.
    """
    watcher = Watcher(
        sessions,
        max_waiting=settings.api_max_waiting,
        max_waiting_per_key=settings.api_max_waiting_per_key,
        on_change=on_change,
    )
    look = asyncio.create_task(watcher.run())
    try:
        with on_termination(watcher.close):
            yield watcher
    finally:
        watcher.close()
        look.cancel()
        await asyncio.wait({look})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
