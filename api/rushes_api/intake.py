"""New jobs that need nothing else of their transaction: those of one moment are inserted together."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.errors import FeatureNotSupported
from rushes_core import arrivals
from rushes_core.models import Job
from rushes_core.settings import Settings

from rushes_api.lines import Connection, Gathering, Line, Row
from rushes_api.lookup import job_of

LINES = 2
"""Transactions at once: while one is committed the next gathers."""
MAX_TOGETHER = 200
MAX_CHARACTERS = 1_000_000
"""Of jobs that are inserted together, as JSON; one alone may have more."""
WAIT_SECONDS = 12.0
"""How long a transaction may take: longer than the database itself lets a statement run."""

_INSERT = arrivals.insert_jobs("%s").encode()
_FIND = f"SELECT {', '.join(arrivals.JOB_COLUMNS)} FROM jobs WHERE id = ANY(%s)".encode()
_ID, _KEY, _HOLD = (arrivals.JOB_COLUMNS.index(name) for name in ("id", "api_key", "hold"))


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


class Intake(Gathering[Sequence[_Newcomer]]):
    """Inserts jobs for every request of this process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, lines=LINES, wait_seconds=WAIT_SECONDS)
        self._waiting: dict[_Newcomer, None] = {}

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

    def _queue(self, newcomer: _Newcomer) -> None:
        if not newcomer.answer.done():
            self._waiting[newcomer] = None
            self._call()

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

    async def _work(self, line: Line, together: Sequence[_Newcomer]) -> None:
        try:
            answers = await _insert(line, together)
        except Exception as error:
            is_lost = not line.is_open
            await line.close()
            is_one = len(together) == 1
            # a migration has changed what a prepared statement returns: once more on a new connection
            is_stale = isinstance(error, FeatureNotSupported) and not together[0].is_alone
            if is_lost or (is_one and not is_stale):
                raise
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

    def _fail(self, together: Sequence[_Newcomer], error: Exception) -> None:
        for newcomer in together:
            newcomer.fail(error)


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
