"""Jobs that overlap on one replica: one is claimed ahead, one is rendered, others wait for the store."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rushes_core.models import Replica
from rushes_core.settings import Settings
from rushes_core.states import JobState
from support.forwarder import Forwarder
from support.processes import children, is_alive
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, Worker, eventually, write_contract

StartWorker = Callable[..., Worker]


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("overlap")
    return stack.settings(
        checkpoint=write_contract(folder / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.5,
        worker_name="bench",
        # the crashes here are made, and no reason to take a replica for sick
        drain_after_crashes=100,
    )


@pytest.fixture(scope="class")
def worker(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker for the tests of a class."""
    with Worker(settings, tmp_path_factory.mktemp("log") / "worker.log") as worker:
        yield worker
        worker.terminate()
        assert worker.wait() == 0


class TestClaimedAhead:
    def test_next_job_is_claimed_while_one_runs_and_has_its_turn_after_it(self, worker: Worker, jobs: Jobs) -> None:
        running, ahead, normal = jobs.add("[step 0.4]"), jobs.add(), jobs.add()
        jobs.wait_for(running, JobState.RUNNING)
        claimed = jobs.wait_for(ahead, JobState.CLAIMED)
        assert jobs.get(running).state == JobState.RUNNING
        assert claimed.started_at is None
        assert claimed.lease_owner is not None
        assert claimed.lease_owner.startswith("bench-r0#")

        done = [jobs.wait_completed(job_id) for job_id in (running, ahead, normal)]
        for before, after in itertools.pairwise(done):
            assert before.started_at is not None
            assert after.started_at is not None
            on_ranks = before.timings["denoising"] + before.timings["decoding"]
            assert (after.started_at - before.started_at).total_seconds() >= on_ranks
        assert [job.attempt for job in done] == [1, 1, 1]
        assert jobs.states(ahead) == ["queued", "claimed", "running", "completed"]

    def test_what_is_more_urgent_takes_the_place_of_the_one_that_was_claimed(self, worker: Worker, jobs: Jobs) -> None:
        running, ahead = jobs.add("[step 0.4]"), jobs.add(priority=2)
        jobs.wait_for(ahead, JobState.CLAIMED)
        urgent = jobs.add(priority=0)
        jobs.wait_for(urgent, JobState.CLAIMED)
        assert jobs.get(running).state == JobState.RUNNING
        done = [jobs.wait_completed(job_id) for job_id in (running, urgent, ahead)]
        started = [job.started_at for job in done if job.started_at is not None]
        assert started == sorted(started)
        assert [job.attempt for job in done] == [1, 1, 1]
        assert jobs.states(ahead) == ["queued", "claimed", "queued", "claimed", "running", "completed"]

    def test_cancel_of_a_claimed_job_wins(self, worker: Worker, jobs: Jobs) -> None:
        running, ahead = jobs.add("[step 0.5]"), jobs.add()
        jobs.wait_for(ahead, JobState.CLAIMED)
        jobs.cancel(ahead)
        cancelled = jobs.wait_for(ahead, JobState.CANCELLED)
        assert cancelled.started_at is None
        assert jobs.get(running).state == JobState.RUNNING
        jobs.wait_completed(running)

    def test_claimed_job_whose_lease_was_lost_is_let_go(self, worker: Worker, jobs: Jobs) -> None:
        running, ahead = jobs.add("[step 0.25]"), jobs.add()
        first = jobs.wait_for(ahead, JobState.CLAIMED)
        jobs.end_lease(ahead)
        jobs.wait_completed(running)
        done = jobs.wait_completed(ahead)
        assert done.crash_count == 0
        assert jobs.states(ahead) == ["queued", "claimed", "queued", "claimed", "running", "completed"]
        assert first.fence is not None
        assert done.fence is not None
        assert done.fence > first.fence

    def test_claimed_job_is_given_back_when_the_ranks_are_lost(self, worker: Worker, jobs: Jobs) -> None:
        dying, ahead = jobs.add("[step 0.5] [die at step 4 on attempt 1]"), jobs.add()
        jobs.wait_for(ahead, JobState.CLAIMED)
        done = jobs.wait_completed(ahead)
        assert (done.attempt, done.crash_count) == (1, 0)
        assert jobs.states(ahead)[:3] == ["queued", "claimed", "queued"]
        assert jobs.wait_completed(dying).crashed_on == ["bench-r0"]


class TestStartedAhead:
    def test_next_job_is_started_while_the_last_units_of_one_are_decoded(self, worker: Worker, jobs: Jobs) -> None:
        decoding, ahead = jobs.add("[unit 0.7] [tail 0.3]"), jobs.add("[step 0.05]")
        for job_id in (decoding, ahead):
            done = jobs.wait_completed(job_id)
            assert (done.attempt, done.crash_count, done.error_count) == (1, 0, 0)
        assert jobs.states(ahead) == ["queued", "claimed", "running", "completed"]
        # its run is counted from its turn on
        assert done.started_at is not None
        assert jobs.entered(ahead, JobState.RUNNING) < done.started_at
        (rendered,) = [record for record in worker.events("job_rendered") if record["job_id"] == ahead]
        assert rendered["told_ahead"]
        assert rendered["idle_before_seconds"] is not None

    def test_cancel_of_a_started_job_is_seen_when_its_turn_comes(self, worker: Worker, jobs: Jobs) -> None:
        decoding, ahead = jobs.add("[unit 0.5]"), jobs.add("[step 0.3]")
        jobs.wait_for(ahead, JobState.RUNNING)
        jobs.cancel(ahead)
        jobs.wait_for(ahead, JobState.CANCELLED)
        jobs.wait_completed(decoding)
        jobs.wait_completed(jobs.add())

    def test_job_before_it_that_is_cancelled_or_fails_costs_it_nothing(self, worker: Worker, jobs: Jobs) -> None:
        decoding, ahead = jobs.add("[unit 1]"), jobs.add()
        jobs.wait_for(ahead, JobState.RUNNING)
        jobs.cancel(decoding)
        jobs.wait_for(decoding, JobState.CANCELLED)
        done = jobs.wait_completed(ahead)
        assert (done.attempt, done.error_count) == (1, 0)

        failing, ahead = jobs.add("[unit 0.5] [tail 0.1] [late on attempt 1]"), jobs.add()
        done = jobs.wait_completed(ahead)
        assert (done.attempt, done.error_count) == (1, 0)
        assert jobs.wait_completed(failing).error_count == 1
        assert not worker.events("group_ended")

    def test_ranks_lost_before_they_began_it_cost_it_nothing(self, worker: Worker, jobs: Jobs) -> None:
        decoding, ahead = jobs.add("[unit 0.7 on attempt 1]"), jobs.add()
        jobs.wait_for(ahead, JobState.RUNNING)
        (replica,) = jobs.replicas()
        assert replica.job_id == decoding
        for pid in children(replica.detail["pid"]):
            if "rushes_worker.rank" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        for job_id, attempt, crashes in ((decoding, 2, 1), (ahead, 1, 0)):
            done = jobs.wait_completed(job_id)
            assert (done.attempt, done.crash_count, done.error_count) == (attempt, crashes, 0)
        assert jobs.states(ahead)[:4] == ["queued", "claimed", "running", "queued"]

    def test_ranks_lost_while_both_are_on_them_count_against_both_once(self, worker: Worker, jobs: Jobs) -> None:
        decoding, ahead = jobs.add("[unit 0.5] [tail 600 on attempt 1]"), jobs.add("[die at step 1 on attempt 1]")
        for job_id in (decoding, ahead):
            done = jobs.wait_completed(job_id)
            assert (done.attempt, done.crash_count) == (2, 1)
        (replica,) = jobs.replicas()
        crashed: list[str] = replica.detail["crashed_jobs"]
        assert decoding in crashed
        assert ahead not in crashed

    def test_job_that_was_lost_before_has_none_beside_it(self, worker: Worker, jobs: Jobs) -> None:
        dying = jobs.add("[die at step 2 on attempt 1] [unit 0.4 on attempt 2]")
        ahead = jobs.add()
        lost = eventually(lambda: job if (job := jobs.get(dying)).attempt == 2 and job.phase == "decoding" else None)
        assert lost.state == JobState.RUNNING
        jobs.wait_completed(dying)
        jobs.wait_completed(ahead)
        told = {record["job_id"]: record["told_ahead"] for record in worker.events("job_rendered")}
        assert (told[dying], told[ahead]) == (False, False)


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers that have left in peace when the test ends."""
    with ExitStack() as running:
        started: list[Worker] = []

        def start(**changes: Any) -> Worker:
            changes = {"scratch": tmp_path / "scratch", "shutdown_grace_seconds": 5, **changes}
            chosen = settings.model_copy(update=changes)
            started.append(running.enter_context(Worker(chosen, tmp_path / "worker.log")))
            return started[-1]

        yield start
        for worker in started:
            worker.terminate()
            assert worker.wait() == 0


def test_job_whose_start_fails_is_given_up_and_the_one_behind_it_has_its_place(
    jobs: Jobs, start_worker: StartWorker
) -> None:
    worker = start_worker()
    jobs.wait_ready()
    decoding, ahead, behind = jobs.add("[unit 0.8]"), jobs.add(), jobs.add()
    with jobs.start_refused(ahead):
        jobs.wait_completed(decoding)
        jobs.wait_completed(behind)
    (failure,) = worker.events("job_not_started")
    assert (failure["job_id"], failure["level"]) == (ahead, "error")
    told = {record["job_id"]: record["told_ahead"] for record in worker.events("job_rendered")}
    assert told == {decoding: False, behind: True}

    # nobody renews its lease
    left = jobs.get(ahead)
    (replica,) = jobs.wait_ready()
    eventually(lambda: jobs.replicas()[0].last_seen > replica.last_seen)
    assert jobs.get(ahead).lease_until == left.lease_until
    jobs.end_lease(ahead)
    jobs.wait_completed(ahead)
    assert jobs.states(ahead) == ["queued", "claimed", "queued", "claimed", "running", "completed"]
    assert not worker.events("group_ended")


def waits_for_store(jobs: Jobs, job_id: str) -> bool:
    job = jobs.get(job_id)
    return job.state == JobState.RUNNING and job.phase == "uploading"


def test_finished_clips_wait_for_a_store_that_is_away(
    settings: Settings, jobs: Jobs, start_worker: StartWorker, tmp_path: Path
) -> None:
    with Forwarder(settings.s3_endpoint_url) as store:
        worker = start_worker(s3_endpoint_url=store.url, spool_jobs=2)
        first, second, third, fourth = (jobs.add(seed=seed) for seed in range(4))
        eventually(lambda: waits_for_store(jobs, first) and waits_for_store(jobs, second))
        eventually(lambda: worker.events("upload_failed"))
        assert len(worker.events("job_claimed")) == 2
        assert jobs.states(third) == ["queued"]

        # one that nobody wants any more makes room for the next
        jobs.cancel(first)
        jobs.wait_for(first, JobState.CANCELLED)
        eventually(lambda: waits_for_store(jobs, third))
        assert jobs.states(fourth) == ["queued"]
        eventually(lambda: len(list((tmp_path / "scratch").glob("*/attempt-*/video.mp4"))) == 2)

        store.open()
        for job_id in (second, third, fourth):
            assert jobs.wait_completed(job_id).attempt == 1
            assert jobs.states(job_id) == ["queued", "claimed", "running", "completed"]


def test_clips_in_the_spool_take_no_more_than_their_share_of_the_disk(
    settings: Settings, jobs: Jobs, start_worker: StartWorker
) -> None:
    with Forwarder(settings.s3_endpoint_url) as store:
        worker = start_worker(s3_endpoint_url=store.url, spool_bytes=0, shutdown_grace_seconds=0)
        waiting = jobs.add()
        eventually(lambda: waits_for_store(jobs, waiting))
        another = jobs.add()
        jobs.wait_ready()
        worker.terminate()
        assert worker.wait() == 0
        given_back = jobs.get(waiting)
        assert (given_back.state, given_back.attempt, given_back.error_count) == (JobState.QUEUED, 0, 0)
        assert jobs.states(another) == ["queued"]
    jobs.delete(waiting)
    jobs.delete(another)


def test_replica_without_room_on_its_disk_claims_nothing(jobs: Jobs, start_worker: StartWorker) -> None:
    worker = start_worker(scratch_free_bytes=2**62)
    job_id = jobs.add()
    eventually(lambda: worker.events("scratch_full"))
    eventually(lambda: [one.state for one in jobs.replicas()] == ["full"])
    assert jobs.states(job_id) == ["queued"]
    jobs.delete(job_id)


def test_replica_that_crashes_on_different_jobs_takes_no_more(jobs: Jobs, start_worker: StartWorker) -> None:
    worker = start_worker(drain_after_crashes=2)
    (replica,) = jobs.wait_ready()
    victims = [jobs.add("[die at step 1]", max_attempts=1) for _ in range(2)]
    for job_id in victims:
        jobs.wait_for(job_id, JobState.FAILED)
    eventually(lambda: [one.state for one in jobs.replicas() if one.id == replica.id] == ["drained"])
    (event,) = worker.events("replica_drained")
    assert event["level"] == "error"
    assert sorted(event["crashed_jobs"]) == sorted(victims)
    healthy = jobs.add()
    (supervisor,) = worker.supervisors
    assert not any(is_alive(pid) for pid in replica.detail["ranks"])
    assert is_alive(supervisor)
    assert jobs.states(healthy) == ["queued"]

    # somebody has looked at it
    (drained,) = [one for one in jobs.replicas() if one.id == replica.id]
    assert drained.drain_requested_at is not None
    assert sorted(drained.detail["crashed_jobs"]) == sorted(victims)
    jobs.resume(replica.id)
    jobs.wait_completed(healthy)
    victim = jobs.add("[die at step 1]", max_attempts=1)
    jobs.wait_for(victim, JobState.FAILED)
    jobs.wait_ready()


def test_replica_that_is_to_drain_finishes_its_job_gives_the_next_one_back_and_waits(
    jobs: Jobs, start_worker: StartWorker
) -> None:
    worker = start_worker()
    (replica,) = jobs.wait_ready()
    running, ahead = jobs.add("[step 0.5]"), jobs.add()
    jobs.wait_for_step(running, 1)
    jobs.wait_for(ahead, JobState.CLAIMED)
    jobs.drain(replica.id)
    jobs.drain(replica.id)
    given_back = jobs.wait_for(ahead, JobState.QUEUED)
    assert (given_back.attempt, given_back.error_count, given_back.crash_count) == (0, 0, 0)
    assert jobs.get(running).state == JobState.RUNNING
    jobs.wait_completed(running)

    def now() -> Replica:
        (found,) = [one for one in jobs.replicas() if one.id == replica.id]
        return found

    eventually(lambda: now().state == "drained")
    later = jobs.add()
    before = now().last_seen
    eventually(lambda: now().last_seen > before)
    assert now().state == "drained"
    assert jobs.states(later) == ["queued"]

    jobs.resume(replica.id)
    for job_id in (ahead, later):
        jobs.wait_completed(job_id)
    # the ranks kept their weights meanwhile
    assert (now().epoch, now().detail["ranks"]) == (replica.epoch, replica.detail["ranks"])
    assert worker.events("replica_resumed")


def test_replica_that_drains_can_be_stopped(jobs: Jobs, start_worker: StartWorker) -> None:
    worker = start_worker()
    (replica,) = jobs.wait_ready()
    jobs.drain(replica.id)
    eventually(lambda: worker.events("replica_drained"))
    worker.terminate()
    assert worker.wait() == 0
