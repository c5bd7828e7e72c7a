"""One replica over two machines that share nothing but a cable: the second node has a network namespace of its own."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from support.namespaces import SecondMachine, may_make_namespaces
from support.processes import is_alive
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, JoiningNode, Worker, eventually, write_contract

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="may not make network namespaces")

PORT = 7077
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What a rank of several on one machine has, or sums would be made in another order."""
RENDER_SECONDS = 300.0
"""Four ranks on two cores take their time."""
REAL = "rushes_worker.pipeline.fasth3:FastH3Pipeline"


@pytest.fixture
def machine() -> Iterator[SecondMachine]:
    with SecondMachine() as machine:
        yield machine


@pytest.fixture
def settings(stack: SharedStack, tmp_path: Path, machine: SecondMachine) -> Settings:
    return stack.settings(
        checkpoint=write_contract(tmp_path / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.2,
        provenance="off",
        node_host=machine.address_here,
        node_port=PORT,
        node_secret=SecretStr("what two nodes know"),
        drain_after_crashes=100,
    )


class Pair:
    """Both nodes of one replica."""

    def __init__(self, settings: Settings, folder: Path, machine: SecondMachine, running: ExitStack) -> None:
        self._settings = settings
        self._folder = folder
        self._machine = machine
        self._running = running

    def start(self, layout: str, **changes: Any) -> tuple[Worker, JoiningNode]:
        here = self._settings.model_copy(update=changes)
        # it reaches neither database nor Redis nor store
        there = here.model_copy(update={"scratch": self._folder / "second", "node_host": ""})
        address = f"{self._machine.address_here}:{PORT}"
        first = Worker(here, self._folder / "first.log", layout=layout, nodes=2, env=ONE_THREAD)
        second = JoiningNode(there, self._folder / "second.log", address, env=ONE_THREAD, behind=self._machine.command)
        return self._running.enter_context(first), self._running.enter_context(second)


@pytest.fixture
def pair(settings: Settings, tmp_path: Path, machine: SecondMachine) -> Iterator[Pair]:
    with ExitStack() as running:
        yield Pair(settings, tmp_path, machine, running)


# two addresses of one machine show the same in the usual run, and a cable that is pulled out shows these two
@pytest.mark.long
@pytest.mark.parametrize(("layout", "profile"), [("r1s2", "demo"), ("r1s4", "wide")])
def test_two_machines_make_the_clip_that_one_makes(
    settings: Settings, jobs: Jobs, pair: Pair, tmp_path: Path, layout: str, profile: str
) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", profile=profile)
    real = {"checkpoint": tmp_path / "tiny", "pipeline": REAL}

    def render() -> Job:
        job_id = jobs.add(model=f"rushes/tiny-fasth3-8-step-{profile}")
        return jobs.wait_for(job_id, JobState.COMPLETED, JobState.FAILED, seconds=RENDER_SECONDS)

    with Worker(settings.model_copy(update=real), tmp_path / "alone.log", layout=layout, env=ONE_THREAD) as alone:
        on_one = render()
        alone.terminate()
        assert alone.wait() == 0
    first, second = pair.start(layout, **real)
    on_two = render()
    assert on_one.result is not None
    assert on_two.result is not None
    assert on_two.result["sha256"] == on_one.result["sha256"]
    ranks = int(layout[-1])
    assert len(first.events("group_starting")[-1]["pids"]) == ranks // 2
    assert len(second.events("ranks_starting")[-1]["pids"]) == ranks // 2


def test_pulled_cable_ends_the_group_on_both_machines_and_the_job_runs_again(
    jobs: Jobs, pair: Pair, machine: SecondMachine
) -> None:
    first, second = pair.start("r1s2")
    eventually(lambda: [one for one in jobs.replicas() if one.state == "ready"])
    job_id = jobs.add("[step 0.5 on attempt 1]")
    jobs.wait_for_step(job_id, 2)
    ranks = [*first.events("group_starting")[-1]["pids"], *second.events("ranks_starting")[-1]["pids"]]
    machine.pull_out()
    eventually(lambda: not any(is_alive(pid) for pid in ranks), seconds=30)
    eventually(lambda: jobs.get(job_id).state == JobState.QUEUED)
    machine.plug_in()
    job = jobs.wait_completed(job_id)
    assert (job.attempt, job.crash_count) == (2, 1)
    error = jobs.attempts(job_id)[0].error
    assert error is not None
    assert (error["code"], error["message"]) == ("worker_lost", "The other node of the worker was lost.")
    assert len(second.events("ranks_starting")) == 2
