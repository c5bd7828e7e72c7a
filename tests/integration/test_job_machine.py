"""Whatever is done to jobs in whatever order, on real Postgres: history, outbox and rows tell the same story."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.models import Job, JobAttempt, JobEvent, OutboxEvent
from rushes_core.predicates import IS_LEASED
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, LEASED_STATES, RETRYABLE_STATES, TRANSITIONS, JobState
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import ERROR, RESULT, JobRows, wait_past_restart

OWNERS = st.sampled_from(["one#1", "one#2", "two#1", "three#1"])


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = create_sync_engine(settings)
    wait_past_restart(engine)
    yield engine
    engine.dispose()


class Machine(RuleBasedStateMachine):
    """Two jobs, everything that anybody may do to them, and every fence that was ever given out."""

    engine: Engine

    @initialize()
    def accept(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, replicas"))
        self.rows = JobRows(self.engine)
        self.ids = [self.rows.add(project=project, max_attempts=4).id for project in ("default", "other")]
        self.fences: dict[str, list[int]] = {job_id: [] for job_id in self.ids}
        # an attempt of the past for each, which may speak up at any time
        for owner in ("one#1", "two#1"):
            self.claim(owner)
        for job_id in self.ids:
            self.rows.run(jobs.release(job_id, fence=self.fences[job_id][0]))

    @rule(owner=OWNERS)
    def claim(self, owner: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(Job).values(run_at=func.now()))
        if job := self.rows.claim(owner):
            assert job.cancel_requested_at is None
            self.fences[job.id].append(job.fence or 0)

    @rule(number=st.integers(0, 1), what=st.sampled_from(list(JobState)), crashed=st.booleans())
    def settle(self, number: int, what: JobState, crashed: bool) -> None:
        """The last attempt tries to move its job."""
        self._settle(self.ids[number], self.fences[self.ids[number]][-1], what, crashed)

    @rule(number=st.integers(0, 1), what=st.sampled_from(list(JobState)), crashed=st.booleans())
    def settle_late(self, number: int, what: JobState, crashed: bool) -> None:
        """The first attempt of all tries to move a job that another may hold by now."""
        self.claim("three#1")
        self._settle(self.ids[number], self.fences[self.ids[number]][0], what, crashed)

    def _settle(self, job_id: str, fence: int, what: JobState, crashed: bool) -> None:
        statement: Any = {
            JobState.CLAIMED: jobs.release(job_id, fence=fence),
            JobState.RUNNING: jobs.start(job_id, fence=fence, lease_seconds=30),
            JobState.COMPLETED: jobs.complete(job_id, fence=fence, result=RESULT, timings={}),
            JobState.FAILED: jobs.fail(job_id, fence=fence, error=ERROR),
            JobState.CANCELLED: jobs.confirm_cancel(job_id, fence=fence),
            JobState.EXPIRED: jobs.out_of_memory(job_id, fence=fence, stage="denoising"),
            JobState.QUEUED: jobs.retry_or_fail(job_id, fence=fence, error=ERROR, crashed=crashed),
        }[what]
        before = self.rows.read(job_id)
        after = self.rows.run(statement)
        held = before.state in LEASED_STATES and before.fence == fence
        assert after is None or held
        if after is not None and before.cancel_requested_at is not None:
            assert after.state not in (JobState.RUNNING, JobState.COMPLETED)

    @rule(number=st.integers(0, 1))
    def lose(self, number: int) -> None:
        """A worker is silent for longer than its lease."""
        late = func.now() - text("interval '5 s'")
        with self.engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == self.ids[number], IS_LEASED).values(lease_until=late))
            connection.execute(jobs.reap())
        assert self.rows.read(self.ids[number]).state not in LEASED_STATES

    @rule(number=st.integers(0, 1))
    def pass_deadline(self, number: int) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == self.ids[number]).values(deadline_at=func.now()))
        with self.engine.begin() as connection:
            connection.execute(jobs.expire())

    @rule(number=st.integers(0, 1), what=st.sampled_from(["cancel", "retry", "retry", "delete_job"]))
    def ask(self, number: int, what: str) -> None:
        before = self.rows.read(self.ids[number])
        after = self.rows.run(getattr(jobs, what)(before.id, project=before.project))
        visible = before.deleted_at is None
        assert (after is not None) == (visible and (what != "retry" or before.state in RETRYABLE_STATES))
        if after is not None and before.state in FINAL_STATES and what != "retry":
            assert after.state is before.state

    @invariant()
    def history_rows_and_outbox_agree(self) -> None:
        with Session(self.engine) as session:
            for job_id in self.ids:
                job = session.get_one(Job, job_id)
                events = session.scalars(select(JobEvent).where(JobEvent.job_id == job_id).order_by(JobEvent.id)).all()
                attempts = session.scalars(select(JobAttempt).where(JobAttempt.job_id == job_id)).all()
                told = session.scalars(select(OutboxEvent).where(OutboxEvent.job_id == job_id)).all()
                self._check(job, events, attempts, told)

    def _check(self, job: Job, events: Any, attempts: Any, told: Any) -> None:
        path = [JobState(event.new_state) for event in events]
        moves = list(pairwise(path))
        assert path[-1] is job.state
        assert all(new in TRANSITIONS[old] for old, new in moves)
        assert job.generation == 1 + sum(old in FINAL_STATES for old, _ in moves)
        fences = [event.fence for event in events if event.new_state == JobState.CLAIMED]
        assert fences == sorted(set(fences)) == self.fences[job.id]
        assert {attempt.fence for attempt in attempts if attempt.outcome is None} == (
            {job.fence} if job.state in LEASED_STATES else set()
        )
        ended = [event for event in events if JobState(event.new_state) in FINAL_STATES]
        silent = [] if job.deleted_at is None else [event for event in ended if event.at >= job.deleted_at]
        assert {(event.generation, event.type) for event in told} == {
            (event.generation, f"video.{event.new_state}") for event in ended if event not in silent
        }


def test_no_order_of_events_breaks_the_story(engine: Engine) -> None:
    Machine.engine = engine
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=20,
            deadline=None,
            # making a failure smaller takes minutes
            phases=[Phase.generate],
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
