"""Receivers that are broken or hostile: the schedule and the bounds hold, and nobody else waits for them."""

import asyncio
import json
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rushes_core import jobs
from rushes_core.settings import Settings
from rushes_core.webhooks import deliveries, endpoints
from rushes_core.webhooks.deliveries import Outcome
from rushes_core.webhooks.guard import Address, Guard, look_up
from rushes_core.webhooks.schedule import DELAYS
from rushes_worker.webhooks.sender import MAX_PROJECT_UNDER_WAY
from rushes_worker.webhooks.transport import MAX_RECEIVED_BYTES, Answer, Transport
from sqlalchemy import text
from support.receiver import Behaviour, Received, Receiver, drip, hang, make_certificate, reply, reset
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderProcess, SenderThread

NAME = "hooks.example.com"
MARK = "SECRET-MARK"
ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
PATIENT_SECONDS = 30.0
"""Of a sender that no receiver here keeps waiting: a busy machine may answer late."""
IMPATIENT_SECONDS = 1.5


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL, webhook_timeout_seconds=PATIENT_SECONDS)


@pytest.fixture(scope="module")
def impatient(settings: Settings) -> Settings:
    """Of a sender that gives up soon."""
    return settings.model_copy(update={"webhook_timeout_seconds": IMPATIENT_SECONDS})


class TestAnswers:
    @pytest.mark.parametrize(
        ("behaviour", "status", "error"),
        [
            (reply(500), 500, "http_error"),
            (reply(404), 404, "http_error"),
            (reply(302, location="http://127.0.0.1/inside"), 302, "redirect"),
            (reply(307, location="http://127.0.0.1/inside"), 307, "redirect"),
            (hang, None, "timeout"),
            (reset, 200, "connection_lost"),
            (drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x"), 200, "timeout"),
            (drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"), None, "timeout"),
            (drip(b"", b"H"), None, "invalid_answer"),
            (drip(b"nonsense\r\n\r\n", b"x"), None, "invalid_answer"),
            (reply(200, x=f"{'y' * 100_000}"), None, "invalid_answer"),
        ],
        ids=[
            "500",
            "404",
            "302",
            "307",
            "hang",
            "reset-mid-body",
            "dripping-body",
            "headers-without-end",
            "status-without-end",
            "no-http",
            "huge-header",
        ],
    )
    def test_a_bad_answer_is_tried_again_by_the_schedule(
        self,
        hooks: Hooks,
        receiver: Receiver,
        settings: Settings,
        behaviour: Behaviour,
        status: int | None,
        error: str,
    ) -> None:
        hooks.register(receiver.url())
        receiver.always("/hook", behaviour)
        hooks.completed()
        # where a part of the answer is to come first, it has longer for that
        seconds = PATIENT_SECONDS if error != "timeout" else IMPATIENT_SECONDS if status is None else 8.0
        with SenderThread(settings.model_copy(update={"webhook_timeout_seconds": seconds})):
            delivery = hooks.wait_attempts(1)
        assert delivery.state == "pending"
        (attempt,) = hooks.attempts(delivery.id)
        assert (attempt.status, attempt.error) == (status, error)
        assert 0.8 * DELAYS[0] <= hooks.seconds_until_next(delivery.id) <= 1.2 * DELAYS[0] + 0.1
        assert [one.path for one in receiver.received] == ["/hook"]

    def test_an_answer_of_ten_megabytes_is_not_read_to_its_end(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.register(receiver.url())
        receiver.script("/hook", reply(200, b"x" * 10_000_000))
        hooks.completed()
        delivery = hooks.wait_for("delivered")
        (attempt,) = hooks.attempts(delivery.id)
        assert attempt.excerpt == "x" * 1_024

    def test_memory_stays_flat_while_answers_have_no_end(
        self, hooks: Hooks, receiver: Receiver, impatient: Settings, tmp_path: Path
    ) -> None:
        hooks.register(receiver.url("/body"))
        hooks.register(receiver.url("/headers"))
        receiver.always("/body", drip(b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n", CHUNK, seconds=0))
        receiver.always("/headers", drip(b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n" * 4_096, seconds=0))
        with SenderProcess(impatient, tmp_path / "sender.log") as sender:
            hooks.completed()
            wait_until(lambda: all(one.attempts == 1 and one.state == "pending" for one in hooks.deliveries()))
            before = sender.resident_bytes()
            for _ in range(3):
                tried = {one.id: one.attempts for one in hooks.deliveries()}
                hooks.make_due()
                wait_until(
                    lambda tried=tried: all(
                        one.attempts > tried[one.id] and one.state == "pending" for one in hooks.deliveries()
                    )
                )
            assert sender.resident_bytes() - before < 32 * 2**20

    @pytest.mark.parametrize(
        ("start", "piece"),
        [
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 65_536),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2_048),
        ],
        ids=["extension-of-a-chunk", "interim-answers"],
    )
    def test_what_has_no_end_beside_the_body_is_cut_off(
        self, receiver: Receiver, settings: Settings, start: bytes, piece: bytes
    ) -> None:
        num_sent = 0

        def flood(connection: socket.socket, received: Received) -> None:
            nonlocal num_sent
            connection.sendall(start)
            while True:
                num_sent += connection.send(piece)

        async def post() -> Answer:
            async with Transport(settings, Guard(settings)) as transport:
                return await transport.post(receiver.url(), b"{}", {})

        receiver.always("/hook", flood)
        assert asyncio.run(post()).error == "connection_lost"
        # and what the sockets hold
        assert num_sent < MAX_RECEIVED_BYTES + 16 * 2**20

    def test_of_a_body_a_kilobyte_is_kept_without_control_characters(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.register(receiver.url())
        body = b"\x00\x1b[31m no \xff\xfe" + "é".encode() * 400 + b"z" * 5_000_000 + MARK.encode()
        receiver.script("/hook", reply(500, body))
        hooks.completed()
        delivery = hooks.wait_attempts(1)
        (attempt,) = hooks.attempts(delivery.id)
        assert attempt.excerpt is not None
        assert len(attempt.excerpt.encode()) <= 1_024
        assert attempt.excerpt.startswith("  [31m no \ufffd\ufffdéé")
        assert MARK not in attempt.excerpt

    def test_of_an_answer_from_a_private_network_nothing_is_kept(self, receiver: Receiver, settings: Settings) -> None:
        class Private(Guard):
            def is_private(self, address: Address) -> bool:
                return True

        async def post(guard: Guard) -> Answer:
            async with Transport(settings, guard) as transport:
                return await transport.post(receiver.url(), b"{}", {})

        receiver.always("/hook", reply(500, MARK.encode()))
        assert asyncio.run(post(Guard(settings))).excerpt == MARK
        answer = asyncio.run(post(Private(settings)))
        assert (answer.status, answer.error, answer.excerpt) == (500, "http_error", None)

    def test_410_disables_the_endpoint_and_cancels_what_waits(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.script("/hook", reply(500), reply(410))
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1)
            hooks.completed()
            wait_until(lambda: hooks.endpoint(endpoint_id).state == "disabled")
            hooks.make_due()
            hooks.completed()
        assert hooks.endpoint(endpoint_id).disabled_reason == "gone"
        assert [(one.state, one.last_error) for one in hooks.deliveries()] == [
            ("cancelled", "gone"),
            ("failed", "gone"),
        ]
        assert len(receiver.received) == 2

    def test_410_counts_beside_a_success_that_is_written_down_with_it(self, hooks: Hooks, receiver: Receiver) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        hooks.completed()
        hooks.completed()
        claim = deliveries.claim(limit=10, limit_failing=10, concurrency=10, lease_seconds=30, per_project=10)
        with hooks.engine.begin() as connection:
            connection.execute(deliveries.lock_claims())
            taken, gone = connection.execute(claim).all()
            outcomes = [
                Outcome(taken.id, taken.fence, "delivered", status=200),
                Outcome(gone.id, gone.fence, "failed", status=410, error="gone", gone_url=receiver.url()),
            ]
            connection.execute(deliveries.settle(outcomes))
        assert hooks.endpoint(endpoint_id).disabled_reason == "gone"

    def test_410_of_a_jobs_own_url_ends_that_delivery_alone(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.project_secret()
        receiver.script("/gone", reply(410))
        job = hooks.completed(receiver.url("/gone"))
        hooks.wait_for("failed")
        assert hooks.jobs.read(job.id).webhook == {"state": "failed", "attempts": 1, "last_status": 410}
        other = hooks.completed(receiver.url("/there"))
        hooks.wait_for("delivered", job_id=other.id)

    def test_too_many_requests_holds_up_the_endpoint_until_then(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.script("/hook", reply(429, retry_after="120"))
        first = hooks.completed()
        delivery = hooks.wait_attempts(1, job_id=first.id)
        assert 119 <= hooks.seconds_until_next(delivery.id) <= 145
        assert delivery.step == 0
        hooks.completed()
        sender.wake()
        with hooks.engine.connect() as connection:
            assert not connection.execute(deliveries.is_any_due()).scalar_one()
        hooks.set_endpoint(endpoint_id, open_until=None)
        wait_until(lambda: len(receiver.received) == 2)

    @pytest.mark.parametrize(
        ("before", "status", "failures"), [(0, 200, 0), (0, 500, 2), (9, 200, 0), (9, 500, 11), (8, 500, 10)]
    )
    def test_the_answers_that_were_under_way_do_not_end_the_wait_that_was_asked_for(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, before: int, status: int, failures: int
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        hooks.set_endpoint(endpoint_id, failures=before)
        held = threading.Event()

        def later(connection: socket.socket, received: Received) -> None:
            held.wait(20)
            reply(status)(connection, received)

        receiver.script("/hook", later, reply(429, retry_after="120"))
        first, second = hooks.completed(), hooks.completed()
        with SenderThread(settings):
            wait_until(lambda: hooks.endpoint(endpoint_id).open_until is not None)
            until = hooks.endpoint(endpoint_id).held_until
            held.set()
            wait_until(lambda: not hooks.deliveries(state="delivering"))
            hooks.completed()
        assert {one.last_status for one in hooks.deliveries() if one.job_id in (first.id, second.id)} == {status, 429}
        assert hooks.endpoint(endpoint_id).failures == failures
        open_until = hooks.endpoint(endpoint_id).open_until
        assert until is not None
        assert open_until is not None
        # a pause after failures may be longer
        assert open_until >= until if failures >= deliveries.BREAKER_FAILURES else open_until == until
        assert len(receiver.received) == 2

    def test_an_endpoint_that_is_enabled_anew_is_not_held_by_what_it_asked_for_before(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.script("/hook", reply(429, retry_after="120"), reply(500))
        hooks.completed()
        hooks.wait_attempts(1)
        hooks.jobs.run(endpoints.change(endpoint_id, endpoints.ENABLED, project="default"))
        hooks.completed()
        wait_until(lambda: hooks.endpoint(endpoint_id).failures == 1)
        assert hooks.endpoint(endpoint_id).open_until is None

    @pytest.mark.parametrize(
        ("behaviour", "left"),
        [(reply(503, retry_after="120"), "pending"), (reply(410), "cancelled")],
        ids=["wait", "gone"],
    )
    def test_what_piled_up_of_a_job_heeds_the_answer_to_the_first_of_it(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, behaviour: Behaviour, left: str
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url(), "video.started", "video.completed")
        receiver.script("/hook", behaviour)
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1, type="video.started")
            wait_until(lambda: not hooks.deliveries(state="delivering"))
        assert len(receiver.received) == 1
        end = hooks.delivery(type="video.completed")
        assert (end.state, end.attempts) == (left, 0)
        assert hooks.endpoint(endpoint_id).failures <= 1


class TestTls:
    def test_a_certificate_must_be_of_the_name_and_in_its_time(
        self, hooks: Hooks, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good, expired = (make_certificate(tmp_path, NAME, days=days) for days in (1, -1))
        other = make_certificate(tmp_path, "other.example.com")
        bundle = tmp_path / "bundle.pem"
        bundle.write_bytes(b"".join(one.read_bytes() for one in (good, expired, other)))
        monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
        asked: list[tuple[str, int]] = []

        def lookup(host: str, port: int) -> list[str]:
            asked.append((host, port))
            return ["127.0.0.1"]

        # the name's own port is one of this machine
        with Receiver(tls=good) as a, Receiver(tls=expired) as b, Receiver(tls=other) as c:
            local = settings.model_copy(update={"webhook_ports": f"{a.port},{b.port},{c.port}"})
            rules = Hooks(local)
            ids = [rules.register(one.url(host=NAME))[0] for one in (a, b, c)]
            with SenderThread(local, lookup=lookup):
                hooks.completed()
                wait_until(lambda: all(one.attempts and one.state != "delivering" for one in hooks.deliveries()))
            rules.close()
            assert sorted(asked) == sorted((NAME, one.port) for one in (a, b, c))
            found = {one.endpoint_id: one for one in hooks.deliveries()}
            assert [found[id].last_error for id in ids] == [None, "tls_failed", "tls_failed"]
            (received,) = a.received
            assert received.headers["host"] == f"{NAME}:{a.port}"
            assert not b.received
            assert not c.received

    def test_a_handshake_without_end_is_given_up(self, hooks: Hooks, impatient: Settings, tmp_path: Path) -> None:
        certificate = make_certificate(tmp_path, "localhost", address="127.0.0.1")
        with Receiver(tls=certificate, greet=False) as receiver, SenderThread(impatient):
            hooks.register(receiver.url())
            hooks.completed()
            delivery = hooks.wait_attempts(1)
        assert delivery.last_error == "timeout"


class TestNames:
    def test_a_name_that_rebinds_is_resolved_once_for_an_attempt_and_checked_in_each(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        local = settings.model_copy(update={"webhook_ports": str(receiver.port), "webhook_http": True})
        rules = Hooks(local)
        answers = [["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1", "169.254.169.254"], ["127.0.0.1"]]
        asked: list[str] = []

        def lookup(host: str, port: int) -> list[str]:
            asked.append(host)
            return answers[len(asked) - 1]

        rules.register(receiver.url(host=NAME))
        rules.close()
        receiver.script("/hook", reply(500))
        hooks.completed()
        with SenderThread(local, lookup=lookup):
            for count in (1, 2, 3):
                delivery = hooks.wait_attempts(count)
                hooks.make_due()
            hooks.wait_for("delivered")
        assert [one.error for one in hooks.attempts(delivery.id)] == [
            "http_error",
            "blocked_address",
            "blocked_address",
            None,
        ]
        assert asked == [NAME] * 4
        assert [one.headers["host"] for one in receiver.received] == [f"{NAME}:{receiver.port}"] * 2

    def test_a_name_that_is_not_found_is_tried_again(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        local = settings.model_copy(update={"webhook_ports": str(receiver.port), "webhook_http": True})
        rules = Hooks(local)

        def lookup(host: str, port: int) -> list[str]:
            raise socket.gaierror(socket.EAI_NONAME, "not known")

        rules.register(receiver.url(host=NAME))
        rules.close()
        hooks.completed()
        with SenderThread(local, lookup=lookup):
            assert hooks.wait_attempts(1).last_error == "dns_failed"

    def test_what_was_allowed_once_is_checked_again(
        self, hooks: Hooks, receiver: Receiver, stack: SharedStack, settings: Settings
    ) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        with SenderThread(settings.model_copy(update={"webhook_loopback": False})):
            delivery = hooks.wait_attempts(1)
        assert delivery.last_error == "blocked_address"
        assert not receiver.received

    def test_proxies_of_the_environment_are_ignored(
        self, hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
    ) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        dead = "http://127.0.0.1:9"
        proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), dead)
        with SenderProcess(settings, tmp_path / "sender.log", env=proxies | {"NO_PROXY": "", "no_proxy": ""}):
            hooks.wait_for("delivered")
        assert len(receiver.received) == 1


class TestOthers:
    def test_receivers_that_hang_delay_nobody(self, hooks: Hooks, receiver: Receiver, settings: Settings) -> None:
        for number in range(30):
            hooks.register(receiver.url(f"/hang/{number}"))
            receiver.always(f"/hang/{number}", hang)
        healthy, _ = hooks.register(receiver.url("/healthy"))
        with SenderThread(settings):
            for _ in range(5):
                hooks.completed()
            wait_until(lambda: len(hooks.deliveries(endpoint_id=healthy, state="delivered")) == 5)
            # nobody of the others has been given up meanwhile
            assert not hooks.deliveries(state="failed")
            assert {one.attempts for one in hooks.deliveries() if one.endpoint_id != healthy} <= {0, 1}
            busy = [one.endpoint_id for one in hooks.deliveries(state="delivering")]
            assert all(busy.count(one) <= settings.webhook_concurrency for one in busy)
            receiver.hang_up()

    def test_names_whose_servers_are_silent_delay_nobody(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        asked: list[str] = []
        over = threading.Event()

        def lookup(host: str, port: int) -> list[str]:
            if host == "localhost":
                return look_up(host, port)
            asked.append(host)
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no server answered")

        most_failing = MAX_PROJECT_UNDER_WAY // 2
        for number in range(most_failing // settings.webhook_concurrency + 1):
            silent, _ = hooks.register(f"https://{number}.example.com/")
            hooks.set_endpoint(silent, failures=1)
        for _ in range(settings.webhook_concurrency):
            hooks.completed()
        with SenderThread(settings, lookup=lookup):
            wait_until(lambda: len(asked) == most_failing)
            healthy, _ = hooks.register(receiver.url(host="localhost"))
            hooks.completed()
            wait_until(lambda: hooks.deliveries(endpoint_id=healthy, state="delivered"))
            over.set()

    def test_new_origins_of_one_project_that_hang_delay_no_other_project(
        self, hooks: Hooks, receiver: Receiver, settings: Settings
    ) -> None:
        over = threading.Event()

        def lookup(host: str, port: int) -> list[str]:
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no server answered")

        for project in ("hanging", "well"):
            hooks.project_secret(project)
        for number in range(8):
            hooks.add(f"https://{number}.example.com/", project="hanging")
            hooks.complete(hooks.run())
        with SenderThread(settings, lookup=lookup, max_under_way=6, max_per_project=4):
            wait_until(lambda: len(hooks.deliveries(state="delivering")) == 4)
            hooks.add(receiver.url(), project="well")
            hooks.complete(hooks.run())
            wait_until(lambda: hooks.deliveries(project="well", state="delivered"))
            # none of the others has come back meanwhile
            assert (
                sorted(one.state for one in hooks.deliveries(project="hanging")) == ["delivering"] * 4 + ["pending"] * 4
            )
            assert {one.attempts for one in hooks.deliveries(project="hanging")} == {0, 1}
            over.set()

    def test_a_fault_of_our_own_counts_as_an_attempt(self, hooks: Hooks, settings: Settings) -> None:
        def lookup(host: str, port: int) -> list[str]:
            raise ZeroDivisionError

        hooks.register("https://hooks.example.com/")
        hooks.completed()
        with SenderThread(settings, lookup=lookup):
            delivery = hooks.wait_attempts(1)
        assert (delivery.state, delivery.last_error) == ("pending", "internal_error")
        assert 4 <= hooks.seconds_until_next(delivery.id) <= 6

    def test_an_endpoint_has_a_bounded_number_of_requests_under_way(
        self, hooks: Hooks, receiver: Receiver, impatient: Settings
    ) -> None:
        hooks.register(receiver.url())
        receiver.always("/hook", hang)
        for _ in range(9):
            hooks.completed()
        with SenderThread(impatient), SenderThread(impatient):
            wait_until(lambda: len(receiver.received) >= 4)
            assert len(hooks.deliveries(state="delivering")) <= 4
            wait_until(lambda: sum(one.attempts for one in hooks.deliveries()) >= 9)
            assert len(hooks.deliveries(state="delivering")) <= 4


class TestBreaker:
    def test_after_ten_failures_an_endpoint_is_probed_with_one_delivery_until_it_answers(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.always("/hook", reply(500))
        for _ in range(12):
            hooks.completed()
        wait_until(lambda: hooks.endpoint(endpoint_id).failures >= 10)
        wait_until(lambda: not hooks.deliveries(state="delivering"))
        made = len(receiver.received)
        paused = hooks.endpoint(endpoint_id)
        assert paused.open_until is not None
        assert paused.state == "enabled"
        with hooks.engine.connect() as connection:
            assert not connection.execute(deliveries.is_any_due()).scalar_one()
        # the pause is over: one probe, and a longer pause
        hooks.make_due()
        wait_until(lambda: len(receiver.received) == made + 1 and not hooks.deliveries(state="delivering"))
        again = hooks.endpoint(endpoint_id)
        assert again.failures == paused.failures + 1
        assert again.open_until is not None
        receiver.always("/hook", reply(200))
        hooks.make_due()
        wait_until(lambda: hooks.endpoint(endpoint_id).failures == 0)
        hooks.make_due()
        wait_until(lambda: len(hooks.deliveries(state="delivered")) == 12)
        assert hooks.endpoint(endpoint_id).open_until is None

    def test_an_endpoint_that_fails_for_days_is_disabled(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.always("/hook", reply(500))
        hooks.set_endpoint(endpoint_id, failures=20, failing_since=datetime.now(UTC) - timedelta(days=6))
        hooks.completed()
        wait_until(lambda: hooks.endpoint(endpoint_id).state == "disabled")
        assert hooks.endpoint(endpoint_id).disabled_reason == "failing"
        assert hooks.delivery().last_error in ("failing", "http_error")
        wait_until(lambda: hooks.delivery().state == "cancelled")

    def test_a_failure_of_long_ago_does_not_make_an_endpoint_fail_for_days(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.always("/hook", reply(500))
        first = hooks.completed()
        hooks.wait_attempts(1, job_id=first.id)
        # what failed was cancelled with its video, and nothing was to be told since
        hooks.jobs.run(jobs.delete_job(first.id, project="default"))
        hooks.make_due()
        hooks.wait_for("cancelled", job_id=first.id)
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE webhook_endpoints SET failing_since = failing_since - interval '6 days'"))
        for _ in range(10):
            hooks.completed()
        wait_until(lambda: hooks.endpoint(endpoint_id).failures >= 10)
        assert hooks.endpoint(endpoint_id).state == "enabled"

    def test_the_last_attempt_of_the_schedule_fails_the_delivery(
        self, hooks: Hooks, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.register(receiver.url())
        receiver.always("/hook", reply(500))
        hooks.completed()
        for number in range(1, 11):
            delivery = hooks.wait_attempts(number)
            if number < 10:
                assert 0.8 * DELAYS[number - 1] - 1 <= hooks.seconds_until_next(delivery.id)
                assert hooks.seconds_until_next(delivery.id) <= 1.2 * DELAYS[number - 1] + 1
            hooks.make_due()
        assert delivery.state == "failed"
        assert len(receiver.received) == 10
        assert len({one.body for one in receiver.received}) == 1
        assert len({json.loads(one.body)["id"] for one in receiver.received}) == 1
