"""Reading single jobs, which is most of what clients ask for: the questions of one moment become one statement.

Nothing here opens a transaction, or holds a connection that another request would need.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

import psycopg
from psycopg.rows import tuple_row
from rushes_core import backlog
from rushes_core.arrivals import JOB_COLUMNS
from rushes_core.database import connect_arguments
from rushes_core.holds import CAMPAIGN
from rushes_core.log import get_logger
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.video import is_held
from sqlalchemy.dialects.postgresql.psycopg import dialect as PsycopgDialect
from sqlalchemy.orm import class_mapper

from rushes_api.errors import Unavailable, database_unavailable

log = get_logger(__name__)

WAIT_SECONDS = 1.5
"""How long a question may go unanswered."""

Row = tuple[Any, ...]
Connection = psycopg.AsyncConnection[Row]
_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


class Lookup:
    """Jobs by id, and their places in the queue, for every request of this process."""

    MAX_KEPT_PLACES = 20_000
    SECONDS_KEPT_PER_JOB_AHEAD = 0.02
    MAX_SECONDS_KEPT = 10.0

    def __init__(self, settings: Settings) -> None:
        self._jobs = Batches(settings, _find_jobs, lines=2)
        self._places = Batches(settings, _count_ahead, lines=1)
        self._kept: dict[_Place, tuple[int, float]] = {}
        self._tails: dict[_Place, _Tail] = {}

    async def job(self, job_id: str, *, project: str) -> Job | None:
        """The job of this project with this id, deleted or not. For one of another project the database has no more to
        read and to send than for one that never existed: it takes no longer either.

        Raises:
            Unavailable, psycopg.Error: the database did not answer, in time or at all.
        """
        row = await self._jobs.ask((job_id, project))
        return None if row is None else job_of(row)

    async def num_ahead(self, job: Job) -> int:
        """About how many jobs are claimed before `job`, which waits. Far back it is counted less often: nobody sees
        one step of thousands.

        Raises:
            Unavailable, psycopg.Error: the database did not answer, in time or at all.
        """
        place = _Place(job.id, job.model, job.project, job.priority, job.run_at, job.api_key, job.hold)
        now = asyncio.get_running_loop().time()
        counted, kept_until = self._kept.get(place, (0, now))
        if now < kept_until:
            return counted
        counted = await self._places.ask(place) or 0
        if len(self._kept) >= self.MAX_KEPT_PLACES:
            self._kept.clear()
        self._kept[place] = counted, now + self._seconds_kept(counted)
        return counted

    async def num_ahead_or_none(self, job: Job) -> int | None:
        """`num_ahead`; None of a job that is in no queue, and where it is not known in time: what else is known of the
        job needs no such count."""
        if not _is_in_queue(job):
            return None
        try:
            return await self.num_ahead(job)
        except (Unavailable, psycopg.Error, OSError) as error:
            log.warning("queue_not_counted", error=str(error).splitlines()[0])
            return None

    async def num_ahead_of_newcomer(self, job: Job) -> int | None:
        """The same for a job that is being queued now, and is not committed yet."""
        if not _is_in_queue(job):
            return None
        api_key = None if job.hold is None else job.api_key
        return await self.num_before_end(job.model, job.project, job.priority, api_key=api_key, hold=job.hold)

    async def num_before_end(
        self, model: str, project: str, priority: int, *, api_key: str | None = None, hold: str | None = None
    ) -> int | None:
        """About how many jobs are claimed before one that is about to be queued; None where it is not known in time.

        The end of each queue is counted for all who come to it within a moment: each of them is behind the one before.
        """
        end = _Place(_LAST_ID, model, project, priority, _NEVER, api_key, hold)
        now = asyncio.get_running_loop().time()
        tail = self._tails.get(end)
        if tail is None or now >= tail.kept_until:
            try:
                counted = await self._places.ask(end) or 0
            except (Unavailable, psycopg.Error, OSError) as error:
                log.warning("queue_not_counted", error=str(error).splitlines()[0])
                return None
            stands = self._tails.get(end)
            if stands is None or stands is tail:
                if len(self._tails) >= self.MAX_KEPT_PLACES:
                    self._tails.clear()
                stands = self._tails[end] = _Tail(counted, now + self._seconds_kept(counted))
            # else somebody else, who had the same answer, stands here already
            tail = stands
        num_ahead = min(tail.num_jobs, backlog.MAX_AHEAD)
        tail.num_jobs += 1
        return num_ahead

    def _seconds_kept(self, num_ahead: int) -> float:
        return min(self.MAX_SECONDS_KEPT, num_ahead * self.SECONDS_KEPT_PER_JOB_AHEAD)

    async def close(self) -> None:
        await self._jobs.close()
        await self._places.close()


class Line:
    """A connection that is made when it is needed, and again when it was lost."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = connect_arguments(settings)
        self._connection: Connection | None = None

    async def fetch(self, query: str, values: Sequence[Sequence[object] | Mapping[str, object]]) -> list[list[Row]]:
        """The rows of `query` for each of `values`. A connection that turns out to be dead is replaced once."""
        return await self._run(lambda connection: _fetch(connection, query.encode(), values))

    async def begin(self) -> Connection:
        """The connection, in a transaction. One that turns out to be dead is replaced once."""
        cursor = await self._run(lambda connection: connection.execute(b"BEGIN", prepare=False))
        return cursor.connection

    async def _run(self, work: Callable[[Connection], Awaitable[_Answer]]) -> _Answer:
        is_old = self._connection is not None
        try:
            return await work(await self._connected())
        except (psycopg.OperationalError, psycopg.errors.FeatureNotSupported):
            # the latter: a migration has changed what a prepared statement returns
            await self.close()
            if not is_old:
                raise
        return await work(await self._connected())

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.closed

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                **self._arguments, autocommit=True, row_factory=tuple_row
            )
        return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _fetch(
    connection: Connection, query: bytes, values: Sequence[Sequence[object] | Mapping[str, object]]
) -> list[list[Row]]:
    if len(values) == 1:
        cursor = await connection.execute(query, values[0], prepare=True, binary=True)
        return [await cursor.fetchall()]
    async with connection.pipeline():
        cursors = [await connection.execute(query, each, prepare=True, binary=True) for each in values]
        return [await cursor.fetchall() for cursor in cursors]


class Batches(Generic[_Question, _Answer]):
    """Asks what several requests want to know together. While every line is taken, questions gather for the next."""

    def __init__(
        self,
        settings: Settings,
        find: Callable[[Line, list[_Question]], Awaitable[dict[_Question, _Answer]]],
        *,
        lines: int,
    ) -> None:
        self._find = find
        self._lines = [Line(settings) for _ in range(lines)]
        self._free = list(self._lines)
        self._asked: dict[_Question, list[asyncio.Future[_Answer | None]]] = {}
        self._is_due = False
        self._under_way: set[asyncio.Task[None]] = set()

    async def ask(self, question: _Question) -> _Answer | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer | None] = loop.create_future()
        self._asked.setdefault(question, []).append(answer)
        if not self._is_due and self._free:
            self._is_due = True
            # what else is asked in this turn of the loop goes along
            loop.call_soon(self._start)
        timer = loop.call_later(WAIT_SECONDS, _give_up, answer)
        try:
            return await answer
        finally:
            timer.cancel()
            self._withdraw(question, answer)

    def _withdraw(self, question: _Question, answer: "asyncio.Future[_Answer | None]") -> None:
        """Have nobody ask for what nobody waits for any more."""
        answers = self._asked.get(question)
        if answers is not None and answer in answers:
            answers.remove(answer)
            if not answers:
                del self._asked[question]

    def _start(self) -> None:
        self._is_due = False
        if self._asked and self._free:
            asked, self._asked = self._asked, {}
            task = asyncio.create_task(self._answer(self._free.pop(), asked))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _answer(self, line: Line, asked: dict[_Question, list["asyncio.Future[_Answer | None]"]]) -> None:
        waiting = [(question, answer) for question, answers in asked.items() for answer in answers]
        try:
            found = await self._find(line, list(asked))
        except Exception as error:
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for question, answer in waiting:
                if not answer.done():
                    answer.set_result(found.get(question))
        finally:
            self._free.append(line)
            self._start()

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        for line in self._lines:
            await line.close()


def _give_up(answer: "asyncio.Future[Any]") -> None:
    if not answer.done():
        answer.set_exception(database_unavailable())


def _is_in_queue(job: Job) -> bool:
    """Whether it waits for nothing but its turn, or for that of its key."""
    return job.state is JobState.QUEUED and not is_held(job) and job.hold != CAMPAIGN


_FIND = f"""
SELECT {", ".join(JOB_COLUMNS)} FROM jobs JOIN unnest(%s::text[], %s::text[]) AS asked (id, project) USING (id, project)
"""


async def _find_jobs(line: Line, asked: list[tuple[str, str]]) -> dict[tuple[str, str], Row]:
    (rows,) = await line.fetch(_FIND, [tuple(map(list, zip(*asked, strict=True)))])
    id_at, project_at = JOB_COLUMNS.index("id"), JOB_COLUMNS.index("project")
    return {(row[id_at], row[project_at]): row for row in rows}


def job_of(row: Row) -> Job:
    """The row as an object that belongs to no session, made without the cost of its constructor."""
    job = class_mapper(Job).class_manager.new_instance()
    values = dict(zip(JOB_COLUMNS, row, strict=True))
    vars(job).update(values | {"state": JobState(values["state"])})
    return job


class _Place(NamedTuple):
    """What decides where a job stands: all that `backlog.num_ahead` reads of it."""

    id: str
    model: str
    project: str
    priority: int
    run_at: datetime
    api_key: str | None
    hold: str | None


_LAST_ID, _NEVER = "~", datetime(9999, 12, 31, tzinfo=UTC)


@dataclass(slots=True)
class _Tail:
    """The end of a queue: what was counted before it, and who has come since."""

    num_jobs: int
    kept_until: float


_PROBE = _Place("<id>", "<model>", "<project>", -1, datetime(1, 1, 1, tzinfo=UTC), "<api_key>", "<hold>")


def _compile_num_ahead(*, has_hold: bool) -> tuple[str, dict[str, object], dict[str, str]]:
    """`backlog.num_ahead` as text, its constant parameters, and which others take which member of a place.

    To build the statement takes longer than to run it.
    """
    probe = _PROBE if has_hold else _PROBE._replace(hold=None)
    compiled = backlog.num_ahead(Job(**probe._asdict())).compile(dialect=PsycopgDialect())
    members = {value: name for name, value in probe._asdict().items() if value is not None}
    variable = {name: members[value] for name, value in compiled.params.items() if value in members}
    constant = {name: value for name, value in compiled.params.items() if name not in variable}
    return str(compiled), constant, variable


_NUM_AHEAD = {has_hold: _compile_num_ahead(has_hold=has_hold) for has_hold in (False, True)}


async def _count_ahead(line: Line, places: list[_Place]) -> dict[_Place, int]:
    counted: dict[_Place, int] = {}
    for has_hold, (query, constant, variable) in _NUM_AHEAD.items():
        alike = [place for place in places if (place.hold is not None) is has_hold]
        if alike:
            values = [constant | {name: getattr(place, member) for name, member in variable.items()} for place in alike]
            answers = await line.fetch(query, values)
            counted |= {place: rows[0][0] for place, rows in zip(alike, answers, strict=True)}
    return counted
