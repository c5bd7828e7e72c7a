"""Jobs that a key's `max_running` holds back, on real Postgres."""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
from rushes_core import holds, jobs
from rushes_core.database import create_sync_engine
from rushes_core.dispatcher import Dispatcher
from rushes_core.models import ApiKey, Job
from rushes_core.settings import Settings
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import RESULT, JobRows
from support.new_jobs import insert_job

KEY = "key_limited"
LATER = func.now() + text("interval '1 hour'")


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[Engine]:
    engine = create_sync_engine(settings, pool_size=8)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def dispatcher(settings: Settings) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(settings)
    yield dispatcher
    dispatcher.close()


@pytest.fixture
def rows(engine: Engine) -> Iterator[JobRows]:
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(
            text("TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, api_keys, api_key_usage")
        )


def limit(rows: JobRows, max_running: int | None, key: str = KEY) -> None:
    """Make the key, or change its limit."""
    with Session(rows.engine) as session, session.begin():
        found = session.get(ApiKey, key)
        if found is None:
            names = {"id": key, "project": "default", "name": key, "hint": "abcd", "digest": key.encode()}
            found = ApiKey(**names, scopes=[], priorities=[])
            session.add(found)
        found.max_running = max_running


def accept(rows: JobRows, key: str = KEY, **values: object) -> Job:
    """A new job, as the API accepts one."""
    job = rows.add(api_key=key, **values)
    if job.hold is not None:
        rows.run(holds.open_holds(key))
    return rows.read(job.id)


def complete(rows: JobRows, job: Job) -> None:
    assert rows.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=30)) is not None
    assert rows.run(jobs.complete(job.id, fence=job.fence or 0, result=RESULT, timings={})) is not None


def open_ids(rows: JobRows) -> set[str]:
    with Session(rows.engine) as session:
        return set(session.scalars(select(Job.id).where(Job.state == "queued", Job.hold.is_(None))))


def test_a_key_with_room_calls_who_opens_its_jobs(rows: JobRows, dispatcher: Dispatcher) -> None:
    limit(rows, 1)
    assert dispatcher.glance() == frozenset()
    rows.add(api_key=KEY)
    assert dispatcher.glance() == {"holds"}
    dispatcher.open_holds()
    assert "holds" not in dispatcher.glance()


class TestLimit:
    def test_no_more_than_max_running_jobs_of_a_key_may_be_claimed(self, rows: JobRows) -> None:
        limit(rows, 2)
        accepted = [accept(rows) for _ in range(4)]
        assert [job.hold for job in accepted] == [None, None, "concurrency", "concurrency"]
        claimed = [rows.claim(), rows.claim(), rows.claim()]
        assert [job and job.id for job in claimed] == [accepted[0].id, accepted[1].id, None]

    def test_a_job_that_ends_lets_the_next_one_in(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        first, second, third = (accept(rows) for _ in range(3))
        dispatcher.open_holds()
        assert open_ids(rows) == {first.id}
        claimed = rows.claim()
        assert claimed is not None
        dispatcher.open_holds()
        assert open_ids(rows) == set()
        complete(rows, claimed)
        dispatcher.open_holds()
        assert open_ids(rows) == {second.id}
        rows.run(jobs.cancel(second.id, project="default"))
        dispatcher.open_holds()
        assert open_ids(rows) == {third.id}

    def test_a_job_whose_attempt_was_lost_keeps_its_place(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        first, _ = accept(rows), accept(rows)
        claimed = rows.claim()
        assert claimed is not None
        rows.run(jobs.start(claimed.id, fence=claimed.fence or 0, lease_seconds=30))
        rows.run(jobs.retry_or_fail(claimed.id, fence=claimed.fence or 0, error=jobs.LEASE_LOST, crashed=True))
        dispatcher.open_holds()
        assert open_ids(rows) == {first.id}

    def test_keys_are_limited_apart_and_one_without_a_limit_not_at_all(
        self, rows: JobRows, dispatcher: Dispatcher
    ) -> None:
        limit(rows, 1)
        limit(rows, 2, "key_other")
        limit(rows, None, "key_free")
        for key in (KEY, "key_other", "key_free", "unknown"):
            for _ in range(3):
                accept(rows, key)
        dispatcher.open_holds()
        with Session(rows.engine) as session:
            statement = select(Job.api_key, func.count()).where(Job.hold.is_(None)).group_by(Job.api_key)
            counts = {row[0]: row[1] for row in session.execute(statement)}
        assert counts == {KEY: 1, "key_other": 2, "key_free": 3, "unknown": 3}

    def test_a_retry_waits_like_a_new_job(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        cancelled = accept(rows)
        rows.run(jobs.cancel(cancelled.id, project="default"))
        running = accept(rows)
        retried = rows.run(jobs.retry(cancelled.id, project="default"))
        assert retried.hold == "concurrency"
        assert rows.run(holds.open_holds(KEY)) == 0
        rows.run(jobs.cancel(running.id, project="default"))
        dispatcher.open_holds()
        assert open_ids(rows) == {cancelled.id}

    def test_held_jobs_can_be_cancelled_deleted_and_expire(self, rows: JobRows) -> None:
        limit(rows, 1)
        accept(rows)
        cancelled, deleted, late = accept(rows), accept(rows), accept(rows, deadline_at=func.now())
        assert rows.run(jobs.cancel(cancelled.id, project="default")).state == "cancelled"
        assert rows.run(jobs.delete_job(deleted.id, project="default")).state == "cancelled"
        assert rows.run(jobs.expire()).id == late.id
        assert [rows.read(job.id).hold for job in (cancelled, deleted, late)] == [None, None, None]

    def test_a_project_of_which_only_held_jobs_were_left_is_claimed_from_again(
        self, rows: JobRows, dispatcher: Dispatcher
    ) -> None:
        limit(rows, 1)
        first, second = accept(rows), accept(rows)
        rows.run(jobs.cancel(first.id, project="default"))
        with rows.engine.begin() as connection:
            connection.execute(text("TRUNCATE project_shares"))
        dispatcher.open_holds()
        claimed = rows.claim()
        assert claimed is not None
        assert claimed.id == second.id


class TestOrder:
    def test_jobs_are_opened_by_class_then_time(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        first = accept(rows)
        bulk, old, new, urgent = (accept(rows, priority=priority) for priority in (2, 1, 1, 0))
        dispatcher.open_holds()
        opened: list[str] = []
        for _ in range(5):
            (job_id,) = open_ids(rows)
            opened.append(job_id)
            rows.run(jobs.cancel(job_id, project="default"))
            dispatcher.open_holds()
        # the most urgent took the place that the first had
        assert opened == [urgent.id, first.id, old.id, new.id, bulk.id]

    def test_a_more_urgent_job_takes_the_place_of_the_last_that_nobody_has_claimed(self, rows: JobRows) -> None:
        limit(rows, 2)
        first, second = accept(rows), accept(rows)
        urgent = accept(rows, priority=0)
        assert open_ids(rows) == {first.id, urgent.id}
        assert rows.read(second.id).hold == "concurrency"
        # of those that are claimed it takes none
        assert rows.claim() is not None
        assert rows.claim() is not None
        assert accept(rows, priority=0).hold == "concurrency"

    def test_a_job_of_the_same_class_pushes_nothing_out(self, rows: JobRows) -> None:
        limit(rows, 1)
        first = accept(rows)
        accept(rows, run_at=func.now() - text("interval '1 hour'"))
        assert open_ids(rows) == {first.id}

    def test_a_job_whose_time_has_not_come_takes_no_place(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        later = accept(rows, priority=0, run_at=LATER)
        assert later.hold == "concurrency"
        now = accept(rows, priority=2)
        dispatcher.open_holds()
        assert open_ids(rows) == {now.id}
        with rows.engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == later.id).values(run_at=func.now()))
        dispatcher.open_holds()
        assert open_ids(rows) == {later.id}


class TestChange:
    def test_a_limit_that_is_lowered_holds_what_is_not_claimed(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 4)
        accepted = [accept(rows) for _ in range(5)]
        assert rows.claim() is not None
        limit(rows, 2)
        dispatcher.open_holds()
        assert open_ids(rows) == {accepted[1].id}
        limit(rows, 1)
        dispatcher.open_holds()
        assert open_ids(rows) == set()

    def test_a_limit_that_is_new_holds_jobs_that_were_accepted_without_one(
        self, rows: JobRows, dispatcher: Dispatcher
    ) -> None:
        limit(rows, None)
        accepted = [accept(rows) for _ in range(3)]
        limit(rows, 1)
        dispatcher.open_holds()
        assert open_ids(rows) == {accepted[0].id}

    def test_a_limit_that_is_taken_away_opens_everything(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        accepted = [accept(rows, run_at=LATER) for _ in range(3)]
        limit(rows, None)
        dispatcher.open_holds()
        assert open_ids(rows) == {job.id for job in accepted}

    def test_a_pass_with_nothing_to_do_calls_for_no_key(self, rows: JobRows, dispatcher: Dispatcher) -> None:
        limit(rows, 1)
        limit(rows, None, "key_free")
        for key in (KEY, "key_free"):
            for priority in (1, 1, 2):
                accept(rows, key, priority=priority)
        accept(rows, run_at=LATER, priority=0)
        with rows.engine.connect() as connection:
            assert connection.scalars(holds.keys_to_open()).all() == []


def test_jobs_that_are_leased_or_open_never_exceed_the_limit_whoever_opens_at_once(rows: JobRows) -> None:
    """Clients that submit and retry, dispatchers and workers, all at once; counted after every move."""
    limit(rows, 3)
    too_many: list[int] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def repeat(times: int, act: Callable[[], None]) -> None:
        try:
            for _ in range(times):
                act()
            # whoever was quicker than those who submit goes on beside them
            while act is not submit and any(one.is_alive() for one in submitters):
                act()
        except BaseException as error:
            failures.append(error)

    def submit() -> None:
        with Session(rows.engine, expire_on_commit=False) as session, session.begin():
            values = {name: getattr(template, name) for name in columns} | {"priority": next(numbers) % 3}
            insert_job(session, id=f"video_{next(numbers)}", **values)
            session.execute(holds.open_holds(KEY))

    def dispatch() -> None:
        rows.run(holds.open_holds(KEY))

    def work() -> None:
        job = rows.claim()
        if job is None:
            return
        number = next(numbers) % 3
        if number == 0:
            rows.run(jobs.release(job.id, fence=job.fence or 0))
        else:
            complete(rows, job)

    def watch() -> None:
        statement = text(
            "SELECT count(*) FROM jobs WHERE state IN ('claimed', 'running') OR state = 'queued' AND hold IS NULL"
        )
        while not done.is_set():
            with rows.engine.connect() as connection:
                if (number := connection.execute(statement).scalar_one()) > 3:
                    too_many.append(number)

    numbers = itertools.count(1)
    template = accept(rows)
    columns = (
        "project",
        "model",
        "prompt",
        "seed",
        "width",
        "height",
        "num_frames",
        "request",
        "max_attempts",
        "api_key",
    )
    watcher = threading.Thread(target=watch)
    submitters = [threading.Thread(target=repeat, args=(60, submit)) for _ in range(2)]
    others = [threading.Thread(target=repeat, args=(150, act)) for act in (dispatch, dispatch, work, work)]
    for thread in (watcher, *submitters, *others):
        thread.start()
    for thread in (*submitters, *others):
        thread.join()
    done.set()
    watcher.join()
    assert failures == []
    assert too_many == []
    with Session(rows.engine) as session:
        completed = session.scalar(select(func.count()).where(Job.state == "completed"))
    assert (completed or 0) > 10
