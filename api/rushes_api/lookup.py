"""Reading single jobs, which is most of what clients ask for: the questions of one moment become one statement.

Nothing here opens a transaction, or holds a connection that another request would need.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

import psycopg
from rushes_core import backlog
from rushes_core.arrivals import JOB_COLUMNS
from rushes_core.holds import CAMPAIGN
from rushes_core.log import get_logger
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.video import is_held
from sqlalchemy.dialects.postgresql.psycopg import dialect as PsycopgDialect
from sqlalchemy.orm import class_mapper

from rushes_api.errors import Unavailable, database_unavailable
from rushes_api.lines import Gathering, Line, Row

log = get_logger(__name__)

WAIT_SECONDS = 1.5
"""How long a question may go unanswered."""
LINE_SECONDS = 5.0
"""How long a connection may: one that is only late is kept, as to make another costs a slow database more."""

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")
_Asked = dict[_Question, list[asyncio.Future[_Answer | None]]]


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


class Batches(Gathering[_Asked[_Question, _Answer]], Generic[_Question, _Answer]):
    """Asks what several requests want to know together, each question once."""

    def __init__(
        self,
        settings: Settings,
        find: Callable[[Line, list[_Question]], Awaitable[dict[_Question, _Answer]]],
        *,
        lines: int,
    ) -> None:
        super().__init__(settings, lines=lines, wait_seconds=LINE_SECONDS)
        self._find = find
        self._asked: _Asked[_Question, _Answer] = {}

    async def ask(self, question: _Question) -> _Answer | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer | None] = loop.create_future()
        self._asked.setdefault(question, []).append(answer)
        self._call()
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

    def _next(self) -> _Asked[_Question, _Answer]:
        asked, self._asked = self._asked, {}
        return asked

    async def _work(self, line: Line, together: _Asked[_Question, _Answer]) -> None:
        found = await self._find(line, list(together))
        for question, answers in together.items():
            for answer in answers:
                if not answer.done():
                    answer.set_result(found.get(question))

    def _fail(self, together: _Asked[_Question, _Answer], error: Exception) -> None:
        for answers in together.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)


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
