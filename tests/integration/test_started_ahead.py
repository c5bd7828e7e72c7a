"""What a job costs that was started while another one was on its GPUs, on real Postgres."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from rushes_core import jobs
from rushes_core.models import ApiKey, Job
from rushes_core.states import JobState
from sqlalchemy import Engine, func, text, update
from sqlalchemy.orm import Session
from support.campaign_rows import CampaignRows
from support.job_rows import wait_past_restart

WAITED = 500.0
RAN = 5.0
SPENT = "SELECT coalesce(sum(gpu_seconds), 0)::float FROM "


@pytest.fixture
def rows(engine: Engine) -> Iterator[CampaignRows]:
    rows = CampaignRows(engine)
    rows.clear()
    with Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO projects (name) VALUES ('default') ON CONFLICT DO NOTHING"))
        names = {"id": "key_ahead", "project": "default", "name": "ahead", "hint": "abcd", "digest": b"ahead"}
        session.add(ApiKey(**names, scopes=[], priorities=[]))
    yield rows
    rows.clear()


@pytest.fixture
def ahead(rows: CampaignRows) -> Job:
    """A campaign's job that was started long ago and whose turn has not come."""
    rows.campaign(5, api_key="key_ahead")
    # with another one there is something to share
    rows.campaign(5, project="other")
    rows.feed()
    job = rows.claimed_of("default")
    assert job.charged is not None
    assert rows.start(job) is not None
    return rows.take(WAITED, job)


def begin(rows: CampaignRows, job: Job) -> None:
    statement = jobs.report(
        job.id, fence=job.fence or 0, phase="encoding", completed_steps=0, progress=1, started_ahead=True
    )
    rows.run(statement)


def billed(rows: CampaignRows) -> tuple[float, float]:
    """GPU seconds of the key, and of the campaigns."""
    with rows.engine.begin() as connection:
        key, campaigns = (connection.execute(text(SPENT + table)) for table in ("api_key_usage", "campaign_counts"))
        return key.scalar_one(), campaigns.scalar_one()


def virtual_time(rows: CampaignRows) -> float:
    with rows.engine.begin() as connection:
        found = text("SELECT virtual_time FROM project_shares WHERE project = 'default'")
        return float(connection.execute(found).scalar_one())


def test_one_that_is_given_back_before_its_turn_costs_nothing(rows: CampaignRows, ahead: Job) -> None:
    before = virtual_time(rows)
    released = rows.run(jobs.release(ahead.id, fence=ahead.fence or 0))
    assert (released.state, released.attempt) == (JobState.QUEUED, 0)
    assert billed(rows) == (0, 0)
    assert virtual_time(rows) == pytest.approx(before - (ahead.charged or 0))


def test_one_that_is_cancelled_before_its_turn_costs_nothing(rows: CampaignRows, ahead: Job) -> None:
    rows.run(jobs.cancel(ahead.id, project=ahead.project))
    assert rows.run(jobs.confirm_cancel(ahead.id, fence=ahead.fence or 0)).state is JobState.CANCELLED
    assert billed(rows) == (0, 0)


def test_one_that_is_rendered_costs_what_it_took_from_its_turn_on(rows: CampaignRows, ahead: Job) -> None:
    before = virtual_time(rows)
    begin(rows, ahead)
    rows.complete(rows.take(RAN, ahead))
    key, campaigns = billed(rows)
    assert RAN <= key == campaigns < WAITED
    assert virtual_time(rows) == pytest.approx(before - (ahead.charged or 0) + key)


def test_its_run_begins_with_its_turn_and_what_came_before_was_waiting(rows: CampaignRows, ahead: Job) -> None:
    begin(rows, ahead)
    at_its_turn = rows.read(ahead.id).started_at
    assert at_its_turn is not None
    assert ahead.started_at is not None
    assert (at_its_turn - ahead.started_at).total_seconds() >= WAITED
    begin(rows, ahead)
    assert rows.read(ahead.id).started_at == at_its_turn
    with Session(rows.engine) as session:
        (attempt,) = session.scalars(jobs.attempts(ahead.id))
    assert attempt.started_at == at_its_turn
    rows.complete(rows.read(ahead.id))
    rows.measure_completed()
    with rows.engine.begin() as connection:
        assert connection.execute(text("SELECT run_p50 FROM measured_times")).scalar_one() < WAITED


def test_one_that_is_stopped_on_its_gpus_costs_what_it_took(rows: CampaignRows, ahead: Job) -> None:
    begin(rows, ahead)
    rows.take(RAN, ahead)
    rows.run(jobs.release(ahead.id, fence=ahead.fence or 0))
    key, campaigns = billed(rows)
    assert RAN <= key == campaigns < WAITED


@pytest.mark.parametrize("crashed", [False, True])
def test_one_that_fails_before_its_turn_costs_nothing(rows: CampaignRows, ahead: Job, crashed: bool) -> None:
    lost = rows.run(jobs.retry_or_fail(ahead.id, fence=ahead.fence or 0, error=jobs.LEASE_LOST, crashed=crashed))
    assert (lost.state, lost.attempt) == (JobState.QUEUED, 1)
    assert billed(rows) == (0, 0)


def test_one_whose_request_is_refused_before_its_turn_costs_nothing(rows: CampaignRows, ahead: Job) -> None:
    before = virtual_time(rows)
    rows.fail(ahead)
    assert billed(rows) == (0, 0)
    assert virtual_time(rows) == pytest.approx(before - (ahead.charged or 0))


def test_one_whose_supervisor_dies_before_its_turn_costs_nothing(rows: CampaignRows, ahead: Job) -> None:
    wait_past_restart(rows.engine)
    late = func.now() - timedelta(seconds=1.5)
    rows.run(update(Job).where(Job.id == ahead.id).values(lease_until=late).returning(Job))
    assert rows.run(jobs.reap()).state is JobState.QUEUED
    assert billed(rows) == (0, 0)


def test_one_that_fails_on_its_gpus_costs_what_it_took(rows: CampaignRows, ahead: Job) -> None:
    begin(rows, ahead)
    rows.fail(rows.take(RAN, ahead))
    key, campaigns = billed(rows)
    assert RAN <= key == campaigns < WAITED
