"""The dispatcher on real Postgres and Valkey: bounded hints for what is ready."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from redis import Redis
from rushes_core import backlog, jobs, replicas, shares
from rushes_core import dispatcher as dispatcher_module
from rushes_core.campaigns import closing, feeding
from rushes_core.database import create_sync_engine
from rushes_core.dispatcher import Calls, Dispatcher
from rushes_core.models import Job, Replica
from rushes_core.queue import MAX_HINTS, HintQueue
from rushes_core.settings import Settings
from rushes_core.sweeper import Sweeper
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.exc import OperationalError
from support.job_rows import MODEL, JobRows


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
    _serve(engine)
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, replicas"))
    engine.dispose()


def _serve(engine: Engine) -> None:
    values = {"pool": "default", "layout": "r1s1", "model": MODEL, "device": "cpu", "state": "ready", "epoch": 1}
    with engine.begin() as connection:
        connection.execute(replicas.upsert_replica("replica", **values))


def test_what_is_asked_again_and_again_is_built_once(
    settings: Settings, dispatcher: Dispatcher, rows: JobRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = Sweeper(settings)

    def build(*args: object, **values: object) -> None:
        raise AssertionError("built again")

    for module, name in (
        (backlog, "num_ready"),
        (closing, "is_any_to_end"),
        (feeding, "standings"),
        (shares, "forgive_lag"),
        (shares, "bound_lag"),
        (jobs, "reap"),
        (jobs, "expire"),
    ):
        monkeypatch.setattr(module, name, build)
    rows.add()
    assert dispatcher.hint() == 1
    dispatcher.hint_campaigns()
    dispatcher.feed()
    dispatcher.settle_shares()
    sweeper.sweep()
    sweeper.close()


class TestGlance:
    def test_nobody_is_called_while_there_is_nothing_to_do(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        assert dispatcher.glance() == frozenset()
        rows.add(run_at=func.now() + text("interval '1 hour'"))
        assert dispatcher.glance() == frozenset()

    def test_a_job_that_is_ready_calls_who_wakes_replicas(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        rows.add()
        assert dispatcher.glance() == {"hint"}


class TestCalls:
    def test_who_has_something_to_do_is_called_and_once_more_when_it_is_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # who waits and was not called gives up at once
        monkeypatch.setattr(dispatcher_module, "UNSEEN_SECONDS", 0.0)
        found = iter([["hint"], [], []])
        calls = Calls(lambda: next(found), ["hint", "feed"])
        called: list[tuple[bool, bool]] = []
        for _ in range(3):
            calls.look()
            called.append((calls.wait("hint"), calls.wait("feed")))
        assert called == [(True, False), (True, False), (False, False)]

    def test_who_is_not_called_waits_for_as_long_as_somebody_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatcher_module, "UNSEEN_SECONDS", 0.2)
        now = 0.0
        # a clock that goes on only when this test has looked
        monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(monotonic=lambda: now))
        calls = Calls(frozenset, ["hint"])
        calls.look()
        returned = threading.Event()

        def wait() -> None:
            calls.wait("hint")
            returned.set()

        waits = threading.Thread(target=wait)
        waits.start()
        for _ in range(3):
            now += 0.15
            assert not returned.wait(0.5)
            calls.look()
        now += 0.25
        assert returned.wait(60)
        waits.join()

    def test_while_nobody_can_look_everybody_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatcher_module, "UNSEEN_SECONDS", 0.1)

        def fail() -> list[str]:
            raise OperationalError("glance", {}, Exception("locked"))

        calls = Calls(fail, ["hint", "feed"])
        with pytest.raises(OperationalError):
            calls.look()
        assert (calls.wait("hint"), calls.wait("feed")) == (False, False)


class TestHint:
    def test_wakes_nobody_for_a_model_that_no_replica_of_the_pool_serves(
        self, dispatcher: Dispatcher, rows: JobRows
    ) -> None:
        rows.add(model="another")
        assert dispatcher.hint() == 0
        rows.add()
        with rows.engine.begin() as connection:
            connection.execute(update(Replica).values(pool="other"))
        assert dispatcher.hint() == 0

    def test_wakes_nobody_for_a_replica_that_is_silent(self, dispatcher: Dispatcher, rows: JobRows) -> None:
        rows.add()
        with rows.engine.begin() as connection:
            connection.execute(update(Replica).values(last_seen=func.now() - text("interval '2 minutes'")))
        assert dispatcher.hint() == 0

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

    def test_is_bounded_however_many_send_at_once(self, redis: Redis, settings: Settings) -> None:
        queues = [HintQueue(settings) for _ in range(3)]
        together = threading.Barrier(len(queues))

        def top_up(queue: HintQueue) -> None:
            together.wait()
            queue.top_up(MAX_HINTS)

        redis.delete(settings.gpu_queue)
        with ThreadPoolExecutor(len(queues)) as senders:
            list(senders.map(top_up, queues))
        assert redis.llen(settings.gpu_queue) == MAX_HINTS
        for queue in queues:
            queue.close()

    def test_does_not_count_what_is_to_start_later_however_much_it_is(
        self, dispatcher: Dispatcher, rows: JobRows
    ) -> None:
        for project in ("a", "b"):
            rows.add(project=project, run_at=func.now() + text("interval '1 hour'"))
            rows.add(project=project, priority=2)
        assert dispatcher.hint() == 2

    def test_sends_again_what_redis_lost(self, dispatcher: Dispatcher, rows: JobRows, redis: Redis) -> None:
        rows.add()
        assert dispatcher.hint() == 1
        redis.flushdb()
        assert dispatcher.hint() == 1


def test_claim_order_is_what_the_queue_position_says(rows: JobRows) -> None:
    first, second, urgent = rows.add(), rows.add(), rows.add(priority=0)
    ahead = {job.id: rows.run(backlog.num_ahead(job)) for job in (first, second, urgent)}
    assert ahead == {urgent.id: 0, first.id: 1, second.id: 2}
    assert rows.run(select(func.count()).select_from(Job)) == 3


def test_queue_position_counts_a_turn_of_every_other_project_for_each_own_job(rows: JobRows) -> None:
    for _ in range(5):
        rows.add(project="busy")
    mine = [rows.add(project="mine") for _ in range(3)]
    assert [rows.run(backlog.num_ahead(job)) for job in mine] == [0, 2, 4]
