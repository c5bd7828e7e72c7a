"""New jobs that need nothing else of their transaction: those of one moment are inserted together."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.errors import FeatureNotSupported
from rushes_core import arrivals
from rushes_core.models import Job
from rushes_core.settings import Settings

from rushes_api.lookup import Connection, Line, Row, job_of

LINES = 2
"""Transactions at once: while one is committed the next gathers."""
MAX_TOGETHER = 200
MAX_CHARACTERS = 1_000_000
"""Of jobs that are inserted together, as JSON; one alone may have more."""
WAIT_SECONDS = 12.0
"""How long a transaction may take: longer than the database itself lets a statement run."""
_CLOSE_SECONDS = 1.0

_INSERT = arrivals.insert_jobs("%s").encode()
_FIND = f"SELECT {', '.join(arrivals.JOB_COLUMNS)} FROM jobs WHERE id = ANY(%s)".encode()
_ID, _KEY, _HOLD = (arrivals.JOB_COLUMNS.index(name) for name in ("id", "api_key", "hold"))

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class _Newcomer:
    id: str
    encoded: str
    show: Callable[[Job], str]
    on_commit: Callable[[], None]
    answer: asyncio.Future[str]
    """Done before the commit: whoever waited has gone, or cannot be shown the job."""
    is_alone: bool
    """It has a transaction of its own."""
    was_taken_back: bool = False
    """With another one, which left."""

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Intake:
    """Inserts jobs for every request of this process. While every line is taken, jobs gather for the next."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lines = {Line(settings) for _ in range(LINES)}
        self._free = list(self._lines)
        self._waiting: dict[_Newcomer, None] = {}
        self._under_way: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def add(
        self,
        values: Mapping[str, Any],
        show: Callable[[Job], str],
        on_commit: Callable[[], None],
        *,
        in_doubt: bool = False,
    ) -> str:
        """What `show` says of the new job, once it is committed. One that is there already is shown as it is.

        Args:
            values: as `arrivals` takes them.
            on_commit: called when the commit is about to be sent. Before that, whatever is raised here or by `show`,
                also the cancellation of this, leaves no job.
            in_doubt: an earlier commit of it went unanswered and may still be on its way. Nobody else waits for that.

        Raises:
            psycopg.Error
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        newcomer = _Newcomer(values["id"], arrivals.encoded(values), show, on_commit, answer, is_alone=in_doubt)
        self._queue(newcomer)
        try:
            return await answer
        finally:
            self._waiting.pop(newcomer, None)

    async def close(self) -> None:
        self._is_closed = True
        under_way = set(self._under_way)
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way, timeout=_CLOSE_SECONDS)
        self._start()
        for line in list(self._lines):
            await line.close()

    def _queue(self, newcomer: _Newcomer) -> None:
        if not newcomer.answer.done():
            self._waiting[newcomer] = None
            # what else comes in this turn of the loop goes along
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        if self._is_closed:
            _fail(list(self._waiting), psycopg.OperationalError("the API is stopping"))
        elif self._waiting and self._free:
            self._spawn(self._take_in(self._free.pop(), self._next()))

    def _next(self) -> list[_Newcomer]:
        together: list[_Newcomer] = []
        num_characters = 0
        for newcomer in self._waiting:
            num_characters += len(newcomer.encoded)
            is_full = len(together) == MAX_TOGETHER or num_characters > MAX_CHARACTERS
            if together and (is_full or newcomer.is_alone):
                break
            together.append(newcomer)
            if newcomer.is_alone:
                break
        for newcomer in together:
            del self._waiting[newcomer]
        return together

    def _spawn(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _take_in(self, line: Line, together: Sequence[_Newcomer]) -> None:
        try:
            insertion = self._spawn(_insert(line, together))
            done, _ = await asyncio.wait({insertion}, timeout=WAIT_SECONDS)
            if done:
                await self._settle(line, together, insertion)
            else:
                self._spawn(self._abandon(insertion, line))
                line = Line(self._settings)
                self._lines.add(line)
                _fail(together, psycopg.OperationalError(f"the database did not answer within {WAIT_SECONDS:g} s"))
        except asyncio.CancelledError:
            _fail(together, psycopg.OperationalError("the API is stopping"))
            raise
        finally:
            self._free.append(line)
            self._start()

    async def _abandon(self, insertion: "asyncio.Task[Any]", line: Line) -> None:
        """Give up a transaction that does not go on, which the driver takes its time for."""
        insertion.cancel()
        await asyncio.wait({insertion})
        await line.close()
        self._lines.discard(line)

    async def _settle(
        self, line: Line, together: Sequence[_Newcomer], insertion: "asyncio.Task[dict[_Newcomer, str] | None]"
    ) -> None:
        try:
            answers = insertion.result()
        except Exception as error:
            is_lost = not line.is_open
            await line.close()
            is_one = len(together) == 1
            # a migration has changed what a prepared statement returns: once more on a new connection
            is_stale = isinstance(error, FeatureNotSupported) and not together[0].is_alone
            if is_lost or (is_one and not is_stale):
                _fail(together, error)
                return
            # what one of them is refused for, or waits for, is nothing to the others
            for newcomer in together:
                newcomer.is_alone = True
                self._queue(newcomer)
            return
        if answers is None:
            for newcomer in together:
                newcomer.is_alone = newcomer.was_taken_back
                newcomer.was_taken_back = True
                self._queue(newcomer)
            return
        for newcomer, answer in answers.items():
            if not newcomer.answer.done():
                newcomer.answer.set_result(answer)


async def _insert(line: Line, together: Sequence[_Newcomer]) -> dict[_Newcomer, str] | None:
    """Commit the jobs of those who still wait for theirs; None: one of them left meanwhile, and all was taken back."""
    waiting = [newcomer for newcomer in together if not newcomer.answer.done()]
    if not waiting:
        return {}
    connection = await line.begin()
    jobs = await _inserted(connection, waiting)
    answers = {newcomer: _shown(newcomer, jobs[newcomer.id]) for newcomer in waiting}
    if any(newcomer.answer.done() for newcomer in waiting):
        await connection.execute(b"ROLLBACK", prepare=False)
        return None
    for newcomer in waiting:
        newcomer.on_commit()
    await connection.execute(b"COMMIT", prepare=False)
    return answers


async def _inserted(connection: Connection, newcomers: Sequence[_Newcomer]) -> dict[str, Row]:
    """The rows by their ids."""
    new = arrivals.together(newcomer.encoded for newcomer in newcomers)
    cursor = await connection.execute(_INSERT, [new], prepare=True, binary=True)
    rows = await cursor.fetchall()
    held = {row[_KEY] for row in rows if row[_HOLD] is not None}
    for key in sorted(held):
        await connection.execute(b"SELECT open_holds(%s)", [key])
    if held or len(rows) < len(newcomers):
        # those that an earlier commit made, whose reply was lost, are not among what was inserted
        ids = [newcomer.id for newcomer in newcomers]
        rows = await (await connection.execute(_FIND, [ids], binary=True)).fetchall()
    return {row[_ID]: row for row in rows}


def _shown(newcomer: _Newcomer, row: Row) -> str:
    try:
        return newcomer.show(job_of(row))
    except Exception as error:
        newcomer.fail(error)
        return ""


def _fail(newcomers: Sequence[_Newcomer], error: Exception) -> None:
    for newcomer in newcomers:
        newcomer.fail(error)
