"""Which events there are, their order, and who is told: from the transitions of jobs to rows and receivers."""

import json
import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr
from rushes_core import jobs, leftovers
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.sweeper import Sweeper
from rushes_core.webhooks import deliveries
from rushes_core.webhooks.tables import WebhookDelivery
from sqlalchemy import func, text, update
from support.job_rows import RESULT
from support.receiver import Received, Receiver, reply
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderThread

ALL = ("video.started", "video.progress", "video.completed", "video.failed", "video.cancelled", "video.expired")
URL = "https://8.8.8.8/hook"


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL, webhook_timeout_seconds=30)


def told(hooks: Hooks) -> list[str]:
    return [one.type for one in hooks.deliveries()]


class TestTypes:
    def test_every_end_tells_those_who_want_it(self, hooks: Hooks) -> None:
        hooks.register(URL)
        hooks.completed()
        hooks.add()
        hooks.fail(hooks.run())
        cancelled = hooks.add()
        hooks.jobs.run(jobs.cancel(cancelled.id, project="default"))
        late = hooks.jobs.add(deadline_at=func.now() - timedelta(seconds=1))
        hooks.jobs.run(jobs.expire())
        assert hooks.jobs.read(late.id).state == "expired"
        assert told(hooks) == ["video.completed", "video.failed", "video.cancelled", "video.expired"]
        for event, delivery in zip(hooks.events(), hooks.deliveries(), strict=True):
            assert (event.event_id, event.job_id) == (delivery.event_id, delivery.job_id)

    def test_starts_and_progress_are_told_only_to_those_who_ask(self, hooks: Hooks) -> None:
        plain, _ = hooks.register(URL)
        hooks.add()
        job = hooks.run()
        hooks.report(job, 10)
        assert list(hooks.events()) == []
        keen, _ = hooks.register(URL, *ALL)
        hooks.report(job, 20)
        hooks.complete(job)
        assert [one.type for one in hooks.deliveries(endpoint_id=plain)] == ["video.completed"]
        assert [one.type for one in hooks.deliveries(endpoint_id=keen)] == ["video.progress", "video.completed"]

    def test_progress_is_told_at_most_every_ten_seconds(self, hooks: Hooks) -> None:
        hooks.register(URL, *ALL)
        hooks.add()
        job = hooks.run()
        for progress in (10, 20, 30):
            hooks.report(job, progress)
        assert told(hooks) == ["video.started", "video.progress"]
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE outbox SET created_at = created_at - interval '11 s'"))
        hooks.report(job, 40)
        hooks.report(job, 50)
        assert told(hooks) == ["video.started", "video.progress", "video.progress"]
        assert [one.data and one.data["progress"] for one in hooks.events()] == [0, 10, 40]

    def test_a_jobs_own_events_are_those_that_it_names(self, hooks: Hooks) -> None:
        hooks.add(URL, "video.started", "video.failed")
        hooks.complete(hooks.run())
        assert told(hooks) == ["video.started"]
        assert hooks.delivery().url == URL

    def test_a_retried_job_tells_each_end_under_an_id_of_its_own(self, hooks: Hooks) -> None:
        hooks.register(URL)
        hooks.add()
        failed = hooks.fail(hooks.run())
        hooks.jobs.run(jobs.retry(failed.id, project="default"))
        hooks.complete(hooks.run())
        ulid = failed.id.removeprefix("video_")
        assert [one.event_id for one in hooks.deliveries()] == [f"evt_{ulid}_1", f"evt_{ulid}_2"]

    def test_an_event_is_written_with_the_transition_or_not_at_all(self, hooks: Hooks) -> None:
        hooks.register(URL, *ALL)
        hooks.add()
        job = hooks.run()
        assert told(hooks) == ["video.started"]
        with hooks.engine.connect() as connection:
            connection.execute(
                update(Job)
                .where(Job.id == job.id)
                .values(
                    state="failed",
                    error={"code": "x"},
                    finished_at=func.now(),
                    lease_owner=None,
                    lease_until=None,
                )
            )
            assert connection.execute(text("SELECT count(*) FROM webhook_deliveries")).scalar_one() == 2
            connection.rollback()
        assert told(hooks) == ["video.started"]
        assert len(hooks.events()) == 1

    def test_disabled_deleted_and_other_projects_endpoints_are_told_nothing(self, hooks: Hooks) -> None:
        disabled, _ = hooks.register(URL)
        deleted, _ = hooks.register(URL)
        hooks.register(URL, project="other")
        hooks.set_endpoint(disabled, state="disabled")
        hooks.set_endpoint(deleted, deleted_at=datetime.now(UTC))
        hooks.completed()
        assert list(hooks.deliveries()) == []

    def test_jobs_of_an_origin_share_an_endpoint_and_its_failures(self, hooks: Hooks) -> None:
        hooks.completed("https://8.8.8.8/a?job=1")
        hooks.completed("https://8.8.8.8:443/b")
        hooks.completed("https://8.8.4.4/a")
        a, b, c = hooks.deliveries()
        assert a.endpoint_id == b.endpoint_id != c.endpoint_id
        assert hooks.endpoint(a.endpoint_id).origin == "https://8.8.8.8:443"


class TestOrder:
    def test_sequences_of_a_job_rise(self, hooks: Hooks) -> None:
        hooks.register(URL, *ALL)
        job = hooks.add()
        hooks.report(hooks.run(), 30)
        hooks.jobs.run(
            jobs.retry_or_fail(job.id, fence=_fence(hooks, job), error={"code": "x", "message": "y"}, crashed=False)
        )
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET run_at = now()"))
            connection.execute(text("UPDATE outbox SET created_at = created_at - interval '11 s'"))
        again = hooks.run()
        hooks.report(again, 40)
        failed = hooks.fail(again)
        hooks.jobs.run(jobs.retry(failed.id, project="default"))
        hooks.complete(hooks.run())
        assert told(hooks) == [
            "video.started",
            "video.progress",
            "video.started",
            "video.progress",
            "video.failed",
            "video.started",
            "video.completed",
        ]
        sequences = [one.sequence for one in hooks.deliveries()]
        assert sequences == sorted(set(sequences))

    def test_what_came_before_is_not_told_after_the_end_was(self, hooks: Hooks, settings: Settings) -> None:
        with Receiver() as receiver, SenderThread(settings):
            hooks.register(receiver.url(), *ALL)
            receiver.script("/hook", reply(500), reply(200))
            hooks.add()
            job = hooks.run()
            hooks.wait_attempts(1, type="video.started")
            hooks.complete(job)
            hooks.wait_for("delivered", type="video.completed")
            wait_until(lambda: hooks.delivery(type="video.started").state == "cancelled")
            assert hooks.delivery(type="video.started").last_error == "superseded"
            hooks.make_due()
        first, second = (json.loads(one.body) for one in receiver.received)
        assert [first["type"], second["type"]] == ["video.started", "video.completed"]
        assert first["data"]["sequence"] < second["data"]["sequence"]
        assert first["timestamp"] <= second["timestamp"]

    def test_a_start_that_was_answered_after_the_end_is_not_tried_again(self, hooks: Hooks, settings: Settings) -> None:
        ended = threading.Event()

        def late(connection: socket.socket, received: Received) -> None:
            ended.wait(20)
            reply(500)(connection, received)

        with Receiver() as receiver, SenderThread(settings):
            hooks.register(receiver.url(), *ALL)
            receiver.script("/hook", late, reply(200))
            hooks.add()
            job = hooks.run()
            wait_until(lambda: receiver.received)
            hooks.complete(job)
            hooks.wait_for("delivered", type="video.completed")
            ended.set()
            hooks.wait_attempts(1, type="video.started")
            hooks.make_due()
            start = hooks.wait_for("cancelled", type="video.started")
        assert (start.last_error, start.attempts) == ("superseded", 1)
        assert len(receiver.received) == 2

    def test_progress_that_waited_for_a_slow_answer_is_not_told_for_the_first_time_after_the_end(
        self, hooks: Hooks, settings: Settings
    ) -> None:
        ended = threading.Event()

        def late(connection: socket.socket, received: Received) -> None:
            ended.wait(20)
            reply(200)(connection, received)

        with Receiver() as receiver:
            hooks.register(receiver.url(), *ALL)
            receiver.script("/hook", late)
            hooks.add()
            job = hooks.run()
            hooks.report(job, 10)
            with SenderThread(settings):
                wait_until(lambda: receiver.received)
                hooks.complete(job)
                hooks.wait_for("delivered", type="video.completed")
                # it takes as long as a slow receiver does
                time.sleep(1)
                ended.set()
                hooks.wait_for("delivered", type="video.started")
                progress = hooks.wait_for("cancelled", type="video.progress")
        assert (progress.last_error, progress.attempts) == ("superseded", 0)
        assert [json.loads(one.body)["type"] for one in receiver.received] == ["video.started", "video.completed"]

    def test_what_piled_up_for_a_slow_receiver_is_told_in_order(self, hooks: Hooks, settings: Settings) -> None:
        def slow(connection: socket.socket, received: Received) -> None:
            time.sleep(1.2)
            reply(200)(connection, received)

        with Receiver() as receiver:
            hooks.register(receiver.url(), *ALL)
            receiver.always("/hook", slow)
            hooks.add()
            job = hooks.run()
            hooks.report(job, 10)
            hooks.complete(job)
            with SenderThread(settings):
                wait_until(lambda: len(hooks.deliveries(state="delivered")) == 3)
        types = [json.loads(one.body)["type"] for one in receiver.received]
        assert types == ["video.started", "video.progress", "video.completed"]
        assert {one.attempts for one in hooks.deliveries()} == {1}

    def test_what_is_asked_for_once_more_is_told_although_the_end_was(self, hooks: Hooks, settings: Settings) -> None:
        with Receiver() as receiver, SenderThread(settings):
            hooks.register(receiver.url(), *ALL)
            hooks.add()
            hooks.complete(hooks.run())
            wait_until(lambda: len(hooks.deliveries(state="delivered")) == 2)
            start = hooks.delivery(type="video.started")
            hooks.jobs.run(deliveries.redeliver(start, new_id=f"{start.id[:-1]}x"))
            hooks.wait_for("delivered", kind="redelivery")
        assert len(receiver.received) == 3

    def test_what_piled_up_is_told_in_order(self, hooks: Hooks, settings: Settings) -> None:
        with Receiver() as receiver:
            hooks.register(receiver.url(), *ALL)
            hooks.add()
            job = hooks.run()
            hooks.report(job, 10)
            hooks.complete(job)
            with SenderThread(settings):
                wait_until(lambda: len(hooks.deliveries(state="delivered")) == 3)
        types = [json.loads(one.body)["type"] for one in receiver.received]
        assert types == ["video.started", "video.progress", "video.completed"]

    def test_what_piled_up_is_told_by_sequence_although_the_end_began_first(
        self, hooks: Hooks, settings: Settings
    ) -> None:
        with Receiver() as receiver:
            hooks.register(receiver.url(), *ALL)
            hooks.add()
            job = hooks.run()
            with hooks.engine.begin() as connection:
                # the time of an event is that at which its transaction began
                connection.execute(text("SELECT now()"))
                hooks.report(job, 10)
                connection.execute(jobs.complete(job.id, fence=_fence(hooks, job), result=RESULT, timings={}))
            with SenderThread(settings):
                wait_until(lambda: len(hooks.deliveries(state="delivered")) == 3)
        types = [json.loads(one.body)["type"] for one in receiver.received]
        assert types == ["video.started", "video.progress", "video.completed"]


class TestDeletion:
    def test_a_deleted_video_tells_nothing_any_more(self, hooks: Hooks, settings: Settings) -> None:
        with Receiver() as receiver:
            hooks.register(receiver.url())
            job = hooks.completed()
            hooks.jobs.run(jobs.delete_job(job.id, project="default"))
            with SenderThread(settings):
                delivery = hooks.wait_for("cancelled")
            assert (delivery.last_error, delivery.attempts) == ("video_deleted", 0)
            assert not receiver.received

    def test_old_deliveries_and_events_are_forgotten_without_a_sender(self, hooks: Hooks, settings: Settings) -> None:
        with Receiver() as receiver:
            endpoint_id, _ = hooks.register(receiver.url())
            old = hooks.completed()
            with SenderThread(settings):
                hooks.wait_for("delivered")
            with hooks.engine.begin() as connection:
                connection.execute(text("UPDATE webhook_deliveries SET finished_at = finished_at - interval '31 days'"))
                connection.execute(text("UPDATE outbox SET created_at = created_at - interval '31 days'"))
            hooks.set_endpoint(endpoint_id, open_until=datetime.now(UTC) + timedelta(hours=1))
            new = hooks.completed()
            with hooks.engine.begin() as connection:
                connection.execute(leftovers.forget_events())
            # an event is kept for as long as its deliveries
            assert [one.job_id for one in hooks.events()] == [old.id, new.id]
            sweeper = Sweeper(settings.model_copy(update={"webhook_key": SecretStr("")}))
            sweeper.tidy()
            sweeper.close()
            assert [one.job_id for one in hooks.deliveries()] == [new.id]
            assert [one.job_id for one in hooks.events()] == [new.id]

    def test_what_waited_for_days_is_given_up(self, hooks: Hooks, settings: Settings) -> None:
        endpoint_id, _ = hooks.register(URL)
        hooks.set_endpoint(endpoint_id, failures=12, open_until=datetime.now(UTC) + timedelta(hours=1))
        hooks.completed()
        with hooks.engine.begin() as connection:
            connection.execute(update(WebhookDelivery).values(created_at=func.now() - timedelta(days=6)))
        with SenderThread(settings):
            assert hooks.wait_for("failed").last_error == "too_old"

    def test_the_end_that_was_given_up_is_told_of_with_the_job(self, hooks: Hooks, settings: Settings) -> None:
        hooks.project_secret()
        job = hooks.completed(URL)
        endpoint_id = hooks.delivery().endpoint_id
        hooks.set_endpoint(endpoint_id, failures=12, open_until=datetime.now(UTC) + timedelta(hours=1))
        with hooks.engine.begin() as connection:
            connection.execute(update(WebhookDelivery).values(created_at=func.now() - timedelta(days=6)))
        with SenderThread(settings):
            hooks.wait_for("failed")
        assert hooks.jobs.read(job.id).webhook == {"state": "failed", "attempts": 0, "last_status": None}

    def test_a_job_that_goes_on_is_not_told_of_by_what_was_given_up_before_its_end(
        self, hooks: Hooks, settings: Settings
    ) -> None:
        hooks.project_secret()
        job = hooks.add(URL, "video.started", "video.completed")
        hooks.run()
        before = hooks.jobs.read(job.id).webhook
        delivery = hooks.delivery()
        hooks.set_endpoint(delivery.endpoint_id, failures=12, open_until=datetime.now(UTC) + timedelta(hours=1))
        with hooks.engine.begin() as connection:
            connection.execute(update(WebhookDelivery).values(created_at=func.now() - timedelta(days=6)))
        with SenderThread(settings):
            assert hooks.wait_for("failed").last_error == "too_old"
        assert hooks.jobs.read(job.id).webhook == before


def _fence(hooks: Hooks, job: Job) -> int:
    fence = hooks.jobs.read(job.id).fence
    assert fence is not None
    return fence


def test_figures_tell_what_waits_and_for_how_long(hooks: Hooks) -> None:
    idle = hooks.standing()
    assert (idle.num_waiting, idle.lag) == (0, 0)
    first, _ = hooks.register(URL)
    paused, _ = hooks.register(URL)
    off, _ = hooks.register(URL)
    hooks.set_endpoint(paused, failures=10, open_until=datetime.now(UTC) + timedelta(minutes=1))
    hooks.set_endpoint(off, state="disabled")
    hooks.completed()
    with hooks.engine.begin() as connection:
        connection.execute(text("UPDATE webhook_deliveries SET next_at = now() - interval '1 hour'"))
    late = hooks.standing()
    assert late.num_waiting == 2
    assert 3_600 <= late.lag < 3_660
    assert hooks.endpoint_states() == {"enabled": 1, "paused": 1, "disabled": 1}
    hooks.set_endpoint(first, open_until=datetime.now(UTC) + timedelta(minutes=1))
    assert hooks.standing().lag == 0, "who is paused waits by intention"
