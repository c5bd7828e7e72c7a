"""What waits on real Postgres: pauses, places in the queue, and the counts that the queue view shows."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from rushes_core import backlog, holds, jobs, replicas
from rushes_core.models import ApiKey
from sqlalchemy import Engine, func, text
from sqlalchemy.orm import Session
from support.job_rows import MODEL, JobRows
from support.plans import executed_plan, rows_read

KEY = "key_limited"


@pytest.fixture
def rows(engine: Engine) -> Iterator[JobRows]:
    key = {"id": KEY, "project": "default", "name": KEY, "hint": "abcd", "digest": b"", "scopes": [], "priorities": []}
    with Session(engine) as session, session.begin():
        session.add(ApiKey(**key, max_running=1))
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, replicas, queue_pauses,"
                " api_keys, api_key_usage"
            )
        )


def held(rows: JobRows, **values: Any) -> Any:
    """A new job of the limited key, as the API accepts one."""
    job = rows.add(api_key=KEY, **values)
    rows.run(holds.open_holds(KEY))
    return rows.read(job.id)


class TestPause:
    def test_jobs_of_a_paused_project_are_not_claimed_until_it_is_resumed(self, rows: JobRows) -> None:
        waiting, other = rows.add(project="paused", priority=0), rows.add(project="other")
        rows.run(backlog.pause_queue("paused"))
        claimed = rows.claim()
        assert claimed is not None
        assert claimed.id == other.id
        assert rows.claim() is None
        assert rows.run(backlog.resume_queue("paused")) == "paused"
        claimed = rows.claim()
        assert claimed is not None
        assert claimed.id == waiting.id

    def test_a_pause_of_everybody_stops_all_projects_and_leaves_single_pauses_as_they_are(self, rows: JobRows) -> None:
        one = rows.add(project="one")
        rows.add(project="two")
        rows.run(backlog.pause_queue("two"))
        rows.run(backlog.pause_queue(backlog.EVERYBODY))
        assert rows.claim() is None
        rows.run(backlog.resume_queue(backlog.EVERYBODY))
        claimed = rows.claim()
        assert claimed is not None
        assert claimed.id == one.id
        assert rows.claim() is None

    def test_pausing_and_resuming_twice_changes_nothing(self, rows: JobRows) -> None:
        first, second = rows.run(backlog.pause_queue("p")), rows.run(backlog.pause_queue("p"))
        assert second.paused_at == first.paused_at
        assert [rows.run(backlog.resume_queue("p")) for _ in range(2)] == ["p", None]

    def test_a_project_feels_its_own_pause_and_that_of_everybody(self, rows: JobRows) -> None:
        for project in ("p", "q", backlog.EVERYBODY):
            rows.run(backlog.pause_queue(project))
        with Session(rows.engine) as session:
            assert [one.project for one in session.scalars(backlog.queue_pauses("p"))] == ["*", "p"]
            assert [one.project for one in session.scalars(backlog.queue_pauses())] == ["*", "p", "q"]

    def test_what_a_replica_holds_goes_on(self, rows: JobRows) -> None:
        job = rows.claimed()
        rows.run(backlog.pause_queue("default"))
        assert rows.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=30)) is not None

    def test_nobody_is_woken_for_what_is_paused(self, rows: JobRows) -> None:
        values = {"pool": "default", "layout": "r1s1", "model": MODEL, "device": "cpu", "state": "ready", "epoch": 1}
        with rows.engine.begin() as connection:
            connection.execute(replicas.upsert_replica("replica", **values))
        rows.add(project="paused")
        rows.add(project="other")
        ready = backlog.num_ready(pool="default", limit=64)
        assert rows.run(ready) == 2
        rows.run(backlog.pause_queue("paused"))
        assert rows.run(ready) == 1
        rows.run(backlog.pause_queue(backlog.EVERYBODY))
        assert rows.run(ready) == 0


class TestPlace:
    def test_a_held_job_comes_after_those_of_its_key_that_are_opened_before(self, rows: JobRows) -> None:
        first, second, third = held(rows), held(rows), held(rows)
        assert [job.hold for job in (first, second, third)] == [None, "concurrency", "concurrency"]
        assert [rows.run(backlog.num_ahead(job)) for job in (first, second, third)] == [0, 1, 2]

    def test_held_jobs_of_another_key_and_paused_projects_take_no_turn(self, rows: JobRows) -> None:
        for _ in range(3):
            held(rows)
        rows.add(project="paused", priority=0)
        rows.add(project="paused")
        own = rows.add(project="own")
        rows.run(backlog.pause_queue("paused"))
        assert rows.run(backlog.num_ahead(own)) == 0
        last = rows.add(project="own")
        # one of its own, and a turn of the limited key's open job
        assert rows.run(backlog.num_ahead(last)) == 2

    def test_within_a_paused_project_the_order_is_that_of_its_jobs(self, rows: JobRows) -> None:
        added = [rows.add(), rows.add(), rows.add(priority=0)]
        rows.run(backlog.pause_queue("default"))
        assert [rows.run(backlog.num_ahead(job)) for job in added] == [1, 2, 0]


class TestShapes:
    LONG: ClassVar = {"num_frames": 362, "width": 832}

    def test_what_waits_is_counted_by_class_and_shape(self, rows: JobRows) -> None:
        rows.add()
        rows.add(project="other", **self.LONG)
        rows.add(priority=2, **self.LONG)
        for unseen in ({"project": "paused"}, {"model": "another"}, {"run_at": func.now() + text("interval '1 hour'")}):
            rows.add(**unseen)
        held(rows)
        held(rows)
        rows.run(backlog.pause_queue("paused"))
        with rows.engine.connect() as connection:
            found = {tuple(row) for row in connection.execute(backlog.shapes_waiting(MODEL))}
        assert found == {(1, 480, 480, 107, 2), (1, 832, 480, 362, 1), (2, 832, 480, 362, 1)}

    def test_a_pause_of_everybody_leaves_nothing_that_waits_for_a_turn(self, rows: JobRows) -> None:
        rows.add()
        rows.run(backlog.pause_queue(backlog.EVERYBODY))
        assert shapes_waiting(rows) == ([], 0)

    def test_of_a_long_queue_only_the_first_are_read(self, rows: JobRows) -> None:
        add_many(rows, 3_000, num_projects=2)
        ((*_, num_jobs),), num_read = shapes_waiting(rows)
        assert num_jobs == 2 * backlog.SAMPLED_PER_LANE
        # two lanes, each found by the first row of its own
        assert num_read <= num_jobs + 4

    def test_many_projects_of_one_class_hide_none_of_another(self, rows: JobRows) -> None:
        add_many(rows, 6_000, num_projects=300, priority=0)
        rows.add(priority=2, **self.LONG)
        found, num_read = shapes_waiting(rows)
        assert {tuple(row) for row in found} == {(0, 480, 480, 107, backlog.MAX_SAMPLED), (2, 832, 480, 362, 1)}
        assert num_read < 1_000

    def test_jobs_of_another_model_are_not_read(self, rows: JobRows) -> None:
        add_many(rows, 2_000, num_projects=200, model="a")
        rows.add()
        ((*_, num_jobs),), num_read = shapes_waiting(rows)
        assert num_jobs == 1
        assert num_read <= 4


def add_many(rows: JobRows, num_jobs: int, *, num_projects: int, model: str = MODEL, priority: int = 1) -> None:
    with rows.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO jobs"
                " (id, project, model, priority, prompt, seed, width, height, num_frames, request, max_attempts)"
                " SELECT 'video_' || i, 'p' || i % :projects, :model, :priority, 'x', i, 480, 480, 107, '{}', 3"
                " FROM generate_series(1, :jobs) AS i"
            ),
            {"projects": num_projects, "model": model, "priority": priority, "jobs": num_jobs},
        )


def shapes_waiting(rows: JobRows) -> tuple[Sequence[Any], int]:
    """What is found, and how many rows of jobs were read."""
    with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE jobs"))
        found = connection.execute(backlog.shapes_waiting(MODEL)).all()
        return found, rows_read(executed_plan(connection, backlog.shapes_waiting(MODEL)), "jobs")


class TestOverview:
    def test_counts_by_state_class_and_hold(self, rows: JobRows) -> None:
        for _ in range(3):
            held(rows)
        for project, priority in (("other", 0), ("other", 2), ("third", 2)):
            rows.add(project=project, priority=priority)
        rows.claim()
        job = rows.claim()
        assert job is not None
        rows.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=30))
        assert counts(rows) == {
            ("running", 1, None): 1,
            ("claimed", 0, None): 1,
            ("queued", 2, None): 2,
            ("queued", 1, "concurrency"): 2,
        }
        assert counts(rows, "other") == {("claimed", 0, None): 1, ("queued", 2, None): 1}
        assert counts(rows, "default") == {("running", 1, None): 1, ("queued", 1, "concurrency"): 2}
        assert counts(rows, "nobody") == {}

    def test_tells_how_long_the_first_has_waited_since_it_might_have_been_claimed(self, rows: JobRows) -> None:
        rows.add(run_at=func.now() - text("interval '1 hour'"))
        rows.add(run_at=func.now() + text("interval '1 hour'"))
        rows.add(priority=2, run_at=func.now() + text("interval '1 hour'"))
        with rows.engine.connect() as connection:
            found = {row.priority: row for row in connection.execute(backlog.overview())}
        assert 3600 <= found[1].waiting_seconds < 3700
        assert found[2].waiting_seconds is None
        assert [(row.num_jobs, row.num_early) for row in (found[1], found[2])] == [(2, 1), (1, 1)]


def counts(rows: JobRows, project: str | None = None) -> dict[tuple[str, int, str | None], int]:
    with rows.engine.connect() as connection:
        found = connection.execute(backlog.overview(project)).all()
    return {(row.state, row.priority, row.hold): row.num_jobs for row in found}
