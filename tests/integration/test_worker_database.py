"""A worker whose connections to the database fall silent: acknowledged on their way, and never answered."""

from pathlib import Path

from rushes_core.states import JobState
from support.proxy import relayed
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, Worker, eventually, write_contract

SECONDS = 60.0
"""Several times as long as the worker waits for a result."""


def test_a_job_that_runs_and_the_one_after_it_are_rendered_once_each(stack: SharedStack, tmp_path: Path) -> None:
    settings = stack.settings(
        checkpoint=write_contract(tmp_path / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
    )
    jobs = Jobs(settings)
    with relayed(settings) as (through, proxy), Worker(through, tmp_path / "worker.log"):
        jobs.wait_ready()
        first = jobs.add("a wave [step 0.2]")
        jobs.wait_for(first, JobState.RUNNING)
        proxy.strand()
        second = jobs.add()
        for job_id in (first, second):
            eventually(lambda job_id=job_id: jobs.get(job_id).state is JobState.COMPLETED, seconds=SECONDS)
            assert jobs.get(job_id).attempt == 1
    jobs.close()
