"""The dispatcher on real Postgres, Valkey and SeaweedFS: bounded hints, and the sweep."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.dispatcher import Dispatcher
from rushes_core.models import Job, Replica
from rushes_core.queue import MAX_HINTS
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore, file_sha256, job_prefix, result_key
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import RESULT, JobRows


@pytest.fixture(scope="module")
def dispatcher(settings: Settings) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(settings)
    yield dispatcher
    dispatcher.close()


@pytest.fixture(scope="module")
def redis(settings: Settings) -> Iterator[Redis]:
    with Redis.from_url(settings.redis_url) as redis:
        yield redis


@pytest.fixture
def rows(settings: Settings, redis: Redis) -> Iterator[JobRows]:
    engine = create_sync_engine(settings)
    redis.flushdb()
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, job_attempts, job_events, replicas"))
    engine.dispose()


class TestHint:
    def test_sends_one_hint_for_each_ready_job(
        self, dispatcher: Dispatcher, rows: JobRows, redis: Redis, settings: Settings
    ) -> None:
        for _ in range(3):
            rows.add()
        rows.add(run_at=func.now() + text("interval '1 hour'"))
        assert dispatcher.hint() == 3
        assert redis.llen(settings.gpu_queue) == 3

    def test_does_not_pile_up(self, dispatcher: Dispatcher, rows: JobRows, redis: Redis, settings: Settings) -> None:
        rows.add()
        assert [dispatcher.hint() for _ in range(3)] == [1, 0, 0]
        assert redis.llen(settings.gpu_queue) == 1

    def test_is_bounded_whatever_waits(
        self, dispatcher: Dispatcher, rows: JobRows, redis: Redis, settings: Settings
    ) -> None:
        with rows.engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO jobs"
                    " (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts)"
                    " SELECT 'video_' || i, 'p', 'tiny', 'x', 1, 480, 480, 107, '{}', 3 FROM generate_series(1, 500) i"
                )
            )
        assert dispatcher.hint() == MAX_HINTS
        assert redis.llen(settings.gpu_queue) == MAX_HINTS

    def test_sends_again_what_redis_lost(self, dispatcher: Dispatcher, rows: JobRows, redis: Redis) -> None:
        rows.add()
        assert dispatcher.hint() == 1
        redis.flushdb()
        assert dispatcher.hint() == 1


class TestSweep:
    def test_requeues_dead_attempts_and_expires_late_jobs(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        dead = rows.running(lease_seconds=-2)
        late = rows.add(deadline_at=func.now() - text("interval '1 second'"))
        dispatcher.sweep()
        assert rows.read(dead.id).state is JobState.QUEUED
        assert rows.read(late.id).state is JobState.EXPIRED

    def test_removes_every_object_of_a_deleted_job_and_its_prompt(
        self, dispatcher: Dispatcher, rows: JobRows, settings: Settings, tmp_path: Path
    ) -> None:
        store = ObjectStore(settings)
        clip = tmp_path / "clip"
        clip.write_bytes(b"frames")
        job = rows.running()
        for attempt in (1, 2):
            key = result_key(job.project, job.id, attempt, attempt)
            store.put_file(key, clip, content_type="video/mp4", sha256=file_sha256(clip))
        rows.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={}))
        rows.run(jobs.delete_job(job.id, project="default"))

        dispatcher.sweep()

        assert store.delete_prefix(job_prefix(job.project, job.id)) == 0
        purged = rows.read(job.id)
        assert purged.purged_at is not None
        assert (purged.prompt, purged.request) == ("", {})

    def test_leaves_the_objects_of_a_job_that_still_runs(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.delete_job(job.id, project="default"))
        dispatcher.sweep()
        assert rows.read(job.id).purged_at is None

    def test_forgets_a_replica_that_has_been_silent_for_a_day(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        values = {"pool": "default", "layout": "r1s1", "model": "tiny", "device": "cpu", "state": "ready", "epoch": 1}
        with rows.engine.begin() as connection:
            for name in ("silent", "alive"):
                connection.execute(jobs.upsert_replica(name, **values))
            connection.execute(
                update(Replica).where(Replica.id == "silent").values(last_seen=func.now() - text("interval '25 hours'"))
            )
        dispatcher.sweep()
        with Session(rows.engine) as session:
            assert session.scalars(select(Replica.id)).all() == ["alive"]


def test_claim_order_is_what_the_queue_position_says(rows: JobRows) -> None:
    first, second, urgent = rows.add(), rows.add(), rows.add(priority=0)
    ahead = {job.id: rows.run(jobs.num_ahead(job)) for job in (first, second, urgent)}
    assert ahead == {urgent.id: 0, first.id: 1, second.id: 2}
    assert rows.run(select(func.count()).select_from(Job)) == 3
