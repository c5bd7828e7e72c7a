"""What a real worker does with jobs that their campaign wants back."""

from collections.abc import Iterator
from typing import Any

import pytest
from rushes_core.campaigns import feeder
from rushes_core.campaigns.tables import Campaign
from rushes_core.ids import new_campaign_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session
from support.stack import SharedStack
from support.worker import MODEL, SCRIPTED, Jobs, Worker, write_contract


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("campaign")
    return stack.settings(
        checkpoint=write_contract(folder / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.5,
    )


@pytest.fixture(scope="module")
def worker(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(settings, tmp_path_factory.mktemp("log") / "worker.log") as worker:
        yield worker
        worker.terminate()
        assert worker.wait() == 0


@pytest.fixture
def campaign(engine: Engine) -> str:
    campaign_id = new_campaign_id()
    with Session(engine) as session, session.begin():
        session.add(Campaign(id=campaign_id, project="default", model=MODEL, input_file_id="f", state="in_progress"))
    return campaign_id


def change(engine: Engine, job_id: str, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(update(Job).where(Job.id == job_id).values(**values))


def wait_given_back(jobs: Jobs, job_id: str) -> Job:
    back = jobs.wait_for(job_id, JobState.QUEUED)
    assert (back.hold, back.attempt, back.error, back.start_by, back.stop_at) == ("campaign", 0, None, None, None)
    return back


def test_a_running_attempt_goes_back_when_its_time_is_over(
    worker: Worker, jobs: Jobs, engine: Engine, campaign: str
) -> None:
    stopped = jobs.add("[step 0.5]", campaign_id=campaign, line=1)
    jobs.wait_for(stopped, JobState.RUNNING)
    following = jobs.add()
    change(engine, stopped, stop_at=text("now()"))
    wait_given_back(jobs, stopped)
    jobs.wait_completed(following)
    assert jobs.states(stopped) == ["queued", "claimed", "running", "queued"]
    change(engine, stopped, hold=None)
    assert jobs.wait_completed(stopped).attempt == 1


def test_a_pause_takes_back_what_was_claimed_ahead_and_lets_finish_what_runs(
    worker: Worker, jobs: Jobs, engine: Engine, campaign: str
) -> None:
    running = jobs.add("[step 1.5]", campaign_id=campaign, line=1)
    jobs.wait_for(running, JobState.RUNNING)
    ahead = jobs.add(campaign_id=campaign, line=2)
    jobs.wait_for(ahead, JobState.CLAIMED)
    with engine.begin() as connection:
        connection.execute(feeder.close_open(campaign))
    wait_given_back(jobs, ahead)
    assert jobs.get(running).state == JobState.RUNNING
    assert jobs.wait_completed(running).attempt == 1
    assert jobs.states(ahead) == ["queued", "claimed", "queued"]
