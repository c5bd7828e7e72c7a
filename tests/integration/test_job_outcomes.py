"""How jobs end and begin again on real Postgres: cancel, retry, quarantine, memory, deadlines, the outbox."""

import pytest
from rushes_core import claims, jobs, replicas
from rushes_core.models import Job, JobAttempt, JobEvent, OutboxEvent
from rushes_core.states import JobState
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from support.job_rows import ERROR, MODEL, RESULT, JobRows, wait_past_restart


def run_on(rows: JobRows, owner: str) -> Job:
    """The one queued job, running on `owner`, whatever its back-off."""
    rows.run(update(Job).values(run_at=func.now()).returning(Job.id))
    claimed = rows.claim(owner)
    assert claimed is not None
    return rows.run(jobs.start(claimed.id, fence=claimed.fence or 0, lease_seconds=30))


def crash(rows: JobRows, owner: str) -> Job:
    job = run_on(rows, owner)
    return rows.run(jobs.retry_or_fail(job.id, fence=job.fence or 0, error=ERROR, crashed=True))


def up(rows: JobRows, owner: str) -> None:
    """A replica that is up."""
    replica = {"pool": "default", "layout": "r1s1", "model": MODEL, "device": "cpu", "state": "ready", "epoch": 1}
    with rows.engine.begin() as connection:
        connection.execute(replicas.upsert_replica(owner, **replica))


def told(rows: JobRows) -> list[tuple[str, int]]:
    with Session(rows.engine) as session:
        events = session.scalars(select(OutboxEvent).order_by(OutboxEvent.id)).all()
    return [(event.type, event.generation) for event in events]


class TestCancel:
    def test_of_a_queued_job_is_immediate(self, rows: JobRows) -> None:
        job = rows.add()
        cancelled = rows.run(jobs.cancel(job.id, project="default"))
        assert (cancelled.state, cancelled.error) == (JobState.CANCELLED, jobs.CANCELLED_BY_USER)
        assert rows.claim() is None

    @pytest.mark.parametrize("state", ["claimed", "running"])
    def test_of_a_held_job_is_asked_for_once(self, rows: JobRows, state: str) -> None:
        job = getattr(rows, state)()
        first = rows.run(jobs.cancel(job.id, project="default"))
        again = rows.run(jobs.cancel(job.id, project="default"))
        assert first.state == job.state
        assert first.cancel_requested_at is not None
        assert again.cancel_requested_at == first.cancel_requested_at

    def test_changes_nothing_of_a_job_that_finished_first(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.complete(job.id, fence=job.fence or 0, result=RESULT, timings={}))
        cancelled = rows.run(jobs.cancel(job.id, project="default"))
        assert (cancelled.state, cancelled.cancel_requested_at) == (JobState.COMPLETED, None)

    def test_of_what_the_project_does_not_have_finds_nothing(self, rows: JobRows) -> None:
        job = rows.add()
        assert rows.run(jobs.cancel(job.id, project="other")) is None
        rows.run(jobs.delete_job(job.id, project="default"))
        assert rows.run(jobs.cancel(job.id, project="default")) is None


class TestRetry:
    def test_starts_from_nothing_as_the_next_generation(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.report(job.id, fence=job.fence or 0, phase="denoising", completed_steps=3, progress=40))
        rows.run(jobs.fail(job.id, fence=job.fence or 0, error=ERROR))
        retried = rows.run(jobs.retry(job.id, project="default"))

        assert (retried.state, retried.generation, retried.attempt, retried.progress) == (JobState.QUEUED, 2, 0, 0)
        assert (retried.error, retried.error_count, retried.finished_at, retried.started_at) == (None, 0, None, None)
        again = rows.running_again()
        assert (again.id, again.attempt) == (job.id, 1)
        rows.run(jobs.complete(again.id, fence=again.fence or 0, result=RESULT, timings={}))
        assert told(rows) == [("video.failed", 1), ("video.completed", 2)]
        with Session(rows.engine) as session:
            attempts = session.scalars(jobs.attempts(job.id)).all()
            events = session.scalars(select(JobEvent.generation).order_by(JobEvent.id)).all()
        assert [(a.generation, a.attempt, a.outcome) for a in attempts] == [(1, 1, "failed"), (2, 1, "completed")]
        assert events == [1, 1, 1, 1, 2, 2, 2, 2]

    def test_of_a_cancelled_or_expired_job(self, rows: JobRows) -> None:
        cancelled = rows.add()
        rows.run(jobs.cancel(cancelled.id, project="default"))
        expired = rows.add(deadline_at=func.now() - text("interval '1 s'"))
        rows.run(jobs.expire())
        for job in (cancelled, expired):
            retried = rows.run(jobs.retry(job.id, project="default"))
            assert (retried.cancel_requested_at, retried.deadline_at) == (None, None)
            assert rows.claim() is not None

    def test_finds_nothing_to_retry_in_other_states(self, rows: JobRows) -> None:
        queued, completed = rows.running(), rows.running()
        rows.run(jobs.release(queued.id, fence=queued.fence or 0))
        rows.run(jobs.complete(completed.id, fence=completed.fence or 0, result=RESULT, timings={}))
        deleted = rows.add()
        rows.run(jobs.delete_job(deleted.id, project="default"))
        for job in (queued, completed, deleted):
            assert rows.run(jobs.retry(job.id, project="default")) is None

    def test_attempt_of_an_earlier_generation_can_do_nothing(self, rows: JobRows) -> None:
        stale = rows.running()
        rows.run(jobs.fail(stale.id, fence=stale.fence or 0, error=ERROR))
        rows.run(jobs.retry(stale.id, project="default"))
        rows.running_again()
        assert rows.run(jobs.complete(stale.id, fence=stale.fence or 0, result=RESULT, timings={})) is None
        assert rows.run(jobs.release(stale.id, fence=stale.fence or 0)) is None


class TestQuarantine:
    def test_takes_a_job_that_crashed_two_different_replicas(self, rows: JobRows) -> None:
        rows.add(max_attempts=10)
        assert crash(rows, "one-r0#1").state is JobState.QUEUED
        failed = crash(rows, "two-r0#1")
        assert (failed.state, failed.crashed_on) == (JobState.FAILED, ["one-r0", "two-r0"])
        assert (failed.error["code"], failed.crash_count) == ("worker_crash", 2)

    def test_takes_a_job_that_crashed_one_replica_three_times_across_its_restarts(self, rows: JobRows) -> None:
        rows.add(max_attempts=10)
        outcomes = [crash(rows, f"one-r0#{number}") for number in range(3)]
        assert [job.state for job in outcomes] == [JobState.QUEUED, JobState.QUEUED, JobState.FAILED]
        assert (outcomes[-1].crashed_on, outcomes[-1].error["code"]) == (["one-r0"], "worker_crash")

    def test_counts_leases_that_ran_out(self, rows: JobRows) -> None:
        wait_past_restart(rows.engine)
        rows.add(max_attempts=10)
        for owner in ("one#1", "two#1"):
            job = run_on(rows, owner)
            rows.run(update(Job).values(lease_until=func.now() - text("interval '1.5 s'")).returning(Job.id))
            rows.run(jobs.reap())
        failed = rows.read(job.id)
        assert (failed.state, failed.error and failed.error["code"]) == (JobState.FAILED, "worker_crash")
        with Session(rows.engine) as session:
            assert [attempt.crashed for attempt in session.scalars(jobs.attempts(job.id))] == [True, True]

    def test_does_not_count_clean_errors(self, rows: JobRows) -> None:
        rows.add(max_attempts=10)
        for owner in ("one#1", "two#1", "three#1"):
            job = run_on(rows, owner)
            job = rows.run(jobs.retry_or_fail(job.id, fence=job.fence or 0, error=ERROR, crashed=False))
        assert (job.state, job.error_count, job.crash_count, job.crashed_on) == (JobState.QUEUED, 3, 0, [])

    def test_a_job_goes_to_another_replica_than_the_one_that_it_crashed(self, rows: JobRows) -> None:
        rows.add()
        up(rows, "other#1")
        crash(rows, "one#1")
        rows.run(update(Job).values(run_at=func.now()).returning(Job.id))
        assert rows.claim("one#2") is None
        assert rows.claim("other#1") is not None

    @pytest.mark.parametrize("other", ["state = 'drained'", "model = 'another'", "last_seen = now() - interval '1 h'"])
    def test_it_comes_back_at_once_where_nobody_else_takes_it(self, rows: JobRows, other: str) -> None:
        rows.add()
        up(rows, "one#2")
        up(rows, "other#1")
        with rows.engine.begin() as connection:
            connection.execute(text(f"UPDATE replicas SET {other} WHERE id = 'other#1'"))
        crash(rows, "one#1")
        rows.run(update(Job).values(run_at=func.now()).returning(Job.id))
        assert rows.claim("one#2") is not None

    def test_it_comes_back_when_the_others_had_their_time(self, rows: JobRows) -> None:
        rows.add()
        up(rows, "other#1")
        crash(rows, "one#1")
        rows.run(update(Job).values(run_at=func.now() - claims.CRASHED_ON_WAIT * 1.1).returning(Job.id))
        assert rows.claim("one#2") is not None


class TestMemory:
    def test_the_second_plan_is_tried_once(self, rows: JobRows) -> None:
        job = rows.running()
        again = rows.run(jobs.out_of_memory(job.id, fence=job.fence or 0, stage="denoising"))
        assert (again.state, again.low_memory) == (JobState.QUEUED, True)
        assert (again.error_count, again.crash_count) == (1, 0)

        job = rows.running_again()
        failed = rows.run(jobs.out_of_memory(job.id, fence=job.fence or 0, stage="decoding"))
        assert (failed.state, failed.error["code"], failed.error["stage"]) == (
            JobState.FAILED,
            "out_of_memory",
            "decoding",
        )

    def test_a_retry_starts_with_the_first_plan(self, rows: JobRows) -> None:
        job = rows.running(max_attempts=1)
        rows.run(jobs.out_of_memory(job.id, fence=job.fence or 0, stage="denoising"))
        assert rows.run(jobs.retry(job.id, project="default")).low_memory is False

    def test_a_cancel_that_was_asked_for_wins(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.cancel(job.id, project="default"))
        ended = rows.run(jobs.out_of_memory(job.id, fence=job.fence or 0, stage="denoising"))
        assert (ended.state, ended.error) == (JobState.CANCELLED, jobs.CANCELLED_BY_USER)


class TestDeadline:
    def passed(self, rows: JobRows) -> None:
        rows.run(update(Job).values(deadline_at=func.now() - text("interval '1 s'")).returning(Job.id))

    def test_of_a_running_job_is_told_to_its_holder_and_cancels_it(self, rows: JobRows) -> None:
        job = rows.running(deadline_at=func.now() + text("interval '1 h'"))
        fence = job.fence or 0
        assert rows.run(jobs.watch(job.id, fence=fence)) is False
        self.passed(rows)
        assert rows.run(jobs.watch(job.id, fence=fence)) is True
        assert rows.run(jobs.renew(job.id, fence=fence, lease_seconds=30)) is True
        ended = rows.run(jobs.confirm_cancel(job.id, fence=fence))
        assert (ended.state, ended.error["code"]) == (JobState.CANCELLED, "deadline_exceeded")
        assert told(rows) == [("video.cancelled", 1)]

    def test_of_a_claimed_job_keeps_it_from_starting_and_expires_it(self, rows: JobRows) -> None:
        job = rows.claimed(deadline_at=func.now() + text("interval '1 h'"))
        self.passed(rows)
        assert rows.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=30)) is None
        ended = rows.run(jobs.confirm_cancel(job.id, fence=job.fence or 0))
        assert (ended.state, ended.error["code"]) == (JobState.EXPIRED, "deadline_exceeded")

    def test_of_a_cancelled_job_is_the_cancel(self, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.cancel(job.id, project="default"))
        self.passed(rows)
        assert rows.run(jobs.confirm_cancel(job.id, fence=job.fence or 0)).error == jobs.CANCELLED_BY_USER


class TestOutbox:
    def test_tells_every_end_once_under_an_id_that_stays(self, rows: JobRows) -> None:
        done, failed = rows.running(), rows.running()
        rows.run(jobs.complete(done.id, fence=done.fence or 0, result=RESULT, timings={}))
        rows.run(jobs.fail(failed.id, fence=failed.fence or 0, error=ERROR))
        rows.run(jobs.cancel(rows.add().id, project="default"))
        rows.add(deadline_at=func.now() - text("interval '1 s'"))
        rows.run(jobs.expire())
        assert told(rows) == [
            ("video.completed", 1),
            ("video.failed", 1),
            ("video.cancelled", 1),
            ("video.expired", 1),
        ]
        with Session(rows.engine) as session:
            event = session.scalars(select(OutboxEvent).where(OutboxEvent.job_id == done.id)).one()
        assert event.event_id == f"evt_{done.id.removeprefix('video_')}_1"
        assert event.project == "default"

    def test_says_nothing_of_a_deleted_job(self, rows: JobRows) -> None:
        rows.run(jobs.delete_job(rows.add().id, project="default"))
        running = rows.running()
        rows.run(jobs.delete_job(running.id, project="default"))
        rows.run(jobs.confirm_cancel(running.id, fence=running.fence or 0))
        assert told(rows) == []

    def test_is_part_of_the_transaction_that_ends_the_job(self, rows: JobRows) -> None:
        job = rows.running()
        with rows.engine.connect() as connection:
            connection.execute(jobs.fail(job.id, fence=job.fence or 0, error=ERROR))
            connection.rollback()
        assert told(rows) == []


class TestGuard:
    @pytest.mark.parametrize(
        ("state", "values", "message"),
        [
            ("failed", "state = 'queued', finished_at = NULL", "generation"),
            ("failed", "state = 'queued', finished_at = NULL, generation = generation + 2", "generation"),
            ("failed", "generation = generation + 1", "generation"),
            ("running", "generation = generation + 1", "generation"),
            ("running", "progress = progress - 1", "must not fall"),
            ("failed", "state = 'queued', finished_at = NULL, generation = 2, deleted_at = now()", "is deleted"),
        ],
    )
    def test_refuses(self, rows: JobRows, state: str, values: str, message: str) -> None:
        job = rows.running()
        rows.run(jobs.report(job.id, fence=job.fence or 0, phase="denoising", completed_steps=3, progress=40))
        if state == "failed":
            rows.run(jobs.fail(job.id, fence=job.fence or 0, error=ERROR))
        with pytest.raises(IntegrityError, match=message), rows.engine.begin() as connection:
            connection.execute(text(f"UPDATE jobs SET {values} WHERE id = :id"), {"id": job.id})

    def test_refuses_to_run_what_is_to_be_cancelled(self, rows: JobRows) -> None:
        job = rows.claimed()
        rows.run(jobs.cancel(job.id, project="default"))
        with pytest.raises(IntegrityError, match="to be cancelled"), rows.engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET state = 'running' WHERE id = :id"), {"id": job.id})


def test_attempts_that_were_given_back_are_no_crashes(rows: JobRows) -> None:
    job = rows.running()
    rows.run(jobs.release(job.id, fence=job.fence or 0))
    with Session(rows.engine) as session:
        attempt = session.scalars(select(JobAttempt)).one()
    assert (attempt.outcome, attempt.crashed) == ("queued", False)
