"""Deliveries from what happens to a job to the receiver that takes it, on real Postgres and real sockets."""

import json
import threading
import time
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import SecretStr
from redis import Redis
from rushes_core import beats
from rushes_core.dispatcher import Dispatcher
from rushes_core.queue import WEBHOOK_QUEUE
from rushes_core.settings import Settings
from rushes_core.webhooks import deliveries, endpoints
from rushes_core.webhooks.schedule import DELAYS
from rushes_core.webhooks.signing import PublicKeys, SigningSecret, Vault
from rushes_worker.webhooks import sender as sender_module
from sqlalchemy import Connection, Executable, select, text, true
from standardwebhooks import Webhook
from support.proxy import relayed
from support.receiver import Received, Receiver, hang, reply
from support.stack import SharedStack
from support.unwrapping import unwrapped
from support.waiting import wait_until
from support.webhooks import ED25519_KEY, LOCAL, Hooks, SenderProcess, SenderThread
from support.worker import Jobs

AWKWARD = {"title": 'día "ひまわり" 🌻\\ \n\t<script>\u2028', "字": "第一\r\n行"}


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL, webhook_ed25519_key=ED25519_KEY, webhook_timeout_seconds=30)


@contextmanager
def slow_outcomes(hooks: Hooks, *, seconds: float) -> Iterator[None]:
    """Have the database take so long for each delivery that is written down as delivered."""
    with hooks.engine.begin() as connection:
        connection.execute(
            text(f"""
CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END$$;
CREATE TRIGGER take_long BEFORE UPDATE ON webhook_deliveries FOR EACH ROW WHEN (NEW.state = 'delivered')
EXECUTE FUNCTION take_long()
""")
        )
    try:
        yield
    finally:
        with hooks.engine.begin() as connection:
            connection.execute(text("DROP FUNCTION take_long CASCADE"))


@contextmanager
def few_outcomes(hooks: Hooks, *, at_most: int) -> Iterator[None]:
    """Have the database refuse more outcomes than that at once."""
    with hooks.engine.begin() as connection:
        connection.execute(
            text(f"""
CREATE FUNCTION take_few() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    IF (SELECT count(*) FROM written WHERE state = 'delivered') > {at_most} THEN RAISE 'too many'; END IF;
    RETURN NULL;
END$$;
CREATE TRIGGER take_few AFTER UPDATE ON webhook_deliveries REFERENCING NEW TABLE AS written
FOR EACH STATEMENT EXECUTE FUNCTION take_few()
""")
        )
    try:
        yield
    finally:
        with hooks.engine.begin() as connection:
            connection.execute(text("DROP FUNCTION take_few CASCADE"))


def still(connection: Connection) -> bool:
    """Keep the transaction from being ended as one that was forgotten."""
    return connection.execute(select(true())).scalar_one()


class TestBody:
    def test_an_endpoint_is_told_of_a_completed_job(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.register(receiver.url())
        job = hooks.completed(**AWKWARD)
        delivery = hooks.wait_for("delivered")
        (received,) = receiver.received
        body = json.loads(received.body)
        (event,) = hooks.events()
        assert received.event_id == body["id"] == event.event_id == f"evt_{job.id.removeprefix('video_')}_1"
        assert body["object"] == "event"
        assert body["type"] == "video.completed"
        assert body["created_at"] == int(event.created_at.timestamp())
        assert body["timestamp"].endswith("Z")
        assert body["data"] == {
            "id": job.id,
            "status": "completed",
            "progress": 100,
            "attempt": 1,
            "sequence": delivery.sequence,
            "custom_id": None,
            "campaign_id": None,
            "metadata": AWKWARD,
            "error": None,
            "content_url": f"/v1/videos/{job.id}/content",
        }
        assert received.headers["content-type"] == "application/json"
        assert "authorization" not in received.headers
        assert received.headers["host"] == f"127.0.0.1:{receiver.port}"

    def test_a_failure_names_no_path_and_no_host(self, hooks: Hooks, receiver: Receiver, sender: SenderThread) -> None:
        hooks.register(receiver.url())
        hooks.add()
        message = "cannot write /tmp/scratch/clip.mp4 to http://store-7.internal:9000/media"
        hooks.fail(hooks.run(), {"code": "storage_error", "message": message, "stage": "uploading"})
        hooks.wait_for("delivered")
        (received,) = receiver.received
        error = json.loads(received.body)["data"]["error"]
        assert error == {"code": "storage_error", "message": "cannot write [...] to [...]", "stage": "uploading"}
        assert b"/tmp" not in received.body
        assert b"internal" not in received.body

    def test_a_jobs_own_url_is_told_and_the_job_knows(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        secret = hooks.project_secret()
        job = hooks.completed(receiver.url("/mine?job=7"))
        hooks.wait_for("delivered")
        (received,) = receiver.at("/mine?job=7")
        Webhook(secret.text).verify(received.body, received.signed)
        summary = hooks.jobs.read(job.id).webhook
        assert summary == {"state": "delivered", "attempts": 1, "last_status": 200}


class TestSignature:
    def test_standard_webhooks_and_openai_verify_what_was_sent(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        _, secret = hooks.register(receiver.url())
        job = hooks.completed(**AWKWARD)
        hooks.wait_for("delivered")
        (received,) = receiver.received
        verified = Webhook(secret.text).verify(received.body, received.signed)
        assert verified["data"]["metadata"] == AWKWARD
        for line in (2, 3):
            (said,) = unwrapped([received], secret.text, line=line)
            assert said.pop("openai").startswith(f"{line}.")
            assert said == {
                "is_checked": True,
                "id": received.event_id,
                "type": "video.completed",
                "subject_id": job.id,
                "created_at": json.loads(received.body)["created_at"],
            }

    def test_the_time_is_that_of_the_database_whatever_the_clock_of_the_sender_says(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, secret = hooks.register(receiver.url())
        hooks.completed()
        clock = time.time
        with monkeypatch.context() as skewed:
            skewed.setattr(time, "time", lambda: clock() + 3_600)
            with SenderThread(settings):
                hooks.wait_for("delivered")
        (received,) = receiver.received
        Webhook(secret.text).verify(received.body, received.signed)
        assert abs(int(received.headers["webhook-timestamp"]) - clock()) < 60

    def test_an_ed25519_signature_goes_beside_it(self, hooks: Hooks, receiver: Receiver, sender: SenderThread) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        hooks.wait_for("delivered")
        (received,) = receiver.received
        symmetric, asymmetric = received.headers["webhook-signature"].split(" ")
        assert symmetric.startswith("v1,")
        assert asymmetric.startswith("v1a,")
        (jwk,) = PublicKeys(hooks.settings).jwks()["keys"]
        public = Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(jwk["x"] + "="))
        message = f"{received.event_id}.{received.headers['webhook-timestamp']}.".encode() + received.body
        public.verify(b64decode(asymmetric.removeprefix("v1a,")), message)

    def test_secrets_lie_encrypted_in_the_database(self, hooks: Hooks, receiver: Receiver) -> None:
        endpoint_id, secret = hooks.register(receiver.url())
        project_secret = hooks.project_secret()
        stored = hooks.endpoint(endpoint_id).secret
        assert stored is not None
        for shown in (secret.text, project_secret.text):
            assert shown.encode() not in stored
            assert shown.removeprefix("whsec_").encode() not in stored
            assert shown.encode() not in hooks.secrets()[0].secret


class TestAgain:
    def test_the_same_bytes_and_id_are_sent_again_after_a_failure(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        _, secret = hooks.register(receiver.url())
        receiver.script("/hook", reply(500), reply(429, retry_after="2"), reply(200))
        hooks.completed(**AWKWARD)
        delivery = hooks.wait_attempts(1)
        assert 4 <= hooks.seconds_until_next(delivery.id) <= 6.1
        hooks.make_due()
        hooks.wait_attempts(2)
        assert 1.9 <= hooks.seconds_until_next(delivery.id) <= 2.5
        hooks.make_due()
        hooks.wait_for("delivered")
        assert len(receiver.received) == 3
        assert len({one.body for one in receiver.received}) == 1
        assert len({one.event_id for one in receiver.received}) == 1
        for one in receiver.received:
            Webhook(secret.text).verify(one.body, one.signed)
        log = [(one.number, one.status, one.error) for one in hooks.attempts(delivery.id)]
        assert log == [(1, 500, "http_error"), (2, 429, "http_error"), (3, 200, None)]

    def test_retries_survive_a_restart_of_the_sender(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
    ) -> None:
        hooks.register(receiver.url())
        receiver.script("/hook", reply(500), reply(200))
        hooks.completed()
        with SenderProcess(settings, tmp_path / "first.log") as first:
            hooks.wait_attempts(1)
            assert first.end() == 0
        hooks.make_due()
        with SenderProcess(settings, tmp_path / "second.log"):
            hooks.wait_for("delivered")
        assert len(receiver.received) == 2

    def test_a_sender_that_dies_after_the_answer_leaves_one_recorded_success_and_the_same_id(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
    ) -> None:
        hooks.register(receiver.url())
        with SenderProcess(settings, tmp_path / "first.log") as first:
            # frozen before it can read the answer, killed when the answer has been sent
            def freeze_and_answer(connection: object, received: object) -> None:
                first.freeze()
                reply(200)(connection, received)  # type: ignore[arg-type]

            receiver.script("/hook", freeze_and_answer)
            hooks.completed()
            wait_until(lambda: receiver.received)
            first.kill()
        assert hooks.delivery().state == "delivering"
        hooks.end_leases()
        with SenderProcess(settings, tmp_path / "second.log"):
            delivery = hooks.wait_for("delivered")
        assert len(receiver.received) == 2
        assert len({(one.event_id, one.body) for one in receiver.received}) == 1
        log = [(one.number, one.status, one.error) for one in hooks.attempts(delivery.id)]
        assert log == [(1, None, "sender_lost"), (2, 200, None)]

    def test_a_sender_stops_although_a_receiver_hangs(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "STOP_SECONDS", 0.2)
        hooks.register(receiver.url())
        receiver.script("/hook", hang)
        hooks.completed()
        with SenderThread(settings):
            wait_until(lambda: receiver.received)
        assert hooks.delivery().state == "delivering"
        hooks.end_leases()
        with SenderThread(settings):
            hooks.wait_for("delivered")
        assert len({one.event_id for one in receiver.received}) == 1

    def test_a_sender_that_stops_gives_back_what_it_has_not_begun(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "STOP_SECONDS", 0.2)
        hooks.register(receiver.url(), "video.started", "video.completed")
        receiver.script("/hook", hang)
        hooks.completed()
        with SenderThread(settings):
            wait_until(lambda: receiver.received)
        assert hooks.delivery(type="video.started").state == "delivering"
        end = hooks.delivery(type="video.completed")
        assert (end.state, end.attempts) == ("pending", 0)

    def test_a_lease_outlasts_each_request_however_long_the_claim_waited(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "LEASE_MARGIN_SECONDS", 2.0)
        timeout_seconds = 5.0
        brief = settings.model_copy(update={"webhook_timeout_seconds": timeout_seconds})
        hooks.register(receiver.url())
        hooks.completed()
        left: list[float] = []

        def look(connection: Any, received: Received) -> None:
            with hooks.engine.connect() as other:
                seconds = (
                    "SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float FROM webhook_deliveries"
                )
                left.append(other.execute(text(f"{seconds} WHERE state = 'delivering'")).scalar_one())
            reply(200)(connection, received)

        receiver.script("/hook", look)
        with hooks.engine.begin() as connection:
            connection.execute(deliveries.lock_claims())
            with SenderThread(brief):
                time.sleep(5)
                connection.commit()
                hooks.wait_for("delivered")
        assert len(left) == 1
        # one that went on with the lease of before the wait would have three seconds less than that
        assert left[0] > timeout_seconds - 1.5

    def test_a_sender_that_lost_its_lease_records_nothing(self, hooks: Hooks, receiver: Receiver) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        fences: list[int] = []
        for _ in range(2):
            with hooks.engine.begin() as connection:
                connection.execute(deliveries.lock_claims())
                (row,) = connection.execute(
                    deliveries.claim(limit=10, limit_failing=10, concurrency=4, lease_seconds=30, per_project=10)
                )
                fences.append(row.fence)
            hooks.end_leases()
            with hooks.engine.begin() as connection:
                connection.execute(deliveries.reap())
            hooks.make_due()
        assert fences[0] < fences[1]
        delivery = hooks.delivery()
        for fence in fences:
            with hooks.engine.begin() as connection:
                connection.execute(deliveries.settle([deliveries.Outcome(delivery.id, fence, "delivered", status=200)]))
        assert hooks.delivery().state == "pending"
        with hooks.engine.begin() as connection:
            (row,) = connection.execute(
                deliveries.claim(limit=10, limit_failing=10, concurrency=4, lease_seconds=30, per_project=10)
            )
            for _ in range(2):
                connection.execute(
                    deliveries.settle([deliveries.Outcome(delivery.id, row.fence, "delivered", status=200)])
                )
        assert hooks.delivery().state == "delivered"
        assert [one.error for one in hooks.attempts(delivery.id)] == ["sender_lost", "sender_lost", None]

    def test_a_delivery_that_loses_every_sender_fails_at_the_end_of_the_schedule(self, hooks: Hooks) -> None:
        hooks.project_secret()
        job = hooks.completed("https://127.0.0.1/mine")
        delays: list[float] = []
        while hooks.delivery().state == "pending":
            with hooks.engine.begin() as connection:
                connection.execute(deliveries.lock_claims())
                connection.execute(
                    deliveries.claim(limit=10, limit_failing=10, concurrency=4, lease_seconds=30, per_project=10)
                ).one()
            hooks.end_leases()
            with hooks.engine.begin() as connection:
                connection.execute(deliveries.reap())
            delays.append(hooks.seconds_until_next(hooks.delivery().id))
            hooks.make_due()
        assert delays == pytest.approx([0, *DELAYS, 0], rel=0.21)
        assert {one.error for one in hooks.attempts(hooks.delivery().id)} == {"sender_lost"}
        assert (hooks.delivery().state, hooks.delivery().last_error) == ("failed", "sender_lost")
        assert hooks.jobs.read(job.id).webhook == {"state": "failed", "attempts": len(delays), "last_status": None}


class TestSeveral:
    def test_two_senders_record_each_delivery_once(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
    ) -> None:
        for number in range(5):
            hooks.register(receiver.url(f"/{number}"))
        for _ in range(20):
            hooks.completed()
        with (
            SenderProcess(settings, tmp_path / "one.log"),
            SenderProcess(settings, tmp_path / "two.log"),
        ):
            wait_until(lambda: len(hooks.deliveries(state="delivered")) == 100)
        assert len(receiver.received) == 100
        assert {len(hooks.attempts(one.id)) for one in hooks.deliveries()} == {1}

    def test_an_outcome_waits_for_a_database_that_is_away(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        hooks.register(receiver.url())
        answered, rows = threading.Event(), Jobs(settings)

        def answer(connection: Any, received: Received) -> None:
            answered.wait(20)
            reply(200)(connection, received)

        receiver.script("/hook", answer)
        hooks.completed()
        with SenderThread(settings):
            wait_until(lambda: receiver.received)
            hooks.engine.dispose()
            with rows.outage():
                answered.set()
                # it has tried to settle by then, and looked for more
                time.sleep(2)
            delivery = hooks.wait_for("delivered")
        rows.close()
        assert len(receiver.received) == 1
        assert [one.error for one in hooks.attempts(delivery.id)] == [None]

    def test_connections_to_the_database_that_fall_silent_are_given_up(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "TURN_SECONDS", 2.0)
        hooks.register(receiver.url())
        with relayed(settings) as (through, proxy), SenderThread(through):
            first = hooks.completed()
            hooks.wait_for("delivered", job_id=first.id)
            proxy.strand()
            second = hooks.completed()
            hooks.wait_for("delivered", job_id=second.id)
        assert len(receiver.received) == 2

    def test_a_slow_database_takes_what_it_can_and_nothing_is_sent_twice(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "TURN_SECONDS", 2.0)
        monkeypatch.setattr(sender_module, "LEASE_MARGIN_SECONDS", 60.0)
        hooks.register(receiver.url())
        for _ in range(30):
            hooks.completed()
        with slow_outcomes(hooks, seconds=0.2), SenderThread(settings.model_copy(update={"webhook_concurrency": 64})):
            wait_until(lambda: len(hooks.deliveries(state="delivered")) == 30)
        assert len(receiver.received) == 30
        assert {one.attempts for one in hooks.deliveries()} == {1}

    def test_a_sender_that_stops_writes_down_all_in_as_many_pieces_as_the_database_takes(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        answers = threading.Event()

        def wait(connection: Any, received: Received) -> None:
            assert answers.wait(60)
            reply(200)(connection, received)

        receiver.always("/hook", wait)
        hooks.register(receiver.url())
        for _ in range(100):
            hooks.completed()
        with few_outcomes(hooks, at_most=12):
            with SenderThread(settings.model_copy(update={"webhook_concurrency": 128})) as sender:
                wait_until(lambda: len(receiver.received) == 100)
                sender.stop()
                answers.set()
            assert len(hooks.deliveries(state="delivered")) == 100

    def test_a_sender_stops_although_the_database_is_silent(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender_module, "FINISH_SECONDS", 2.0)
        answer = threading.Event()

        def wait(connection: Any, received: Received) -> None:
            assert answer.wait(60)
            reply(200)(connection, received)

        hooks.register(receiver.url())
        receiver.script("/hook", wait)
        hooks.completed()
        with relayed(settings) as (through, proxy), SenderThread(through) as sender:
            wait_until(lambda: receiver.received)
            proxy.freeze()
            sender.stop()
            answer.set()
        assert hooks.delivery().state == "delivering"

    def test_what_was_delivered_is_written_down_while_nothing_can_be_claimed(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        hooks.register(receiver.url())
        locked, claims_wait = threading.Event(), threading.Event()

        def lock(connection: Any, received: Received) -> None:
            locked.set()
            assert claims_wait.wait(60)
            reply(200)(connection, received)

        receiver.script("/hook", lock)
        hooks.completed()
        with SenderThread(settings), hooks.engine.begin() as connection:
            assert locked.wait(60)
            connection.execute(deliveries.lock_claims())
            claims_wait.set()
            wait_until(lambda: still(connection) and hooks.delivery().state == "delivered")
        assert len(receiver.received) == 1

    def test_a_sender_that_can_only_write_down_what_was_delivered_works(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(beats, "BEAT_SECONDS", 0.5)
        asked, answer = threading.Event(), threading.Event()

        def wait(connection: Any, received: Received) -> None:
            asked.set()
            assert answer.wait(60)
            reply(200)(connection, received)

        def silence() -> float:
            with hooks.engine.connect() as connection:
                silences = {process: float(seconds) for process, seconds in connection.execute(beats.silences())}
            return silences.get(beats.SENDER, 60.0)

        receiver.script("/hook", wait)
        hooks.register(receiver.url())
        hooks.completed()
        with SenderThread(settings), hooks.engine.begin() as connection:
            assert asked.wait(60)
            wait_until(lambda: still(connection) and silence() < 1)
            connection.execute(deliveries.lock_claims())
            wait_until(lambda: still(connection) and silence() > 3)
            answer.set()
            wait_until(lambda: still(connection) and silence() < 1)

    def test_a_sender_that_cannot_say_that_it_works_logs_so_once(
        self, hooks: Hooks, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(beats, "BEAT_SECONDS", 0.2)
        logged: list[str] = []
        monkeypatch.setattr(sender_module.log, "warning", lambda event, **values: logged.append(event))
        num_tried = 0
        execute = sender_module.Sender._execute

        async def count(sender: sender_module.Sender, *statements: Executable) -> Any:
            nonlocal num_tried
            num_tried += any("beats" in str(statement) for statement in statements)
            return await execute(sender, *statements)

        monkeypatch.setattr(sender_module.Sender, "_execute", count)
        with hooks.engine.begin() as connection:
            connection.execute(text("ALTER TABLE beats RENAME TO elsewhere"))
        try:
            with SenderThread(settings):
                wait_until(lambda: num_tried > 3)
        finally:
            with hooks.engine.begin() as connection:
                connection.execute(text("ALTER TABLE elsewhere RENAME TO beats"))
        assert logged == ["webhook_beat_failed"]

    def test_endpoints_that_fail_leave_room_for_those_that_do_not(self, hooks: Hooks, receiver: Receiver) -> None:
        for number in range(4):
            endpoint_id, _ = hooks.register(receiver.url(f"/{number}"))
            if number:
                hooks.set_endpoint(endpoint_id, failures=number)
        for _ in range(3):
            hooks.completed()
        with hooks.engine.begin() as connection:
            connection.execute(deliveries.lock_claims())
            statement = deliveries.claim(limit=100, limit_failing=5, concurrency=4, lease_seconds=30, per_project=100)
            claimed = [row.is_failing for row in connection.execute(statement)]
        assert (claimed.count(False), claimed.count(True)) == (3, 5)

    def test_redis_and_the_dispatcher_are_not_needed(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
    ) -> None:
        hooks.register(receiver.url())
        alone = settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
        with SenderProcess(alone, tmp_path / "sender.log"):
            hooks.completed()
            hooks.wait_for("delivered")

    def test_the_dispatcher_wakes_a_sender_while_something_is_due(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        dispatcher = Dispatcher(settings)
        with Redis.from_url(settings.redis_url) as redis:
            assert dispatcher.hint_webhooks() == 0
            assert dispatcher.glance() == frozenset()
            hooks.register(receiver.url())
            hooks.completed()
            assert dispatcher.glance() == {"webhook_hint"}
            assert dispatcher.hint_webhooks() == 1
            assert dispatcher.hint_webhooks() == 0, "one is enough"
            assert redis.llen(WEBHOOK_QUEUE) == 1
        dispatcher.close()

    def test_no_transaction_is_open_while_a_receiver_takes_its_time(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.register(receiver.url())
        seen: list[set[tuple[int, datetime]]] = []
        idle = text(
            "SELECT pid, xact_start FROM pg_stat_activity WHERE datname = current_database() "
            "AND state = 'idle in transaction' AND pid <> pg_backend_pid()"
        )

        def watch(connection: Any, received: Received) -> None:
            for _ in range(10):
                with hooks.engine.connect() as other:
                    seen.append({(row.pid, row.xact_start) for row in other.execute(idle)})
                time.sleep(0.1)
            reply(200)(connection, received)

        receiver.script("/hook", watch)
        hooks.completed()
        hooks.wait_for("delivered")
        assert len(seen) == 10
        # others are open for a moment, which is longer on a busy machine
        assert set.intersection(*seen) == set()

    def test_a_sender_without_a_key_for_secrets_says_so(self, settings: Settings, tmp_path: Path) -> None:
        bare = settings.model_copy(update={"webhook_key": SecretStr("")})
        with SenderProcess(bare, tmp_path / "sender.log") as sender:
            assert sender.wait() == 2
        assert "RUSHES_WEBHOOK_KEY is not set" in sender.log.read_text()

    def test_a_secret_of_another_key_fails_the_attempt_and_is_named(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        other = settings.model_copy(update={"webhook_key": SecretStr(urlsafe_b64encode(b"o" * 32).decode())})
        with SenderThread(other):
            assert hooks.wait_attempts(1).last_error == "secret_unreadable"
        assert not receiver.received

    def test_the_old_key_for_secrets_may_go_when_all_were_rotated_and_old_ones_still_sign(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url("/registered"))
        hooks.project_secret()
        new = settings.model_copy(update={"webhook_key": SecretStr(urlsafe_b64encode(b"o" * 32).decode())})
        both = SecretStr(f"{new.webhook_key.get_secret_value()},{settings.webhook_key.get_secret_value()}")
        vault = Vault(settings.model_copy(update={"webhook_key": both}))
        secret, project_secret = SigningSecret.new(), SigningSecret.new()
        hooks.jobs.run(endpoints.rotate(endpoint_id, secret, vault=vault, keeps=True, project="default"))
        hooks.jobs.run(endpoints.rotate_secret("default", project_secret, vault=vault, keeps=True))
        hooks.completed(receiver.url("/own"))
        with SenderThread(new):
            wait_until(lambda: len(hooks.deliveries(state="delivered")) == 2)
        for path, current in (("/registered", secret), ("/own", project_secret)):
            (received,) = receiver.at(path)
            Webhook(current.text).verify(received.body, received.signed)
            assert received.headers["webhook-signature"].count("v1,") == 1
