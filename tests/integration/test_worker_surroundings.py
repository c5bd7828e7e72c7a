"""Workers among what surrounds them: signals to all their processes, paths, disks, and the table that tells of them."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rushes_api.app import create_app
from rushes_core.models import Replica
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.sweeper import Sweeper
from sqlalchemy import create_engine, delete, make_url
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED
from support.checkpoints import tiny_checkpoint
from support.forwarder import Forwarder
from support.processes import hangup_is
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, StartWorker, eventually

TINY = "rushes/tiny-fasth3-8-step-demo"


@pytest.fixture
def settings(stack: SharedStack, tmp_path: Path) -> Settings:
    return stack.settings(
        checkpoint=tiny_checkpoint(tmp_path),
        api_key=API_KEY,
        pipeline=SCRIPTED,
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.5,
        drain_after_crashes=100,
        worker_name="farm",
    )


def add(jobs: Jobs, prompt: str = "a wave") -> str:
    return jobs.add(prompt, model=TINY)


def another_interpreter(folder: Path) -> Path:
    """This environment's Python under a name of its own."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    python = folder / "bin" / "python"
    python.symlink_to(sys.executable)
    return python


class TestPlaces:
    @pytest.fixture
    def told(self, settings: Settings) -> Iterator[Callable[[], list[tuple[str, str]]]]:
        """Name and status of each replica that `/v1/workers` tells of."""
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:

            def told() -> list[tuple[str, str]]:
                workers = client.get("/v1/workers").raise_for_status().json()["data"]
                return [(worker["name"], worker["status"]) for worker in workers]

            yield told

    def test_a_worker_that_was_killed_and_is_started_again_takes_its_own_place_at_once(
        self, jobs: Jobs, start_worker: StartWorker, told: Callable[[], list[tuple[str, str]]]
    ) -> None:
        worker = start_worker(layout="r2s1", lease_seconds=600)
        jobs.wait_ready(2)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        assert told() == [("farm-r0", "ready"), ("farm-r1", "ready")]
        # with another layout, which has fewer replicas
        start_worker(layout="r1s2", lease_seconds=600)
        eventually(lambda: len(jobs.all_replicas()) == 3)
        assert [name for name, _ in told()] == ["farm-r0"]
        eventually(lambda: told() == [("farm-r0", "ready")])

    def test_a_supervisor_that_was_killed_gives_its_place_to_the_next(
        self, jobs: Jobs, start_worker: StartWorker, told: Callable[[], list[tuple[str, str]]]
    ) -> None:
        worker = start_worker(lease_seconds=600)
        jobs.wait_ready()
        (supervisor,) = worker.supervisors
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: len(jobs.all_replicas()) == 2)
        assert len(told()) == 1
        eventually(lambda: told() == [("farm-r0", "ready")])

    def test_a_worker_that_starts_while_the_database_is_away_takes_its_own_place_when_it_is_back(
        self,
        settings: Settings,
        jobs: Jobs,
        start_worker: StartWorker,
        told: Callable[[], list[tuple[str, str]]],
    ) -> None:
        first = start_worker()
        jobs.wait_ready()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        with Forwarder(settings.database_url) as database:
            url = make_url(settings.database_url).set(port=database.port)
            worker = start_worker(lease_seconds=3, database_url=url.render_as_string(hide_password=False))
            eventually(lambda: worker.events("name_unchecked"))
            database.open()
            eventually(lambda: ("farm-r0", "ready") in told() and len(jobs.all_replicas()) == 2)
            sweeper = Sweeper(settings.model_copy(update={"lease_seconds": 3}))

            def is_alone() -> bool:
                sweeper.sweep()
                return told() == [("farm-r0", "ready")]

            eventually(is_alone)
            sweeper.close()

    def test_one_that_was_drained_stays_so_when_its_row_was_forgotten(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker()
        (replica,) = jobs.wait_ready()
        jobs.drain(replica.id)
        eventually(lambda: worker.events("replica_drained"))
        engine = create_engine(settings.database_url)
        with engine.begin() as connection:
            connection.execute(delete(Replica))
        engine.dispose()
        (found,) = eventually(jobs.replicas)
        assert found.drain_requested_at is not None
        job_id = add(jobs)
        eventually(lambda: jobs.replicas()[0].last_seen > found.last_seen)
        assert jobs.states(job_id) == ["queued"]
        jobs.resume(replica.id)
        jobs.wait_completed(job_id)


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_one_that_every_process_gets_costs_the_running_job_nothing(
        self, jobs: Jobs, start_worker: StartWorker, number: signal.Signals
    ) -> None:
        """As from systemd, which signals all of a unit."""
        with hangup_is(signal.SIG_DFL):
            worker = start_worker(layout="r1s2")
        job_id = add(jobs, "[step 0.3]")
        jobs.wait_for_step(job_id, 2)
        for _ in range(2):
            for pid in [*worker.descendants, worker.pid]:
                os.kill(pid, number)
        assert worker.wait() == 0
        job = jobs.get(job_id)
        assert (job.state, job.attempt, job.crash_count) == (JobState.COMPLETED, 1, 0)

    def test_a_hangup_that_is_ignored_stays_so(self, jobs: Jobs, start_worker: StartWorker) -> None:
        """As under nohup."""
        with hangup_is(signal.SIG_IGN):
            worker = start_worker()
        jobs.wait_ready()
        os.kill(worker.pid, signal.SIGHUP)
        jobs.wait_completed(add(jobs))
        assert jobs.replicas()[0].state != "stopping"


class TestDisks:
    def test_ranks_meet_whatever_the_scratch_directory_is_called(
        self, jobs: Jobs, start_worker: StartWorker, tmp_path: Path
    ) -> None:
        start_worker(layout="r1s2", scratch=tmp_path / "raw frames, 100 %#é?")
        jobs.wait_completed(add(jobs))

    def test_a_log_that_takes_no_more_holds_nothing_up(self, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker(log=Path("/dev/full"))
        assert jobs.wait_completed(add(jobs)).attempt == 1
        worker.terminate()
        assert worker.wait() == 0


class TestLosses:
    def test_one_whose_ranks_end_again_and_again_is_starting_while_it_pauses(
        self, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker()
        for epoch in range(1, 6):
            eventually(lambda: [(one.state, one.epoch) for one in jobs.replicas()] == [("ready", epoch)])  # noqa: B023
            (pid,) = worker.events("group_starting")[-1]["pids"]
            os.kill(pid, signal.SIGKILL)
        # for eight seconds
        eventually(lambda: len(worker.events("group_postponed")) == 4)

        def told() -> bool:
            (found,) = jobs.replicas()
            assert found.epoch == 5
            return (found.state, found.detail["ranks"]) == ("starting", [])

        eventually(told)

    def test_a_supervisor_that_cannot_be_started_is_tried_again_and_the_others_go_on(
        self, jobs: Jobs, start_worker: StartWorker, tmp_path: Path
    ) -> None:
        """As while an upgrade replaces the interpreter."""
        python = another_interpreter(tmp_path / "venv")
        worker = start_worker(layout="r2s1", python=str(python))
        jobs.wait_ready(2)
        job_id = add(jobs, "[step 0.5]")
        owner = jobs.wait_for(job_id, JobState.RUNNING).lease_owner
        (victim,) = (one for one in jobs.replicas() if one.id != owner)
        away = python.rename(python.with_name("away"))
        os.kill(victim.detail["pid"], signal.SIGKILL)
        eventually(lambda: worker.events("supervisor_not_started"))
        away.rename(python)
        job = jobs.wait_completed(job_id)
        assert (job.attempt, job.lease_owner) == (1, None)
        jobs.wait_ready(2)
