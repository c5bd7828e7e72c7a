"""A part of the worker is killed in the middle of a job: the job runs again, and its clip is the same."""

import os
import signal

from rushes_core.models import Job, Replica
from support.processes import children, descendants, is_alive
from support.service import Rendered, Service
from support.worker import eventually, keys_of


def current_replica(service: Service) -> Replica:
    """The one that was started last: a killed supervisor leaves its row as it was."""
    return service.jobs.all_replicas()[-1]


def ranks(service: Service) -> list[int]:
    pids: list[int] = current_replica(service).detail["ranks"]
    return pids


def kill_while_denoising(service: Service, pid: int) -> str:
    """Post the reference request and kill process `pid` in the middle of it; the job's id."""
    video_id: str = service.post()["id"]
    job = service.jobs.wait_for_step(video_id, 1)
    os.kill(pid, signal.SIGKILL)
    assert job.phase == "denoising"
    return video_id


def check_second_attempt(service: Service, video_id: str, reference: Rendered) -> Job:
    """The second attempt made the clip of an undisturbed run, and the history says so."""
    job = service.wait_completed(video_id)
    assert (job.attempt, job.progress) == (2, 100)
    assert service.get(video_id)["attempt"] == 2
    first, second = service.jobs.attempts(video_id)
    assert (first.attempt, first.outcome) == (1, "queued")
    assert (second.attempt, second.outcome, second.error) == (2, "completed", None)
    again = ["queued", "claimed", "running"]
    assert service.jobs.states(video_id) == [*again, *again, "completed"]
    assert job.result is not None
    stored = service.stored(video_id)
    assert set(stored) == keys_of(job)
    assert stored[job.result["key"]] == reference.data
    eventually(lambda: not list(service.settings.scratch.glob("*/attempt-*")))
    return job


def test_killed_rank_is_replaced_and_its_job_runs_again(service: Service, reference: Rendered) -> None:
    (rank,) = ranks(service)
    before = current_replica(service)
    video_id = kill_while_denoising(service, rank)
    job = check_second_attempt(service, video_id, reference)

    assert (job.crash_count, job.error_count) == (1, 0)
    first, _ = service.jobs.attempts(video_id)
    assert first.error == {
        "code": "worker_lost",
        "message": "Rank 0 of the worker was killed by SIGKILL.",
        "stage": "denoising",
    }
    service.wait_ready()
    after = current_replica(service)
    assert (after.id, after.epoch) == (before.id, before.epoch + 1)
    assert not is_alive(rank)
    assert ranks(service) != [rank]


def test_killed_media_process_is_replaced_and_its_job_runs_again(service: Service, reference: Rendered) -> None:
    pids = ranks(service)
    (supervisor,) = service.worker.supervisors
    (media,) = set(children(supervisor)) - set(pids)
    video_id = kill_while_denoising(service, media)
    job = check_second_attempt(service, video_id, reference)

    assert (job.crash_count, job.error_count) == (0, 1)
    first, _ = service.jobs.attempts(video_id)
    assert first.error is not None
    assert first.error["code"] == "media_process_lost"
    assert not is_alive(media)
    # the model stays loaded
    assert ranks(service) == pids


def test_killed_supervisor_takes_its_group_along_and_its_job_runs_again(service: Service, reference: Rendered) -> None:
    (supervisor,) = service.worker.supervisors
    group = descendants(supervisor)
    assert len(group) == 2
    video_id = kill_while_denoising(service, supervisor)
    eventually(lambda: not any(is_alive(pid) for pid in (supervisor, *group)))
    service.jobs.pass_lease(video_id)
    job = check_second_attempt(service, video_id, reference)

    assert (job.crash_count, job.error_count) == (1, 0)
    first, second = service.jobs.attempts(video_id)
    assert first.error is not None
    assert first.error["code"] == "worker_lost"
    assert first.lease_owner != second.lease_owner
    # the new supervisor has removed what the old one left on disk
    assert len(list(service.settings.scratch.iterdir())) == 1
