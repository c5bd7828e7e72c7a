"""New jobs that need nothing else of their transaction: those of one moment are inserted together."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rushes_core import arrivals
from rushes_core.models import Job
from rushes_core.settings import Settings

from rushes_api.errors import is_database_gone
from rushes_api.lookup import Connection, Line, Row, job_of

LINES = 2
"""Transactions at once: while one is committed the next gathers."""
MAX_TOGETHER = 200

_INSERT = arrivals.insert_jobs("%s").encode()
_FIND = f"SELECT {', '.join(arrivals.JOB_COLUMNS)} FROM jobs WHERE id = ANY(%s)".encode()
_ID, _KEY, _HOLD = (arrivals.JOB_COLUMNS.index(name) for name in ("id", "api_key", "hold"))


@dataclass(frozen=True, slots=True, eq=False)
class _Newcomer:
    values: Mapping[str, Any]
    show: Callable[[Job], str]
    on_commit: Callable[[], None]
    answer: asyncio.Future[str]
    """Done before the commit: whoever waited has gone, or cannot be shown the job."""

    @property
    def id(self) -> str:
        return self.values["id"]


class Intake:
    """Inserts jobs for every request of this process. While every line is taken, jobs gather for the next."""

    def __init__(self, settings: Settings) -> None:
        self._lines = [Line(settings) for _ in range(LINES)]
        self._free = list(self._lines)
        self._newcomers: list[_Newcomer] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def add(self, values: Mapping[str, Any], show: Callable[[Job], str], on_commit: Callable[[], None]) -> str:
        """What `show` says of the new job, once it is committed. One that is there already is shown as it is.

        Args:
            values: as `arrivals` takes them.
            on_commit: called when the commit is about to be sent. Before that, whatever is raised here or by `show`,
                also the cancellation of this, leaves no job.

        Raises:
            psycopg.Error
        """
        loop = asyncio.get_running_loop()
        newcomer = _Newcomer(values, show, on_commit, loop.create_future())
        self._newcomers.append(newcomer)
        # what else comes in this turn of the loop goes along
        loop.call_soon(self._start)
        return await newcomer.answer

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        for line in self._lines:
            await line.close()

    def _start(self) -> None:
        if self._newcomers and self._free:
            together, self._newcomers = self._newcomers[:MAX_TOGETHER], self._newcomers[MAX_TOGETHER:]
            task = asyncio.create_task(self._take_in(self._free.pop(), together))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _take_in(self, line: Line, together: Sequence[_Newcomer]) -> None:
        try:
            if not await self._settle(line, together):
                # one that the database refuses is nothing to the others
                for newcomer in together:
                    await self._settle(line, [newcomer])
        finally:
            self._free.append(line)
            self._start()

    async def _settle(self, line: Line, together: Sequence[_Newcomer]) -> bool:
        """Whether all of `together` have been answered; not if they are to be tried one by one."""
        try:
            answers = await _insert(line, together)
        except Exception as error:
            await line.close()
            if len(together) > 1 and not is_database_gone(error):
                return False
            for newcomer in together:
                if not newcomer.answer.done():
                    newcomer.answer.set_exception(error)
        else:
            for newcomer, answer in answers.items():
                if not newcomer.answer.done():
                    newcomer.answer.set_result(answer)
        return True


async def _insert(line: Line, together: Sequence[_Newcomer]) -> dict[_Newcomer, str]:
    """Commit the jobs of those who still wait for theirs."""
    while waiting := [newcomer for newcomer in together if not newcomer.answer.done()]:
        connection = await line.begin()
        jobs = await _inserted(connection, waiting)
        answers = {newcomer: _shown(newcomer, jobs[newcomer.id]) for newcomer in waiting}
        if any(newcomer.answer.done() for newcomer in waiting):
            await connection.execute(b"ROLLBACK", prepare=False)
            continue
        for newcomer in waiting:
            newcomer.on_commit()
        await connection.execute(b"COMMIT", prepare=False)
        return answers
    return {}


async def _inserted(connection: Connection, newcomers: Sequence[_Newcomer]) -> dict[str, Row]:
    """The rows by their ids."""
    new = arrivals.encoded(newcomer.values for newcomer in newcomers)
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
        newcomer.answer.set_exception(error)
        return ""
