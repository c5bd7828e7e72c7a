"""The second node of a replica is asked to stop while the first one has a job on the ranks of both."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rushes_core.settings import Settings
from rushes_core.states import JobState
from support.nodes import HOST, settings_of_two_nodes
from support.stack import SharedStack
from support.worker import Jobs, JoiningNode, Worker, eventually


@pytest.fixture
def settings(stack: SharedStack, tmp_path: Path) -> Iterator[Settings]:
    with settings_of_two_nodes(stack, tmp_path) as settings:
        yield settings


@pytest.fixture
def first(settings: Settings, tmp_path: Path) -> Iterator[Worker]:
    with Worker(settings, tmp_path / "first.log", layout="r1s2", nodes=2) as worker:
        yield worker


@pytest.fixture
def join(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., JoiningNode]]:
    numbers = count(2)
    with ExitStack() as running:

        def join(**changes: Any) -> JoiningNode:
            chosen = settings.model_copy(update={"scratch": tmp_path / "second", **changes})
            log = tmp_path / f"node-{next(numbers)}.log"
            return running.enter_context(JoiningNode(chosen, log, f"{HOST}:{settings.node_port}"))

        yield join


def test_the_job_on_its_ranks_is_finished_and_no_other_is_begun_until_a_node_joins_again(
    jobs: Jobs, first: Worker, join: Callable[..., JoiningNode]
) -> None:
    second = join()
    jobs.wait_ready()
    job_id, waiting = jobs.add("[step 0.2]"), jobs.add()
    jobs.wait_for_step(job_id, 2)
    second.terminate()
    second.terminate()
    assert second.wait() == 0
    job = jobs.wait_completed(job_id)
    assert (job.attempt, job.crash_count) == (1, 0)
    eventually(lambda: [replica.state for replica in jobs.replicas()] == ["starting"])
    assert jobs.wait_for(waiting, JobState.QUEUED).attempt == 0
    assert not first.events("job_requeued")
    join()
    job = jobs.wait_completed(waiting)
    assert (job.attempt, job.crash_count) == (1, 0)
    assert not first.events("group_postponed")


@pytest.mark.long
def test_a_job_that_outlasts_its_time_is_given_back_and_nothing_counted(
    jobs: Jobs, first: Worker, join: Callable[..., JoiningNode]
) -> None:
    second = join(shutdown_grace_seconds=1)
    jobs.wait_ready()
    job_id = jobs.add("[step 2.5]")
    jobs.wait_for_step(job_id, 1)
    second.terminate()
    second.wait()
    job = jobs.wait_for(job_id, JobState.QUEUED)
    assert (job.attempt, job.crash_count, job.error) == (0, 0, None)
    assert not first.events("group_postponed")


def test_both_that_are_stopped_at_once_finish_the_job(
    jobs: Jobs, first: Worker, join: Callable[..., JoiningNode]
) -> None:
    second = join()
    jobs.wait_ready()
    job_id = jobs.add("[step 0.2]")
    jobs.wait_for_step(job_id, 2)
    second.terminate()
    first.terminate()
    assert (first.wait(), second.wait()) == (0, 0)
    job = jobs.get(job_id)
    assert (job.state, job.attempt, job.crash_count) == (JobState.COMPLETED, 1, 0)


def test_one_without_a_job_leaves_at_once(jobs: Jobs, first: Worker, join: Callable[..., JoiningNode]) -> None:
    second = join()
    jobs.wait_ready()
    second.terminate()
    assert second.wait() == 0
    joined = first.events("node_joined")[-1]["timestamp"]
    eventually(lambda: any(one["timestamp"] > joined for one in first.events("node_awaited")))
    # and one that has no ranks yet
    first.terminate()
    assert first.wait() == 0
    alone = join()
    eventually(lambda: alone.events("node_not_joined"))
    alone.terminate()
    assert alone.wait() == 0
