"""Questions to the database that are asked together, and what becomes of those that are not answered."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rushes_api import lookup
from rushes_api.errors import Unavailable
from rushes_api.lines import Line
from rushes_api.lookup import Batches
from support.api import offline_settings


class Database:
    """Answers with the question in capitals, one batch at a time, when it is let."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.lines: list[Line] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def find(self, line: Line, questions: list[str]) -> dict[str, str]:
        self.batches.append(questions)
        self.lines.append(line)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return {question: question.upper() for question in questions if question != "nothing"}


def run(story: Callable[[Database, Batches[str, str]], Awaitable[None]]) -> None:
    async def tell() -> None:
        database = Database()
        await story(database, Batches(offline_settings(Path()), database.find, lines=1))

    asyncio.run(tell())


def started(question: Coroutine[Any, Any, str | None]) -> "asyncio.Task[str | None]":
    return asyncio.create_task(question)


def test_what_is_asked_at_once_is_one_question() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        database.may_answer.set()
        answers = await asyncio.gather(*(batches.ask(word) for word in ("a", "b", "a", "nothing")))
        assert answers == ["A", "B", "A", None]
        assert database.batches == [["a", "b", "nothing"]]

    run(story)


def test_what_is_asked_meanwhile_goes_together_afterwards() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        first = started(batches.ask("a"))
        await asyncio.sleep(0.01)
        later = [started(batches.ask(word)) for word in ("a", "b", "c")]
        await asyncio.sleep(0.01)
        database.may_answer.set()
        assert [await first, *[await one for one in later]] == ["A", "A", "B", "C"]
        # what is asked after a read began may have changed since: it is read again
        assert database.batches == [["a"], ["a", "b", "c"]]

    run(story)


def test_a_line_that_never_answers_is_given_up_with_what_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(lookup, "LINE_SECONDS", 0.05)

    async def story(database: Database, batches: Batches[str, str]) -> None:
        asked = [started(batches.ask(word)) for word in ("a", "b")]
        for one in asked:
            with pytest.raises(Unavailable):
                await one
        # the event that the first batch waits for is never set
        database.may_answer = asyncio.Event()
        database.may_answer.set()
        assert await batches.ask("c") == "C"
        assert database.batches == [["a", "b"], ["c"]]
        assert len(set(database.lines)) == 2

    run(story)


def test_a_line_that_answers_late_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "WAIT_SECONDS", 0.05)

    async def story(database: Database, batches: Batches[str, str]) -> None:
        with pytest.raises(Unavailable):
            await batches.ask("a")
        later = started(batches.ask("b"))
        await asyncio.sleep(0)
        database.may_answer.set()
        assert await later == "B"
        assert database.batches == [["a"], ["b"]]
        assert len(set(database.lines)) == 1

    run(story)


def test_what_nobody_waits_for_any_more_is_not_asked() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        first = started(batches.ask("a"))
        await asyncio.sleep(0.01)
        gone, stays = started(batches.ask("b")), started(batches.ask("c"))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait({gone})
        database.may_answer.set()
        assert [await first, await stays] == ["A", "C"]
        assert database.batches == [["a"], ["c"]]

    run(story)


def test_those_who_wait_when_it_is_closed_are_told() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        asked = [started(batches.ask("a"))]
        await asyncio.sleep(0.01)
        asked.append(started(batches.ask("b")))
        await asyncio.sleep(0)
        await batches.close()
        for one in (*asked, started(batches.ask("c"))):
            with pytest.raises(psycopg.OperationalError, match="stopping"):
                await one

    run(story)


def test_those_whose_question_was_about_to_be_sent_when_it_is_closed_are_told() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        asked = started(batches.ask("a"))
        # one turn to ask, one to gather: the third would send it
        for _ in range(2):
            await asyncio.sleep(0)
        await batches.close()
        with pytest.raises(psycopg.OperationalError, match="stopping"):
            await asked
        assert database.batches == []

    run(story)


def test_an_error_reaches_all_who_asked_and_nobody_else() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        database.may_answer.set()
        database.error = psycopg.OperationalError("gone")
        found = await asyncio.gather(batches.ask("a"), batches.ask("b"), return_exceptions=True)
        assert [type(one) for one in found] == [psycopg.OperationalError] * 2
        database.error = None
        assert await batches.ask("a") == "A"

    run(story)


def test_a_client_that_goes_away_takes_nobody_along() -> None:
    async def story(database: Database, batches: Batches[str, str]) -> None:
        gone, stays = started(batches.ask("a")), started(batches.ask("a"))
        await asyncio.sleep(0.01)
        gone.cancel()
        database.may_answer.set()
        assert await stays == "A"

    run(story)
