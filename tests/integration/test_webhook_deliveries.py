"""The log of deliveries as clients read it, and events delivered once more."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from rushes_api.routers import webhook_deliveries
from rushes_core import jobs
from rushes_core.ids import new_delivery_id, new_endpoint_id, new_test_event_id, new_video_id
from rushes_core.settings import Settings
from rushes_core.webhooks import deliveries
from sqlalchemy import text
from support.api import API_KEY, AUTHORIZED, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.receiver import Receiver, reply
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderThread

URL = "https://8.8.8.8/hook"
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return stack.settings(**LOCAL, checkpoint=checkpoint, api_key=API_KEY, webhook_timeout_seconds=30)


@pytest.fixture(scope="module")
def client(settings: Settings) -> Iterator[httpx.Client]:
    with (
        ThreadedApi(settings) as api,
        httpx.Client(base_url=api.url, headers=AUTHORIZED, trust_env=False, timeout=30) as client,
    ):
        yield client


def answered(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    members: dict[str, Any] = answer.json()
    return members


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def listed(client: httpx.Client, query: str = "") -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = answered(client.get(f"/v1/webhook_deliveries{query}"))["data"]
    return data


def replay(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return answered(client.post("/v1/webhook_deliveries/replay", json={"since": LONG_AGO, **body}))


class TestLog:
    def test_every_attempt_is_in_the_log(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.script("/hook", reply(500, b"database\x00down"), reply(200, b"ok"))
        job = hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1)
            hooks.make_due()
            hooks.wait_for("delivered")
        (found,) = listed(client)
        delivery = answered(client.get(f"/v1/webhook_deliveries/{found['id']}"))
        assert delivery["object"] == "webhook_delivery"
        assert delivery["video_id"] == job.id
        assert delivery["webhook_endpoint_id"] == endpoint_id
        assert delivery["event_type"] == "video.completed"
        assert delivery["url"] == receiver.url()
        assert (delivery["status"], delivery["num_attempts"], delivery["last_status_code"]) == ("delivered", 2, 200)
        assert delivery["next_attempt_at"] is None
        first, second = delivery["attempts"]
        assert (first["number"], first["status_code"], first["error"]) == (1, 500, "http_error")
        assert first["excerpt"] == "database down"
        assert (second["number"], second["status_code"], second["error"], second["excerpt"]) == (2, 200, None, "ok")
        assert second["duration_ms"] >= 0

    def test_each_attempt_says_where_it_went_but_for_the_query(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url("/old?key=secret"))
        receiver.script("/old?key=secret", reply(500))
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1)
            moved = client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"url": receiver.url("/new?key=secret")})
            assert moved.status_code == 200, moved.text
            hooks.make_due()
            hooks.wait_for("delivered")
        (found,) = listed(client)
        delivery = answered(client.get(f"/v1/webhook_deliveries/{found['id']}"))
        assert [one["url"] for one in delivery["attempts"]] == [receiver.url("/old"), receiver.url("/new")]
        assert {one.url for one in hooks.attempts(found["id"])} == {receiver.url("/old"), receiver.url("/new")}

    def test_a_waiting_delivery_says_when_it_is_tried_next(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.register(URL)
        hooks.completed()
        (delivery,) = listed(client)
        assert (delivery["status"], delivery["num_attempts"]) == ("pending", 0)
        assert delivery["next_attempt_at"] is not None

    def test_a_jobs_own_url_has_no_endpoint(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.completed(URL + "?job=1")
        (delivery,) = listed(client)
        assert (delivery["webhook_endpoint_id"], delivery["url"]) == (None, URL + "?job=1")
        assert client.get("/v1/webhook_endpoints").json()["data"] == []

    def test_the_log_is_filtered_and_paged(self, hooks: Hooks, client: httpx.Client) -> None:
        one, _ = hooks.register(URL)
        two, _ = hooks.register(URL)
        made = [hooks.completed() for _ in range(3)]
        assert len(listed(client)) == 6
        assert {d["video_id"] for d in listed(client, f"?video_id={made[1].id}")} == {made[1].id}
        assert {d["webhook_endpoint_id"] for d in listed(client, f"?webhook_endpoint_id={two}")} == {two}
        assert listed(client, "?status=delivered") == []
        assert len(listed(client, f"?status=pending&webhook_endpoint_id={one}")) == 3
        seen: list[str] = []
        query = "?limit=4"
        while True:
            page = answered(client.get(f"/v1/webhook_deliveries{query}"))
            seen += [d["id"] for d in page["data"]]
            if not page["has_more"]:
                break
            query = f"?limit=4&after={page['last_id']}"
        assert seen == sorted(seen, reverse=True)
        assert len(seen) == 6

    @pytest.mark.parametrize(
        "query", ["status=sent", "video_id=x", "webhook_endpoint_id=x", "after=x", "after=whd_1", "type=x"]
    )
    def test_a_wrong_filter_is_named(self, client: httpx.Client, query: str) -> None:
        error = refused(client.get(f"/v1/webhook_deliveries?{query}"), 400)
        assert error["param"] == query.partition("=")[0]

    def test_other_projects_see_nothing(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.register(URL)
        hooks.completed()
        (delivery,) = listed(client)
        client.post("/v1/projects", json={"name": "other"})
        body = {"name": "o", "project": "other", "scopes": ["webhooks"]}
        headers = {"Authorization": f"Bearer {answered(client.post('/v1/api_keys', json=body))['secret']}"}
        assert answered(client.get("/v1/webhook_deliveries", headers=headers))["data"] == []
        path = f"/v1/webhook_deliveries/{delivery['id']}"
        assert refused(client.get(path, headers=headers), 404)["code"] == "webhook_delivery_not_found"
        refused(client.post(f"{path}/redeliver", headers=headers), 404)
        body = {"since": LONG_AGO}
        assert answered(client.post("/v1/webhook_deliveries/replay", json=body, headers=headers))["count"] == 0
        assert len(hooks.deliveries()) == 1


class TestRedeliver:
    def test_an_event_is_delivered_again_under_its_own_id(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        hooks.register(receiver.url())
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_for("delivered")
            (first,) = listed(client)
            again = answered(client.post(f"/v1/webhook_deliveries/{first['id']}/redeliver"))
            hooks.wait_for("delivered", id=again["id"])
        assert (again["kind"], again["event_id"]) == ("redelivery", first["event_id"])
        assert again["id"] != first["id"]
        one, two = receiver.received
        assert (one.event_id, one.body) == (two.event_id, two.body)

    def test_it_takes_effect_once_with_an_idempotency_key(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.register(URL)
        hooks.completed()
        (first,) = listed(client)
        path, headers = f"/v1/webhook_deliveries/{first['id']}/redeliver", {"Idempotency-Key": new_delivery_id()}
        a, b = (client.post(path, headers=headers) for _ in range(2))
        assert answered(a) == answered(b)
        assert b.headers["idempotent-replayed"] == "true"
        assert len(hooks.deliveries()) == 2

    def test_nothing_is_sent_to_an_endpoint_that_is_off(self, hooks: Hooks, client: httpx.Client) -> None:
        endpoint_id, _ = hooks.register(URL)
        hooks.completed()
        (first,) = listed(client)
        answered(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"enabled": False}))
        assert refused(client.post(f"/v1/webhook_deliveries/{first['id']}/redeliver"), 409)["code"] == "invalid_state"
        answered(client.delete(f"/v1/webhook_endpoints/{endpoint_id}"))
        refused(client.post(f"/v1/webhook_deliveries/{first['id']}/redeliver"), 409)

    def test_an_event_of_a_deleted_video_stays_untold(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.register(URL)
        job = hooks.completed()
        hooks.jobs.run(jobs.delete_job(job.id, project="default"))
        (first,) = listed(client)
        refused(client.post(f"/v1/webhook_deliveries/{first['id']}/redeliver"), 409)

    @pytest.mark.parametrize("delivery_id", [new_delivery_id(), "whd_x", "x"])
    def test_what_is_not_there_is_not_found(self, client: httpx.Client, delivery_id: str) -> None:
        refused(client.get(f"/v1/webhook_deliveries/{delivery_id}"), 404)
        refused(client.post(f"/v1/webhook_deliveries/{delivery_id}/redeliver"), 404)


class TestReplay:
    def test_everything_since_a_time_is_told_again_to_who_is_registered_now(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        before = hooks.completed()
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE outbox SET created_at = created_at - interval '1 hour'"))
        wanted = [hooks.completed().id for _ in range(3)]
        endpoint_id, _ = hooks.register(receiver.url())
        since = (datetime.now(UTC) - timedelta(minutes=30)).isoformat()
        made = replay(client, since=since)
        assert (made["count"], made["has_more"], made["next_since"]) == (3, False, None)
        assert replay(client, since=since)["count"] == 0, "what waits is not made twice"
        assert sorted(one.job_id or "" for one in hooks.deliveries()) == sorted(wanted)
        with SenderThread(settings):
            wait_until(lambda: len(hooks.deliveries(state="delivered")) == 3)
        assert replay(client, since=since, webhook_endpoint_id=endpoint_id)["count"] == 3
        assert before.id not in [one.job_id for one in hooks.deliveries()]
        assert replay(client)["count"] == 1
        assert hooks.deliveries(job_id=before.id)[0].kind == "replay"

    def test_types_times_and_endpoint_narrow_it(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.completed()
        hooks.add()
        hooks.fail(hooks.run())
        one, _ = hooks.register(URL)
        hooks.register(URL)
        assert replay(client, until="2020-01-02T00:00:00Z")["count"] == 0
        assert replay(client, webhook_endpoint_id=one, event_types=["video.failed"])["count"] == 1
        assert [(d.endpoint_id, d.type, d.kind) for d in hooks.deliveries()] == [(one, "video.failed", "replay")]
        assert replay(client)["count"] == 3

    def test_a_jobs_own_url_is_told_again_too(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.completed(URL)
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE webhook_deliveries SET state = 'failed', finished_at = now()"))
        assert replay(client)["count"] == 1
        assert hooks.deliveries()[-1].url == URL

    def test_it_goes_on_past_events_of_the_same_moment_that_were_told_meanwhile(
        self, hooks: Hooks, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhook_deliveries, "MAX_REPLAYED", 2)
        wanted = [hooks.completed().id for _ in range(5)]
        with hooks.engine.begin() as connection:
            # all in one transaction, as when a campaign is cancelled; the last one after it
            connection.execute(
                text("UPDATE outbox SET created_at = created_at - interval '1 hour' WHERE job_id <> :last"),
                {"last": wanted[-1]},
            )
            connection.execute(
                text("UPDATE outbox SET created_at = (SELECT min(created_at) FROM outbox) WHERE job_id <> :last"),
                {"last": wanted[-1]},
            )
        hooks.register(URL)
        since, pages = LONG_AGO, 0
        while since is not None and pages < 5:
            since = replay(client, since=since)["next_since"]
            pages += 1
            with hooks.engine.begin() as connection:
                connection.execute(text("UPDATE webhook_deliveries SET state = 'delivered', finished_at = now()"))
        assert since is None
        assert sorted(one.job_id or "" for one in hooks.deliveries()) == sorted(wanted)

    def test_deleted_videos_and_endpoints_that_are_off_are_left_out(self, hooks: Hooks, client: httpx.Client) -> None:
        gone = hooks.completed()
        hooks.jobs.run(jobs.delete_job(gone.id, project="default"))
        hooks.completed()
        endpoint_id, _ = hooks.register(URL)
        assert replay(client)["count"] == 1
        hooks.clear()
        hooks.completed()
        endpoint_id, _ = hooks.register(URL)
        answered(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"enabled": False}))
        assert replay(client)["count"] == 0
        body = {"since": LONG_AGO, "webhook_endpoint_id": endpoint_id}
        refused(client.post("/v1/webhook_deliveries/replay", json=body), 409)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "since"),
            ({"since": "yesterday"}, "since"),
            ({"since": "2999-01-01T00:00:00Z"}, "since"),
            ({"since": LONG_AGO, "until": LONG_AGO}, "since"),
            ({"since": LONG_AGO, "event_types": ["x"]}, "event_types"),
            ({"since": LONG_AGO, "everything": True}, "everything"),
        ],
    )
    def test_a_wrong_field_is_named(self, client: httpx.Client, body: dict[str, Any], param: str) -> None:
        assert refused(client.post("/v1/webhook_deliveries/replay", json=body), 400)["param"] == param

    def test_an_unknown_endpoint_is_not_found(self, client: httpx.Client) -> None:
        for endpoint_id in (new_endpoint_id(), new_video_id()):
            body = {"since": LONG_AGO, "webhook_endpoint_id": endpoint_id}
            refused(client.post("/v1/webhook_deliveries/replay", json=body), 404)


class TestSwitchedOff:
    def test_a_disabled_endpoint_gets_no_more_calls_and_can_be_enabled_again(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())
        receiver.script("/hook", reply(500))
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1)
            off = answered(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"enabled": False}))
            assert (off["enabled"], off["disabled_reason"]) == (False, "request")
            assert hooks.delivery().state == "cancelled"
            hooks.completed()
            assert len(hooks.deliveries()) == 1
            on = answered(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"enabled": True}))
            assert (on["enabled"], on["disabled_reason"], on["consecutive_failures"]) == (True, None, 0)
            job = hooks.completed()
            hooks.wait_for("delivered", job_id=job.id)
        assert len(receiver.received) == 2

    def test_what_was_under_way_when_its_endpoint_was_deleted_is_not_tried_again(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url())

        def delete_and_fail(connection: Any, received: Any) -> None:
            client.delete(f"/v1/webhook_endpoints/{endpoint_id}")
            reply(500)(connection, received)

        receiver.always("/hook", delete_and_fail)
        hooks.completed()
        with SenderThread(settings):
            hooks.wait_attempts(1)
            hooks.make_due()
        # it tidies when it starts, and every minute
        with SenderThread(settings):
            assert hooks.wait_for("cancelled").last_error == "endpoint_deleted"
        assert len(receiver.received) == 1
        assert hooks.endpoint(endpoint_id).secret == b""

    def test_a_test_that_came_just_after_its_endpoint_was_deleted_does_not_wait_for_ever(
        self, hooks: Hooks, client: httpx.Client, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(URL)
        found = hooks.endpoint(endpoint_id)
        answered(client.delete(f"/v1/webhook_endpoints/{endpoint_id}"))
        made = deliveries.test(found, new_id=new_delivery_id(), event_id=new_test_event_id(), type="video.completed")
        hooks.jobs.run(made)
        with SenderThread(settings):
            assert hooks.wait_for("cancelled").last_error == "endpoint_deleted"

    def test_that_another_url_is_gone_does_not_disable_an_endpoint_that_has_moved(
        self, hooks: Hooks, client: httpx.Client, receiver: Receiver, settings: Settings
    ) -> None:
        endpoint_id, _ = hooks.register(receiver.url("/old"))

        def move_and_be_gone(connection: Any, received: Any) -> None:
            answered(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"url": receiver.url("/new")}))
            reply(410)(connection, received)

        receiver.script("/old", move_and_be_gone)
        first = hooks.completed()
        with SenderThread(settings):
            assert hooks.wait_attempts(1, job_id=first.id).last_error == "gone"
            second = hooks.completed()
            wait_until(lambda: hooks.deliveries(job_id=second.id, state="delivered"))
        assert hooks.endpoint(endpoint_id).state == "enabled"
        assert [one.path for one in receiver.received] == ["/old", "/new"]
