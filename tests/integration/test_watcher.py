"""The watcher of an API process between its two questions: what changed, and what of that has a story."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rushes_api.watch import Seat, Update, Watcher, watching
from rushes_core import time_limit
from rushes_core.database import create_api_engine
from rushes_core.events import Glimpse
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from structlog.testing import capture_logs
from support.api import API_KEY, JobDriver
from support.job_rows import JobRows
from support.proxy import FreezableProxy
from support.stack import SharedStack

Interlude = Callable[[int], Awaitable[None]]
"""Called after each answer of the database, before the watcher has it, with how many there were."""


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack) -> Settings:
    return stack.settings(checkpoint=Path("/nonexistent"), api_key=API_KEY)


@pytest.fixture
def driver(api_settings: Settings) -> Iterator[JobDriver]:
    driver = JobDriver(api_settings)
    yield driver
    driver.close()


@pytest.fixture
def job(driver: JobDriver) -> Job:
    return driver.start(JobRows(driver.engine).add().id)


class Told:
    """A watcher that looks, and what is done between its questions."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._here = asyncio.create_task(_for_ever())

    def seated(self, job: Job) -> Seat:
        seat = Seat(self.watcher)
        seat.follow(Glimpse.of(job))
        return seat

    async def next(self, seat: Seat) -> Update:
        update = await seat.next(self._here, timeout_seconds=60)
        assert update is not None, "nothing was told"
        return update

    async def has_news(self, seat: Seat) -> bool:
        return await seat.next(self._here, timeout_seconds=0) is not None


async def _for_ever() -> None:
    await asyncio.Event().wait()


def run(settings: Settings, story: Callable[[Told], Awaitable[None]], *, between: Interlude) -> None:
    num_answers = 0

    class Session(AsyncSession):
        async def execute(self, *args: Any, **values: Any) -> Any:
            nonlocal num_answers
            answer = await super().execute(*args, **values)
            num_answers += 1
            await between(num_answers)
            return answer

    async def tell() -> None:
        engine = create_api_engine(settings, pool_size=1)
        sessions: async_sessionmaker[Any] = async_sessionmaker(engine, class_=Session, expire_on_commit=False)
        async with watching(settings, sessions, on_change=lambda _: None) as watcher, asyncio.timeout(90):
            await story(Told(watcher))
        await engine.dispose()

    asyncio.run(tell())


def test_who_sits_down_during_a_look_is_told_nothing_older_than_what_it_has_seen(
    api_settings: Settings, driver: JobDriver, job: Job
) -> None:
    late: list[Seat] = []
    told: list[Told] = []

    async def sit_down(num_answers: int) -> None:
        if num_answers == 1:
            driver.report(job, phase="denoising", completed_steps=4, progress=40)
            row = driver.row(job.id)
            assert row is not None
            late.append(told[0].seated(row))

    async def story(told_here: Told) -> None:
        told.append(told_here)
        early = told_here.seated(job)
        glimpse = (await told_here.next(early)).glimpse
        assert glimpse is not None
        assert glimpse.progress == 40
        assert not await told_here.has_news(late[0])

    run(api_settings, story, between=sit_down)


def test_each_of_its_questions_may_take_as_long_as_one(
    api_settings: Settings, driver: JobDriver, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "WAIT_SECONDS", 8.0)

    async def be_slow(num_answers: int) -> None:
        await asyncio.sleep(5.0)

    async def story(told: Told) -> None:
        seat = told.seated(job)
        driver.finish(job, b"clip", Path("/nonexistent"), is_stored=False)
        update = await told.next(seat)
        assert update.story is not None
        assert update.story.job.state is JobState.COMPLETED

    run(api_settings, story, between=be_slow)


def test_a_change_whose_story_the_database_kept_to_itself_is_told_later(
    api_settings: Settings, driver: JobDriver, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(api_settings.database_url)
    assert url.host is not None
    assert url.port is not None
    with FreezableProxy(url.host, url.port) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)

        async def strand(num_answers: int) -> None:
            if num_answers == 1:
                proxy.strand()
                monkeypatch.setattr(time_limit, "WAIT_SECONDS", 1.0)
            elif proxy.num_held:
                monkeypatch.setattr(time_limit, "WAIT_SECONDS", 60.0)

        async def story(told: Told) -> None:
            seat = told.seated(job)
            driver.finish(job, b"clip", Path("/nonexistent"), is_stored=False)
            with capture_logs() as logs:
                update = await told.next(seat)
            assert proxy.num_held
            assert [line["event"] for line in logs] == ["watch_failed", "watch_recovered"]
            assert update.story is not None
            assert update.story.job.state is JobState.COMPLETED

        run(api_settings.model_copy(update={"database_url": through}), story, between=strand)
