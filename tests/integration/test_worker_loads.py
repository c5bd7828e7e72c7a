"""Ranks that cannot be loaded: what ends the worker at once, what is tried again, and what is told of it."""

import os
import signal
from pathlib import Path

import pytest
from rushes_core.contract import CONTRACT_FILE
from rushes_core.models import Replica
from rushes_core.settings import Settings
from support.checkpoints import make_readable, make_unreadable
from support.processes import is_alive
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, StartWorker, Worker, eventually, write_contract

FAULT = "Input/output error"


@pytest.fixture(params=["served", os.fsdecode(b"caf\xe9")], ids=["utf-8", "latin-1"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_contract(tmp_path / request.param)


@pytest.fixture
def settings(stack: SharedStack, checkpoint: Path, tmp_path: Path) -> Settings:
    return stack.settings(
        checkpoint=checkpoint,
        pipeline=SCRIPTED,
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.2,
    )


def shown(path: Path) -> str:
    """As a log or a row has it."""
    return str(path).encode(errors="backslashreplace").decode()


def told(worker: Worker) -> list[str]:
    """What was printed beside the log."""
    return [line for line in worker.log.read_text().splitlines() if line.startswith("rushes worker: ")]


def rank_of(worker: Worker, replica: Replica) -> int:
    (rank,) = replica.detail["ranks"]
    assert rank in worker.descendants
    return rank


def of_replica(jobs: Jobs, number: int) -> Replica:
    return next(one for one in jobs.replicas() if one.id.partition("#")[0].endswith(f"-r{number}"))


class TestWhatCannotMend:
    @pytest.mark.parametrize("checkpoint", ["served"], indirect=True)
    def test_it_ends_the_worker_and_is_told_once(self, jobs: Jobs, start_worker: StartWorker) -> None:
        message, kind = "NVRTC cannot compile rows.cu", "rushes_kernels.nvrtc:KernelError"
        worker = start_worker(layout="r2s1", env={"SCRIPTED_LOAD_ERROR": message, "SCRIPTED_LOAD_ERROR_OF": kind})
        assert worker.wait() == 1
        assert told(worker) == [f"rushes worker: KernelError: {message}"]
        assert jobs.replicas() == []

    def test_a_checkpoint_of_any_name_is_refused_in_words(
        self, jobs: Jobs, start_worker: StartWorker, checkpoint: Path
    ) -> None:
        worker = start_worker(env={"SCRIPTED_LOAD_ERROR": "a tensor is missing"})
        assert worker.wait() == 1
        assert told(worker) == [f"rushes worker: RUSHES_CHECKPOINT: {shown(checkpoint)}: a tensor is missing"]

    def test_a_file_system_that_fails_at_the_first_start_ends_the_worker(
        self, start_worker: StartWorker, checkpoint: Path
    ) -> None:
        make_unreadable(checkpoint / CONTRACT_FILE)
        worker = start_worker()
        assert worker.wait() == 1
        assert told(worker) == [f"rushes worker: RUSHES_CHECKPOINT: {shown(checkpoint / CONTRACT_FILE)}: {FAULT}"]

    @pytest.mark.parametrize("checkpoint", ["served"], indirect=True)
    def test_weights_that_cannot_be_read_at_the_first_start_end_the_worker(self, start_worker: StartWorker) -> None:
        unreadable = {"SCRIPTED_LOAD_ERROR": FAULT, "SCRIPTED_LOAD_ERROR_OF": "rushes_core.errors:CheckpointUnreadable"}
        worker = start_worker(env=unreadable)
        assert worker.wait() == 1
        assert told(worker) == [f"rushes worker: RUSHES_CHECKPOINT: {FAULT}"]


class TestWhatMayMend:
    @pytest.mark.parametrize("checkpoint", ["served"], indirect=True)
    def test_it_is_told_and_tried_again_later_and_later(
        self, jobs: Jobs, start_worker: StartWorker, tmp_path: Path
    ) -> None:
        trouble = tmp_path / "trouble"
        trouble.touch()
        env = {
            "SCRIPTED_LOAD_ERROR": os.fsdecode(b"the device is in use \xff"),
            "SCRIPTED_LOAD_ERROR_OF": "rushes_kernels.nvrtc:DriverError",
            "SCRIPTED_LOAD_ERROR_WHILE": str(trouble),
        }
        worker = start_worker(env=env)
        pauses = eventually(lambda: found if len(found := worker.events("group_postponed")) == 3 else None)
        assert [pause["seconds"] for pause in pauses] == [1, 2, 4]
        assert all("the device is in use" in pause["reason"] for pause in pauses)
        (replica,) = jobs.replicas()
        assert replica.state == "starting"
        assert replica.detail["trouble"] == "DriverError: the device is in use \\udcff"
        trouble.unlink()
        (replica,) = jobs.wait_ready()
        assert replica.detail["trouble"] is None
        jobs.wait_completed(jobs.add())

    def test_a_file_system_that_fails_under_one_replica_holds_up_no_other(
        self, jobs: Jobs, start_worker: StartWorker, checkpoint: Path
    ) -> None:
        worker = start_worker(layout="r2s1")
        jobs.wait_ready(2)
        contract = checkpoint / CONTRACT_FILE
        make_unreadable(contract)
        os.kill(rank_of(worker, of_replica(jobs, 0)), signal.SIGKILL)
        expected = f"RUSHES_CHECKPOINT: {shown(contract)}: {FAULT}"
        eventually(lambda: of_replica(jobs, 0).detail["trouble"] == expected)
        assert jobs.wait_completed(jobs.add()).attempt == 1
        eventually(lambda: len(worker.events("group_postponed")) >= 2)
        assert is_alive(worker.pid)
        assert of_replica(jobs, 0).state == "starting"
        assert of_replica(jobs, 1).detail["trouble"] is None
        make_readable(contract)
        jobs.wait_ready(2)
        assert of_replica(jobs, 0).detail["trouble"] is None
        assert told(worker) == []

    def test_a_file_system_that_fails_under_a_supervisor_that_starts_again_is_waited_for(
        self, jobs: Jobs, start_worker: StartWorker, checkpoint: Path
    ) -> None:
        worker = start_worker()
        (before,) = jobs.wait_ready()
        contract = checkpoint / CONTRACT_FILE
        make_unreadable(contract)
        os.kill(before.detail["pid"], signal.SIGKILL)

        def troubled() -> bool:
            return any(one.detail.get("trouble") for one in jobs.replicas() if one.id != before.id)

        eventually(troubled)
        make_readable(contract)
        eventually(lambda: [one.state for one in jobs.replicas() if one.id != before.id] == ["ready"])
        assert is_alive(worker.pid)
