"""Redis, the API and the dispatcher come and go: every job that was accepted is completed, once."""

import pytest
from redis import Redis
from rushes_core.queue import HintQueue
from support.service import Service
from support.worker import eventually, keys_of


@pytest.fixture
def service(quick_service: Service) -> Service:
    return quick_service


def check_completed_once(service: Service, *ids: str) -> None:
    for video_id in ids:
        job = service.wait_completed(video_id)
        assert (job.attempt, job.crash_count, job.error_count) == (1, 0, 0)
        assert service.jobs.states(video_id) == ["queued", "claimed", "running", "completed"]
        assert set(service.stored(video_id)) == keys_of(job)


def test_redis_loses_everything_while_jobs_wait(service: Service) -> None:
    # a replica holds two: the one that it renders and the one that it takes next
    running = service.post(prompt="A wave [step 0.7]")["id"]
    held, waiting = (service.post(seed=seed)["id"] for seed in (2, 3))
    service.jobs.wait_for_step(running, 1)
    with Redis.from_url(service.settings.redis_url) as redis:
        redis.flushall()
        assert service.get(waiting)["status"] == "queued"
        check_completed_once(service, running, held, waiting)
        # the worker still listens
        hints = HintQueue(service.settings)
        hints.top_up(1)
        hints.close()
        eventually(lambda: redis.llen(service.settings.gpu_queue) == 0)


def test_api_is_killed_between_post_and_get(service: Service) -> None:
    video_id = service.post(seed=4)["id"]
    service.api.kill()
    service.start_api()
    assert service.get(video_id)["seed"] == 4
    check_completed_once(service, video_id)
    assert service.content(video_id) in service.stored(video_id).values()


def test_dispatcher_is_killed_and_started_again(service: Service) -> None:
    service.dispatcher.kill()
    alone = service.post(seed=5)["id"]
    check_completed_once(service, alone)
    deleted = service.http.delete(f"/v1/videos/{alone}")
    assert deleted.json()["deleted"] is True
    assert service.stored(alone)

    service.start_dispatcher()
    # it does what was left undone
    eventually(lambda: not service.stored(alone))
