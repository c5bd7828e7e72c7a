"""Whose job is claimed next on real Postgres, and the plan that finds it among many."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rushes_core import backlog, claims, holds, jobs, leftovers, shares
from rushes_core.database import create_sync_engine
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_worker.ledger import Ledger
from sqlalchemy import Connection, Engine, func, text
from support.job_rows import MODEL, JobRows
from support.plans import executed_plan, generic_plan, rows_read, scans
from support.stack import SharedStack

TABLES = "jobs, job_attempts, job_events, outbox, project_shares, replicas, queue_pauses"


@pytest.fixture
def rows(engine: Engine) -> Iterator[JobRows]:
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {TABLES}"))


def claimed(rows: JobRows, count: int) -> list[Job]:
    jobs_claimed = [rows.claim() for _ in range(count)]
    return [job for job in jobs_claimed if job is not None]


class TestOrder:
    def test_a_flood_of_one_project_does_not_hold_up_another(self, rows: JobRows) -> None:
        for _ in range(20):
            rows.add(project="flood")
        late = [rows.add(project="late") for _ in range(3)]
        order = claimed(rows, 8)
        assert [job.id for job in order if job.project == "late"] == [job.id for job in late]
        assert Counter(job.project for job in order) == {"flood": 5, "late": 3}

    def test_projects_take_turns(self, rows: JobRows) -> None:
        for project in ("a", "b", "c"):
            for _ in range(4):
                rows.add(project=project)
        order = [job.project for job in claimed(rows, 12)]
        assert all(set(order[turn : turn + 3]) == {"a", "b", "c"} for turn in range(0, 12, 3))

    def test_shares_are_of_work_not_of_jobs(self, rows: JobRows) -> None:
        for _ in range(20):
            rows.add(project="long", num_frames=340)
            rows.add(project="short", num_frames=107)
        order = Counter(job.project for job in claimed(rows, 16))
        assert order["short"] in (12, 13)

    def test_a_project_that_was_idle_gets_its_share_and_no_more(self, rows: JobRows) -> None:
        rows.add(project="idle")
        for _ in range(40):
            rows.add(project="busy")
        claimed(rows, 21)
        rows.settle_shares()
        for _ in range(10):
            rows.add(project="idle")
        assert Counter(job.project for job in claimed(rows, 10)) == {"busy": 5, "idle": 5}

    def test_a_more_urgent_class_comes_first_whoever_asks(self, rows: JobRows) -> None:
        for _ in range(3):
            rows.add(project="greedy", priority=0)
        rows.add(project="modest", priority=1)
        assert [job.project for job in claimed(rows, 4)] == ["greedy", "greedy", "greedy", "modest"]

    def test_a_class_in_which_nothing_is_ready_holds_up_nothing(self, rows: JobRows) -> None:
        rows.add(priority=0, run_at=func.now() + text("interval '1 hour'"))
        ready = rows.add(priority=2)
        assert [job.id for job in claimed(rows, 2)] == [ready.id]

    def test_within_a_project_the_oldest_comes_first(self, rows: JobRows) -> None:
        added = [rows.add().id for _ in range(5)]
        assert [job.id for job in claimed(rows, 5)] == added

    def test_a_job_that_is_locked_is_passed_over(self, rows: JobRows) -> None:
        locked, free = rows.add(), rows.add()
        with rows.engine.begin() as connection:
            connection.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": locked.id})
            assert [job.id for job in claimed(rows, 2)] == [free.id]


@contextmanager
def locked_share(rows: JobRows, project: str) -> Iterator[None]:
    """Another claim is changing the project's share, or what it took is."""
    with rows.engine.begin() as connection:
        found = text("SELECT FROM project_shares WHERE project = :project FOR NO KEY UPDATE")
        assert len(connection.execute(found, {"project": project}).all()) == 1
        yield


class TestLockedShare:
    """The claim that a replica tries first waits for no other."""

    def claim(self, rows: JobRows) -> Job | None:
        return rows.run(claims.claim(model=MODEL, owner="w", lease_seconds=30, may_wait=False))

    def test_of_the_same_class_a_job_of_another_project_is_taken(self, rows: JobRows) -> None:
        rows.add(project="locked", priority=0)
        other = rows.add(project="other", priority=0)
        with locked_share(rows, "locked"):
            job = self.claim(rows)
            assert job is not None
            assert job.id == other.id

    def test_no_less_urgent_job_goes_before_those_of_the_locked_one(self, rows: JobRows) -> None:
        urgent = rows.add(project="locked", priority=0)
        rows.add(project="other", priority=2)
        with locked_share(rows, "locked"):
            assert self.claim(rows) is None
        job = self.claim(rows)
        assert job is not None
        assert job.id == urgent.id

    @pytest.mark.parametrize(
        "why", ["not due", "paused", "all are paused", "late", "to be started by then", "left to another replica"]
    )
    def test_what_could_not_be_claimed_anyway_holds_up_nothing(self, rows: JobRows, why: str) -> None:
        past, future = (func.now() + text(f"interval '{hours} h'") for hours in (-1, 1))
        values = {
            "not due": {"run_at": future},
            "late": {"deadline_at": past},
            "to be started by then": {"start_by": past},
            "left to another replica": {"crashed_on": ["w"]},
        }.get(why, {})
        rows.add(project="locked", priority=0, **values)
        with rows.engine.begin() as connection:
            if "paused" in why:
                paused = "*" if why == "all are paused" else "locked"
                connection.execute(text("INSERT INTO queue_pauses (project) VALUES (:project)"), {"project": paused})
            if why == "left to another replica":
                connection.execute(text(_OTHER_REPLICA), {"model": MODEL})
        less_urgent = rows.add(project="other", priority=2)
        with locked_share(rows, "locked"):
            job = self.claim(rows)
        assert (job and job.id) == (None if why == "all are paused" else less_urgent.id)

    def test_what_no_other_replica_could_take_goes_first_though_it_crashed_this_one(self, rows: JobRows) -> None:
        rows.add(project="locked", priority=0, crashed_on=["w"])
        rows.add(project="other", priority=2)
        with locked_share(rows, "locked"):
            assert self.claim(rows) is None

    def test_what_is_looked_for_behind_locks_is_what_a_claim_takes(self, engine: Engine) -> None:
        with engine.connect() as connection:
            found = text("SELECT prosrc FROM pg_proc WHERE proname = 'class_is_ready'")
            source = connection.execute(found).scalar_one()
        asked = claims._READY
        for name, parameter in (
            (":model", "of_model"),
            ("urgency.priority", "of_class"),
            (":name", "replica"),
            (":crashed_on_wait", "crashed_on_wait"),
        ):
            asked = asked.replace(name, parameter)
        assert " ".join(asked.split()) in " ".join(source.split())

    def test_a_replica_gets_the_most_urgent_job_all_the_same(self, rows: JobRows, settings: Settings) -> None:
        urgent = rows.add(project="locked", priority=0)
        rows.add(project="other", priority=2)
        ledger = Ledger(settings, replica_id="bench-r0#1", model=MODEL)
        with locked_share(rows, "locked"):
            # alone in its class it is not charged: there is nothing to wait for
            claim = ledger.claim(())
        ledger.close()
        assert claim is not None
        assert claim.job.id == urgent.id


@pytest.fixture(scope="module")
def filled(stack: SharedStack) -> Iterator[Connection]:
    """A connection to tens of thousands of jobs in every state."""
    engine = create_sync_engine(stack.settings())
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_FILL), {"model": MODEL})
        connection.execute(text("ANALYZE jobs, project_shares"))
        yield connection
    engine.dispose()


class TestPlan:
    """With tens of thousands of jobs of every state no statement that is repeated reads the table from end to end."""

    @pytest.mark.parametrize(
        ("statement", "index"),
        [
            (claims.claim(model=MODEL, owner="w", lease_seconds=30), "ix_jobs_claimable"),
            (claims.claim(model=MODEL, owner="w", lease_seconds=30, may_wait=False), "ix_jobs_claimable"),
            (claims.more_urgent(model=MODEL, owner="w", than=2), "ix_jobs_claimable"),
            (backlog.num_ready(pool="default", limit=64), "ix_jobs_claimable"),
            (backlog.shapes_waiting(MODEL), "ix_jobs_claimable"),
            (jobs.reap(), "ix_jobs_leased"),
            (jobs.release_unknown(owner="w", fences=()), "ix_jobs_leased"),
            (jobs.expire(), "ix_jobs_deadline"),
            (leftovers.outlived_results(days=30), "ix_jobs_retained"),
            (leftovers.results_past_their_time(), "ix_jobs_retain_until"),
            (holds.keys_to_open(), "ix_jobs_queued_by_key"),
            (backlog.overview(), "ix_jobs_queued_by_key"),
            (backlog.overview("project-1"), "ix_jobs_claimable"),
            (leftovers.unpurged(), "ix_jobs_unpurged"),
            (leftovers.forget_idle_shares(), "ix_jobs_claimable"),
            (shares.forgive_lag(), "ix_jobs_claimable"),
        ],
        ids=[
            "claim",
            "claim_that_waits_for_none",
            "more_urgent",
            "num_ready",
            "shapes_waiting",
            "reap",
            "release_unknown",
            "expire",
            "outlived",
            "past_their_time",
            "keys_to_open",
            "overview",
            "overview_of_a_project",
            "unpurged",
            "idle_shares",
            "lag",
        ],
    )
    def test_uses_its_index(self, filled: Connection, statement: Any, index: str) -> None:
        nodes = list(scans(generic_plan(filled, statement)))
        assert [node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "jobs"] == []
        assert index in {node.get("Index Name") for node in nodes}

    @pytest.mark.parametrize("may_wait", [False, True])
    def test_a_claim_looks_at_few_rows(self, filled: Connection, may_wait: bool) -> None:
        plan = executed_plan(filled, claims.claim(model=MODEL, owner="w", lease_seconds=30, may_wait=may_wait))
        assert 0 < rows_read(plan, "jobs") < 20


_OTHER_REPLICA = """
INSERT INTO replicas (id, pool, layout, model, device, state, epoch)
VALUES ('other#1', 'default', 'r1s1', :model, 'cpu', 'ready', 1)
"""
_FILL = """
INSERT INTO jobs (id, project, model, priority, prompt, seed, width, height, num_frames, request, max_attempts,
    state, finished_at, fence, lease_owner, lease_until, result, deadline_at)
SELECT 'video_' || i, 'project-' || i % 50, :model, i % 3, 'x', 1, 480, 480, 107, '{}', 3,
    CASE WHEN i % 3000 = 0 THEN 'running' WHEN i % 2 = 0 THEN 'queued' ELSE 'completed' END,
    CASE WHEN i % 3000 <> 0 AND i % 2 = 1 THEN now() END,
    CASE WHEN i % 3000 = 0 THEN i END, CASE WHEN i % 3000 = 0 THEN 'w' END,
    CASE WHEN i % 3000 = 0 THEN now() + interval '1 min' END,
    CASE WHEN i % 3000 <> 0 AND i % 2 = 1 THEN '{}'::jsonb END,
    CASE WHEN i % 1000 = 2 THEN now() + interval '1 day' END
FROM generate_series(1, 30000) AS i
"""
