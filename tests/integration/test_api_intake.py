"""Jobs that are inserted together: each is its own request's, whatever becomes of the others."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from rushes_api.intake import LINES, Intake
from rushes_core import arrivals, database, keys
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from support.api import JobDriver


def new_job(**values: Any) -> dict[str, Any]:
    return {
        "id": new_video_id(),
        "project": "default",
        "api_key": "operator",
        "priority": 1,
        "model": "tiny",
        "prompt": "waves",
        "seed": 1,
        "width": 480,
        "height": 480,
        "num_frames": 107,
        "request": {"seconds": "4"},
        "max_attempts": 3,
        **values,
    }


def shown(job: Job) -> str:
    return f"{job.id} {job.hold}"


def ignored() -> None:
    pass


def run(settings: Settings, story: Callable[[Intake], Awaitable[None]]) -> None:
    async def tell() -> None:
        intake = Intake(settings)
        try:
            await story(intake)
        finally:
            await intake.close()

    asyncio.run(tell())


def test_jobs_of_one_moment_are_one_transaction(api_settings: Settings, driver: JobDriver) -> None:
    jobs = [new_job() for _ in range(5)]

    async def story(intake: Intake) -> None:
        answers = await asyncio.gather(*(intake.add(job, shown, ignored) for job in jobs))
        assert answers == [f"{job['id']} None" for job in jobs]

    run(api_settings, story)
    with driver.engine.connect() as connection:
        found = text("SELECT count(*), count(DISTINCT xmin::text) FROM jobs WHERE id = ANY(:ids)")
        assert connection.execute(found, {"ids": [job["id"] for job in jobs]}).one() == (5, 1)
        history = text("SELECT count(*) FROM job_events WHERE job_id = ANY(:ids) AND new_state = 'queued'")
        assert connection.execute(history, {"ids": [job["id"] for job in jobs]}).scalar_one() == 5


def test_a_job_is_what_was_asked_for(api_settings: Settings, driver: JobDriver) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    job = new_job(
        prompt='\U0001f30a "waves" \\u0041 \x01',
        seed=2**63 - 1,
        request={"seconds": "4", "metadata": {"é": "\\"}, "not_before": later.timestamp(), "size_requested": None},
        run_at=later,
        deadline_at=later + timedelta(microseconds=1),
        retention_seconds=3_600,
        webhook={"state": "pending"},
    )
    plain = new_job()

    async def story(intake: Intake) -> None:
        await asyncio.gather(*(intake.add(one, shown, ignored) for one in (job, plain)))

    run(api_settings, story)
    row = driver.row(job["id"])
    assert row is not None
    assert {name: getattr(row, name) for name in job if name != "retention_seconds"} == {
        name: value for name, value in job.items() if name != "retention_seconds"
    }
    assert row.retain_until == row.created_at + timedelta(hours=1)
    row = driver.row(plain["id"])
    assert row is not None
    assert (row.run_at, row.deadline_at, row.retain_until, row.webhook) == (row.created_at, None, None, None)


def test_one_that_cannot_be_shown_leaves_no_job(api_settings: Settings, driver: JobDriver) -> None:
    faulty, sound = new_job(), new_job()

    def refuse(job: Job) -> str:
        raise LookupError("no")

    async def story(intake: Intake) -> None:
        first, second = (intake.add(faulty, refuse, ignored), intake.add(sound, shown, ignored))
        answers = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(answers[0], LookupError)
        assert answers[1] == f"{sound['id']} None"

    run(api_settings, story)
    assert driver.row(faulty["id"]) is None
    assert driver.row(sound["id"]) is not None


def test_one_that_the_database_refuses_is_nothing_to_the_others(api_settings: Settings, driver: JobDriver) -> None:
    faulty, sound = new_job(priority=9), new_job()

    async def story(intake: Intake) -> None:
        adds = [intake.add(job, shown, ignored) for job in (faulty, sound)]
        answers = await asyncio.gather(*adds, return_exceptions=True)
        assert isinstance(answers[0], psycopg.errors.CheckViolation)
        assert answers[1] == f"{sound['id']} None"

    run(api_settings, story)
    assert driver.row(faulty["id"]) is None
    assert driver.row(sound["id"]) is not None


def test_one_that_is_given_up_before_the_commit_leaves_no_job(api_settings: Settings, driver: JobDriver) -> None:
    left, kept = new_job(), new_job()
    sent: list[str] = []

    async def story(intake: Intake) -> None:
        leaving = asyncio.create_task(intake.add(left, shown, lambda: sent.append("left")))

        def show(job: Job) -> str:
            leaving.cancel()
            return shown(job)

        assert await intake.add(kept, show, lambda: sent.append("kept")) == f"{kept['id']} None"
        with pytest.raises(asyncio.CancelledError):
            await leaving

    run(api_settings, story)
    assert sent == ["kept"]
    assert driver.row(left["id"]) is None
    assert driver.row(kept["id"]) is not None


def test_a_limit_that_nobody_here_knows_of_holds(api_settings: Settings, driver: JobDriver) -> None:
    key = keys.key_values(keys.NewKey(name="limited", max_running=1), keys.Secret.new())
    with Session(driver.engine) as session, session.begin():
        session.execute(keys.create(**key))
    jobs = [new_job(api_key=key["id"]), new_job(), new_job(api_key=key["id"])]

    async def story(intake: Intake) -> None:
        answers = await asyncio.gather(*(intake.add(job, shown, ignored) for job in jobs))
        assert [answer.split()[1] for answer in answers] == ["None", "None", "concurrency"]

    run(api_settings, story)


def test_a_job_that_is_there_already_is_shown_as_it_is(api_settings: Settings, driver: JobDriver) -> None:
    jobs = [new_job(), new_job()]

    async def story(intake: Intake) -> None:
        assert await intake.add(jobs[0], shown, ignored)
        driver.fail(jobs[0]["id"], code="generation_failed", message="no")
        answers = await asyncio.gather(*(intake.add(job, lambda job: job.state, ignored) for job in jobs))
        assert answers == ["failed", "queued"]

    run(api_settings, story)


def insert(session: Session, job: dict[str, Any]) -> None:
    session.execute(arrivals.CREATE, {"jobs": arrivals.together([arrivals.encoded(job)])})


@pytest.fixture(autouse=True, scope="module")
def known(api_settings: Settings, driver: JobDriver) -> None:
    """The first job of a project makes its share of the GPUs, for which others would wait."""
    with Session(driver.engine) as session, session.begin():
        insert(session, new_job())


def wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing that waits for a lock be given up meanwhile, however busy this machine is."""
    monkeypatch.setattr("rushes_api.intake.WAIT_SECONDS", 60.0)
    monkeypatch.setitem(database._CONNECT_ARGS, "options", "-c lock_timeout=60s -c timezone=UTC")


async def waits_for_a_lock(engine: Engine, num: int = 1) -> None:
    """Until so many sessions of this database wait for what another one has."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        async with asyncio.timeout(60):
            while connection.execute(waiting).scalar_one() < num:
                await asyncio.sleep(0.01)


def test_a_commit_that_is_still_on_its_way_is_waited_for_by_nobody_else(
    api_settings: Settings, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_locks(monkeypatch)
    job, other = new_job(), new_job()

    async def story(intake: Intake) -> None:
        with Session(driver.engine) as earlier:
            insert(earlier, job)
            again = asyncio.create_task(intake.add(job, shown, ignored, in_doubt=True))
            assert await intake.add(other, shown, ignored) == f"{other['id']} None"
            await waits_for_a_lock(driver.engine)
            earlier.commit()
            assert await again == f"{job['id']} None"

    run(api_settings, story)


def test_one_that_waits_for_a_lock_for_too_long_is_nothing_to_the_others(
    api_settings: Settings, driver: JobDriver
) -> None:
    blocked, free = new_job(), new_job()

    async def story(intake: Intake) -> None:
        with Session(driver.engine) as earlier:
            insert(earlier, blocked)
            waiting = asyncio.create_task(intake.add(blocked, shown, ignored))
            assert await intake.add(free, shown, ignored) == f"{free['id']} None"
            assert not waiting.done()
            earlier.rollback()
            assert await waiting == f"{blocked['id']} None"

    run(api_settings, story)


def test_nothing_is_kept_of_requests_that_were_given_up_while_every_line_waits(
    api_settings: Settings, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_locks(monkeypatch)
    blocked = [new_job() for _ in range(LINES)]

    async def story(intake: Intake) -> None:
        with Session(driver.engine) as earlier:
            for job in blocked:
                insert(earlier, job)
            waiting = [asyncio.create_task(intake.add(job, shown, ignored, in_doubt=True)) for job in blocked]
            await waits_for_a_lock(driver.engine, LINES)

            def show(job: Job) -> str:
                return job.id

            kept = weakref.ref(show)
            given_up = asyncio.create_task(intake.add(new_job(), show, ignored))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait({given_up})
            del show, given_up
            gc.collect()
            assert kept() is None
            earlier.rollback()
            await asyncio.gather(*waiting)

    run(api_settings, story)


def test_a_connection_that_never_answers_is_given_up(
    api_settings: Settings, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rushes_api.intake.WAIT_SECONDS", 1.0)
    sent: list[str] = []

    async def story(intake: Intake) -> None:
        for _ in range(LINES):
            with Session(driver.engine) as earlier:
                job = new_job()
                insert(earlier, job)
                waiting = asyncio.create_task(intake.add(job, shown, lambda: sent.append("never")))
                with pytest.raises(psycopg.OperationalError, match="did not answer within 1 s"):
                    await waiting
        # a new connection may take longer on a busy machine
        intake._wait_seconds = 60.0  # pyright: ignore[reportPrivateUsage]
        job = new_job()
        assert await intake.add(job, shown, ignored) == f"{job['id']} None"

    run(api_settings, story)
    assert sent == []


def test_what_waits_when_it_is_closed_is_told(
    api_settings: Settings, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_locks(monkeypatch)
    blocked = [new_job() for _ in range(LINES)]
    late = new_job()

    async def story(intake: Intake) -> None:
        with Session(driver.engine) as earlier:
            for job in blocked:
                insert(earlier, job)
            adds = [asyncio.create_task(intake.add(job, shown, ignored, in_doubt=True)) for job in blocked]
            await waits_for_a_lock(driver.engine, LINES)
            adds.append(asyncio.create_task(intake.add(late, shown, ignored)))
            await asyncio.sleep(0)
            await intake.close()
            for add in adds:
                with pytest.raises(psycopg.OperationalError, match="stopping"):
                    await add
            with pytest.raises(psycopg.OperationalError, match="stopping"):
                await intake.add(late, shown, ignored)

    run(api_settings, story)
    assert driver.row(late["id"]) is None


def test_large_jobs_are_divided_among_transactions(api_settings: Settings, driver: JobDriver) -> None:
    jobs = [new_job(prompt="\N{WATER WAVE}" * 65_536) for _ in range(20)]

    async def story(intake: Intake) -> None:
        assert len(set(await asyncio.gather(*(intake.add(job, shown, ignored) for job in jobs)))) == len(jobs)

    run(api_settings, story)
    with driver.engine.connect() as connection:
        found = text("SELECT count(*), count(DISTINCT xmin::text) FROM jobs WHERE id = ANY(:ids)")
        assert connection.execute(found, {"ids": [job["id"] for job in jobs]}).one() == (20, 2)
