"""Transitions of jobs on real Postgres: compare-and-set, leases, fences, history."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rushes_core import jobs, replicas
from rushes_core.database import create_sync_engine
from rushes_core.listing import Filters, page
from rushes_core.models import Job, JobAttempt, JobEvent
from rushes_core.settings import Settings
from rushes_core.states import TRANSITIONS, JobState
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from support.job_rows import ERROR, RESULT, JobRows, wait_past_restart


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[Engine]:
    engine = create_sync_engine(settings, pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def rows(engine: Engine) -> Iterator[JobRows]:
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, job_attempts, job_events, replicas"))


class TestClaim:
    def test_gives_a_job_to_one_of_many(self, rows: JobRows) -> None:
        for _ in range(40):
            rows.add()
        with ThreadPoolExecutor(8) as pool:
            claims = list(pool.map(lambda i: rows.claim(f"worker-{i}"), range(48)))

        won = [job for job in claims if job is not None]
        assert Counter(job.id for job in won).most_common(1)[0][1] == 1
        assert len(won) == 40
        assert len({job.fence for job in won}) == 40

    def test_takes_the_more_urgent_class_first_and_then_the_older(self, rows: JobRows) -> None:
        bulk, first, second, urgent = (rows.add(priority=p) for p in (2, 1, 1, 0))
        order = [rows.claim() for _ in range(4)]
        assert [job and job.id for job in order] == [urgent.id, first.id, second.id, bulk.id]

    def test_leaves_jobs_of_other_models_and_of_later(self, rows: JobRows) -> None:
        rows.add(model="another")
        rows.add(run_at=func.now() + text("interval '1 hour'"))
        assert rows.claim() is None

    def test_leaves_a_job_whose_deadline_has_passed(self, rows: JobRows) -> None:
        job = rows.add(deadline_at=func.now() - text("interval '1 second'"))
        assert rows.claim() is None
        assert rows.run(jobs.expire()).id == job.id
        assert rows.read(job.id).state is JobState.EXPIRED

    def test_deadline_that_passes_after_a_lost_attempt_cancels(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.retry_or_fail(job.id, fence=job.fence, error=ERROR, crashed=True))
        rows.run(update(Job).values(deadline_at=func.now() - text("interval '1 second'")).returning(Job.id))
        assert rows.run(jobs.expire()).id == job.id
        ended = rows.read(job.id)
        assert (ended.state, ended.error) == (JobState.CANCELLED, jobs.DEADLINE_PASSED)

    def test_raises_attempt_and_fence(self, rows: JobRows) -> None:
        job = rows.running()
        lost = rows.run(jobs.retry_or_fail(job.id, fence=job.fence, error=ERROR, crashed=True))
        assert (lost.state, lost.crash_count, lost.error_count) == (JobState.QUEUED, 1, 0)
        rows.run(update(Job).values(run_at=func.now()).returning(Job.id))
        again = rows.claim()
        assert again is not None
        assert again.attempt == 2
        assert (again.fence or 0) > (job.fence or 0)


class TestFence:
    def test_stale_attempt_can_do_nothing(self, rows: JobRows) -> None:
        stale = rows.running()
        rows.run(jobs.retry_or_fail(stale.id, fence=stale.fence, error=ERROR, crashed=True))
        rows.run(update(Job).values(run_at=func.now()).returning(Job.id))
        fresh = rows.claim()
        assert fresh is not None
        rows.run(jobs.start(fresh.id, fence=fresh.fence, lease_seconds=30))

        assert rows.run(jobs.start(stale.id, fence=stale.fence, lease_seconds=30)) is None
        assert rows.run(jobs.renew(stale.id, fence=stale.fence, lease_seconds=30)) is None
        assert rows.run(jobs.complete(stale.id, fence=stale.fence, result=RESULT, timings={})) is None
        assert rows.run(jobs.fail(stale.id, fence=stale.fence, error=ERROR)) is None
        assert rows.run(jobs.release(stale.id, fence=stale.fence)) is None
        assert rows.run(jobs.complete(fresh.id, fence=fresh.fence, result=RESULT, timings={})) is not None

    def test_result_after_the_lease_ran_out_is_refused(self, rows: JobRows) -> None:
        job = rows.running(lease_seconds=0)
        assert rows.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={})) is None


class TestCancel:
    def test_delete_of_a_queued_job_cancels_it_and_hides_it(self, rows: JobRows) -> None:
        job = rows.add()
        assert rows.run(jobs.delete_job(job.id, project="default")).state is JobState.CANCELLED
        assert rows.claim() is None
        assert rows.run(jobs.get(job.id, project="default")).deleted_at is not None
        nothing = page(project="default", filters=Filters(), after=None, limit=1, descending=True)
        assert rows.run(nothing) is None

    def test_delete_of_another_projects_job_changes_nothing(self, rows: JobRows) -> None:
        job = rows.add()
        assert rows.run(jobs.delete_job(job.id, project="other")) is None
        assert rows.read(job.id).deleted_at is None

    def test_cancel_before_the_start_wins(self, rows: JobRows) -> None:
        job = rows.claimed()
        rows.run(jobs.delete_job(job.id, project="default"))
        assert rows.run(jobs.start(job.id, fence=job.fence, lease_seconds=30)) is None
        assert rows.run(jobs.confirm_cancel(job.id, fence=job.fence)).state is JobState.CANCELLED

    def test_cancel_of_a_running_job_is_told_at_the_next_renewal_and_keeps_the_result_out(self, rows: JobRows) -> None:
        job = rows.running()
        assert rows.run(jobs.renew(job.id, fence=job.fence, lease_seconds=30)) is False
        rows.run(jobs.delete_job(job.id, project="default"))
        assert rows.run(jobs.renew(job.id, fence=job.fence, lease_seconds=30)) is True
        assert rows.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={})) is None

    def test_job_that_finished_first_stays_completed(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={}))
        deleted = rows.run(jobs.delete_job(job.id, project="default"))
        assert (deleted.state, deleted.cancel_requested_at) == (JobState.COMPLETED, None)

    def test_cancel_that_nobody_asked_for_is_refused(self, rows: JobRows) -> None:
        job = rows.running()
        assert rows.run(jobs.confirm_cancel(job.id, fence=job.fence)) is None


class TestReap:
    @pytest.fixture(autouse=True)
    def _server_is_not_new(self, engine: Engine) -> None:
        wait_past_restart(engine)

    def test_requeues_a_job_whose_worker_is_silent(self, rows: JobRows) -> None:
        job = rows.running(lease_seconds=-2)
        assert rows.run(jobs.reap()).state is JobState.QUEUED
        assert rows.read(job.id).crash_count == 1

    def test_leaves_a_lease_that_is_renewed(self, rows: JobRows) -> None:
        rows.running()
        assert rows.run(jobs.reap()) is None

    def test_fails_a_job_that_is_out_of_attempts(self, rows: JobRows) -> None:
        job = rows.running(lease_seconds=-2, max_attempts=1)
        rows.run(jobs.reap())
        failed = rows.read(job.id)
        assert (failed.state, failed.error) == (JobState.FAILED, jobs.LEASE_LOST)

    def test_cancels_a_job_that_was_to_be_cancelled(self, rows: JobRows) -> None:
        job = rows.running(lease_seconds=-2)
        rows.run(jobs.delete_job(job.id, project="default"))
        rows.run(jobs.reap())
        assert rows.read(job.id).state is JobState.CANCELLED

    def test_does_not_count_a_crash_against_a_job_that_had_not_started(self, rows: JobRows) -> None:
        job = rows.claimed()
        rows.run(update(Job).values(lease_until=func.now() - text("interval '2 s'")).returning(Job.id))
        rows.run(jobs.reap())
        assert rows.read(job.id).crash_count == 0

    def test_does_not_blame_a_replica_that_was_heard_of_after_its_lease_ran_out(self, rows: JobRows) -> None:
        job = rows.running(lease_seconds=-2)
        values = {"pool": "default", "layout": "r1s1", "model": "tiny", "device": "cpu", "state": "busy", "epoch": 1}
        with rows.engine.begin() as connection:
            connection.execute(replicas.upsert_replica(job.lease_owner or "", **values))
        rows.run(jobs.reap())
        requeued = rows.read(job.id)
        assert (requeued.state, requeued.crash_count, requeued.crashed_on) == (JobState.QUEUED, 0, [])
        assert requeued.attempt == 1

    def test_many_reapers_end_each_attempt_once(self, rows: JobRows, engine: Engine) -> None:
        for _ in range(30):
            rows.running(lease_seconds=-2)

        def reap(_: int) -> list[str]:
            with Session(engine) as session, session.begin():
                return [job.id for job in session.scalars(jobs.reap(limit=7))]

        with ThreadPoolExecutor(8) as pool:
            reaped = list(itertools.chain(*pool.map(reap, range(16))))
        assert len(reaped) == len(set(reaped)) == 30


def test_release_gives_a_job_back_without_counting_anything(rows: JobRows) -> None:
    job = rows.running()
    released = rows.run(jobs.release(job.id, fence=job.fence))
    assert (released.state, released.attempt, released.crash_count, released.error_count) == (JobState.QUEUED, 0, 0, 0)
    assert rows.claim() is not None


def test_job_that_is_given_back_with_a_cancel_asked_for_is_cancelled(rows: JobRows) -> None:
    job = rows.claimed()
    rows.run(jobs.cancel(job.id, project=job.project))
    released = rows.run(jobs.release(job.id, fence=job.fence))
    assert (released.state, released.error) == (JobState.CANCELLED, jobs.CANCELLED_BY_USER)


def test_progress_never_falls_and_stays_below_100_while_running(rows: JobRows) -> None:
    job = rows.running()
    seen: list[int] = []
    for progress in (10, 60, 40, 100):
        with rows.engine.begin() as connection:
            connection.execute(
                jobs.report(job.id, fence=job.fence or 0, phase="denoising", completed_steps=1, progress=progress)
            )
        seen.append(rows.read(job.id).progress)
    assert seen == [10, 60, 60, 99]


def test_history_is_written_with_the_transition(rows: JobRows) -> None:
    job = rows.running()
    rows.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={}))
    with Session(rows.engine) as session:
        events = session.scalars(select(JobEvent).order_by(JobEvent.id)).all()
        attempt = session.scalars(select(JobAttempt)).one()
    assert [(e.old_state, e.new_state) for e in events] == [
        (None, "queued"),
        ("queued", "claimed"),
        ("claimed", "running"),
        ("running", "completed"),
    ]
    assert (attempt.outcome, attempt.lease_owner, attempt.fence) == ("completed", "worker", job.fence)
    assert attempt.started_at is not None
    assert attempt.finished_at is not None


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(JobState, 2)))
def test_database_allows_exactly_the_transitions_of_the_table(rows: JobRows, old: JobState, new: JobState) -> None:
    job = rows.add()
    lease = "lease_owner = 'w', lease_until = now() + interval '1 min'"
    none = "lease_owner = NULL, lease_until = NULL"

    def columns(state: JobState) -> str:
        leased = lease if state in (JobState.CLAIMED, JobState.RUNNING) else none
        done = "finished_at = now()" if state.is_final else "finished_at = NULL"
        result = "result = '{}'" if state is JobState.COMPLETED else "result = NULL"
        fence = "fence = nextval('job_fence_seq')"
        return f"state = '{state}', {leased}, {done}, {result}, {fence}"

    # every move out of a final state is a retry
    generation = ", generation = generation + 1" if old.is_final else ""

    with rows.engine.begin() as connection:
        # triggers off: put the row into the old state, whatever the way there
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text(f"UPDATE jobs SET {columns(old)} WHERE id = :id"), {"id": job.id})

    def move() -> None:
        with rows.engine.begin() as connection:
            connection.execute(text(f"UPDATE jobs SET {columns(new)}{generation} WHERE id = :id"), {"id": job.id})

    if new in TRANSITIONS[old]:
        move()
    else:
        with pytest.raises(IntegrityError, match="illegal transition"):
            move()


NOW = "2026-11-30T00:00:00Z"
LEASE = {"fence": 1_000_000, "lease_owner": "w", "lease_until": NOW}
COMPLETED = {"state": "completed", "finished_at": NOW, "progress": 100, "result": {}}


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("state", {"state": "lost"}),
        ("finished_at_iff_final", {"finished_at": NOW}),
        ("finished_at_iff_final", {"state": "failed"}),
        ("leased_states_hold_a_lease", {"state": "claimed", **LEASE, "fence": None}),
        ("leased_states_hold_a_lease", {"state": "running", **LEASE, "lease_owner": None}),
        ("leased_states_hold_a_lease", {"state": "running", **LEASE, "lease_until": None}),
        ("lease_only_in_leased_states", {"lease_until": NOW}),
        ("result_iff_completed", {"result": {}}),
        ("result_iff_completed", {**COMPLETED, "result": None}),
        ("no_error_when_completed", {**COMPLETED, "error": {}}),
        ("progress_is_percent", {"progress": -1}),
        ("progress_is_percent", {**COMPLETED, "progress": 101}),
        ("progress_100_iff_completed", {"progress": 100}),
        ("priority_is_a_class", {"priority": 3}),
        ("hold_only_while_queued", {"state": "cancelled", "finished_at": NOW, "hold": "campaign"}),
    ],
)
def test_database_refuses_to_insert_an_impossible_row(rows: JobRows, rule: str, values: dict[str, Any]) -> None:
    job = rows.add()
    copy = text(
        "INSERT INTO jobs SELECT (jsonb_populate_record(jobs, CAST(:values AS jsonb))).* FROM jobs WHERE id = :id"
    )
    with pytest.raises(IntegrityError, match=f"violates {rule}"), rows.engine.begin() as connection:
        connection.execute(copy, {"values": json.dumps({"id": "video_copy", **values}), "id": job.id})


@pytest.mark.parametrize(
    ("state", "rule", "values"),
    [
        ("queued", "finished_at_iff_final", "finished_at = now()"),
        ("queued", "lease_only_in_leased_states", "lease_until = now()"),
        ("queued", "result_iff_completed", "result = '{}'"),
        ("queued", "progress_100_iff_completed", "progress = 100"),
        ("queued", "priority_is_a_class", "priority = 3"),
        ("running", "leased_states_hold_a_lease", "lease_until = NULL"),
        ("running", "leased_states_hold_a_lease", "fence = NULL"),
        ("running", "progress_is_percent", "progress = 101"),
        ("running", "finished_at_iff_final", "state = 'failed', lease_until = NULL"),
        ("running", "lease_only_in_leased_states", "state = 'queued'"),
    ],
)
def test_database_refuses_to_make_a_row_impossible(rows: JobRows, state: str, rule: str, values: str) -> None:
    job = rows.running() if state == "running" else rows.add()
    with pytest.raises(IntegrityError, match=f"violates {rule}"), rows.engine.begin() as connection:
        connection.execute(text(f"UPDATE jobs SET {values} WHERE id = :id"), {"id": job.id})


TO_LEASED = {"fence": "nextval('job_fence_seq')", "lease_owner": "'w'", "lease_until": "now()"}
TO_COMPLETED = {"finished_at": "now()", "lease_until": "NULL", "result": "'{}'", "progress": "100"}


@pytest.mark.parametrize(
    ("new", "rule", "values"),
    [
        *(
            (new, rule, values)
            for new in ("claimed", "running")
            for rule, values in (
                ("leased_states_hold_a_lease", {"fence": "NULL"}),
                ("leased_states_hold_a_lease", {"lease_owner": "NULL"}),
                ("leased_states_hold_a_lease", {"lease_until": "NULL"}),
                ("finished_at_iff_final", {"finished_at": "now()"}),
                ("result_iff_completed", {"result": "'{}'"}),
                ("progress_100_iff_completed", {"progress": "100"}),
                ("priority_is_a_class", {"priority": "3"}),
            )
        ),
        ("completed", "finished_at_iff_final", {"finished_at": "NULL"}),
        ("completed", "lease_only_in_leased_states", {"lease_until": "now()"}),
        ("completed", "result_iff_completed", {"result": "NULL"}),
        ("completed", "no_error_when_completed", {"error": "'{}'"}),
        ("completed", "progress_is_percent", {"progress": "101"}),
        ("completed", "priority_is_a_class", {"priority": "-1"}),
    ],
)
def test_database_refuses_to_move_a_job_to_an_impossible_row(
    rows: JobRows, new: str, rule: str, values: dict[str, str]
) -> None:
    job = {"claimed": rows.add, "running": rows.claimed, "completed": rows.running}[new]()
    changed = (TO_COMPLETED if new == "completed" else TO_LEASED) | values
    columns = ", ".join(f"{name} = {value}" for name, value in changed.items())
    with pytest.raises(IntegrityError, match=f"violates {rule}"), rows.engine.begin() as connection:
        connection.execute(text(f"UPDATE jobs SET state = '{new}', {columns} WHERE id = :id"), {"id": job.id})


def test_a_job_that_is_deleted_from_its_table_takes_its_history_along(rows: JobRows) -> None:
    kept, gone = rows.running(), rows.running()
    with rows.engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": gone.id})
        for table in ("job_attempts", "job_events"):
            left = connection.execute(text(f"SELECT DISTINCT job_id FROM {table}")).scalars().all()
            assert left == [kept.id]


def test_a_fence_that_does_not_rise_is_refused(rows: JobRows) -> None:
    job = rows.running()
    rows.run(jobs.release(job.id, fence=job.fence))
    with pytest.raises(IntegrityError, match="must rise"), rows.engine.begin() as connection:
        connection.execute(
            text("UPDATE jobs SET state = 'claimed', lease_owner = 'w', lease_until = now() WHERE id = :id"),
            {"id": job.id},
        )
