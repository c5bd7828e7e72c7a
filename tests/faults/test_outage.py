"""What an outage of the database must not be taken for."""

from datetime import timedelta
from pathlib import Path

import pytest
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, update
from sqlalchemy.exc import OperationalError
from support.faults.servers import Servers
from support.job_rows import JobRows, wait_past_restart
from support.stack import settings_of
from support.worker import Jobs


@pytest.fixture
def settings(servers: Servers, tmp_path: Path) -> Settings:
    return settings_of(servers.fresh_env(), scratch=tmp_path)


def test_leases_that_ran_out_in_an_outage_are_not_ended_at_its_end(settings: Settings) -> None:
    jobs, sweeper = Jobs(settings), Sweeper(settings)
    rows = JobRows(jobs._engine)
    wait_past_restart(jobs._engine)
    job = rows.running()
    rows.run(update(Job).where(Job.id == job.id).values(lease_until=func.now() - timedelta(seconds=1.2)).returning(Job))
    with jobs.outage(), pytest.raises(OperationalError):
        sweeper.sweep()
    sweeper.sweep()
    assert rows.read(job.id).state == JobState.RUNNING

    # a sweeper that knows of no outage
    another = Sweeper(settings)
    another.sweep()
    assert rows.read(job.id).state == JobState.QUEUED
    for part in (another, sweeper, jobs):
        part.close()
