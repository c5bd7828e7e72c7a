"""OpenAI's webhook endpoints as its SDK calls them, and the secret of jobs' own `webhook_url`s."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from rushes_api.routers import webhook_endpoints
from rushes_api.webhooks import LOOKUP_THREADS, MAX_PROJECT_LOOKUPS, Webhooks
from rushes_core.errors import InvalidRequest
from rushes_core.settings import Settings
from rushes_core.webhooks.events import EVENT_TYPES
from standardwebhooks import Webhook
from support.api import API_KEY, AUTHORIZED, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.receiver import Receiver, reply
from support.stack import SharedStack
from support.webhooks import ED25519_KEY, LOCAL, Hooks, SenderThread

URL = "https://8.8.8.8/hook"


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return stack.settings(
        **LOCAL,
        checkpoint=checkpoint,
        api_key=API_KEY,
        webhook_ed25519_key=ED25519_KEY,
        webhook_timeout_seconds=30,
    )


@pytest.fixture(scope="module")
def api(settings: Settings) -> Iterator[ThreadedApi]:
    with ThreadedApi(settings) as api:
        yield api


def connected(api: ThreadedApi) -> httpx.Client:
    return httpx.Client(base_url=api.url, headers=AUTHORIZED, trust_env=False, timeout=30)


@pytest.fixture(scope="module")
def client(api: ThreadedApi) -> Iterator[httpx.Client]:
    with connected(api) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(api: ThreadedApi) -> OpenAI:
    return OpenAI(base_url=f"{api.url}/v1", api_key=API_KEY, max_retries=0)


def posted(client: httpx.Client, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    members: dict[str, Any] = answer.json()
    return members


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


class TestSdk:
    def test_an_endpoint_is_made_listed_changed_and_deleted(self, hooks: Hooks, sdk: OpenAI) -> None:
        made = sdk.webhooks.create(name="payments", url=URL, event_types=["video.completed", "video.failed"])
        assert made.object == "webhook_endpoint"
        assert made.signing_secret.startswith("whsec_")
        assert made.signing_secret_hint is not None
        assert made.signing_secret_hint.endswith(made.signing_secret.rstrip("=")[-4:])
        assert (made.name, made.url) == ("payments", URL)
        found = sdk.webhooks.retrieve(made.id)
        assert found.event_types == ["video.completed", "video.failed"]
        assert made.signing_secret not in found.model_dump_json()
        changed = sdk.webhooks.update(made.id, name="other", event_types=["video.failed"])
        assert (changed.name, changed.url, changed.event_types) == ("other", URL, ["video.failed"])
        assert [one.id for one in sdk.webhooks.list()] == [made.id]
        gone = sdk.webhooks.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "webhook_endpoint.deleted")
        assert sdk.webhooks.delete(made.id).deleted
        assert list(sdk.webhooks.list()) == []
        with pytest.raises(openai.NotFoundError) as missing:
            sdk.webhooks.retrieve(made.id)
        assert missing.value.code == "webhook_endpoint_not_found"

    def test_an_update_that_changes_nothing_does_not_count_as_one(
        self, hooks: Hooks, sdk: OpenAI, client: httpx.Client
    ) -> None:
        made = sdk.webhooks.create(name="same", url=URL, event_types=["video.completed"])
        before = hooks.endpoint(made.id).updated_at
        for changes in ({}, {"name": "same"}, {"enabled": True}, {"url": None}):
            assert posted(client, f"/v1/webhook_endpoints/{made.id}", changes)["name"] == "same"
        assert hooks.endpoint(made.id).updated_at == before
        sdk.webhooks.update(made.id, name="other")
        assert hooks.endpoint(made.id).updated_at > before

    def test_a_list_goes_on_page_by_page(self, hooks: Hooks, sdk: OpenAI) -> None:
        ids = [hooks.register(URL)[0] for _ in range(3)]
        assert [one.id for one in sdk.webhooks.list(limit=2)] == sorted(ids, reverse=True)

    def test_event_types_are_those_that_happen_here(self, sdk: OpenAI) -> None:
        assert sdk.webhooks.event_types.list().data == list(EVENT_TYPES)

    def test_a_test_event_is_sent_verified_and_its_status_told(
        self, hooks: Hooks, sdk: OpenAI, settings: Settings
    ) -> None:
        with Receiver() as receiver, SenderThread(settings):
            made = sdk.webhooks.create(name="t", url=receiver.url(), event_types=["video.completed"])
            receiver.script("/hook", reply(503, retry_after="1"), reply(202))
            first = sdk.webhooks.test(made.id, event_type="video.failed")
            second = sdk.webhooks.test(made.id, event_type="video.completed")
        assert (first.status_code, first.event_type, first.object) == (503, "video.failed", "webhook_endpoint.test")
        assert (second.status_code, second.success, second.webhook_endpoint_id) == (202, True, made.id)
        assert len(receiver.received) == 2
        event = OpenAI(api_key="none").webhooks.unwrap(
            receiver.received[1].body, receiver.received[1].headers, secret=made.signing_secret
        )
        assert event.id.startswith("evt_test_")

    def test_a_test_that_is_not_answered_says_why(self, hooks: Hooks, sdk: OpenAI, settings: Settings) -> None:
        with Receiver() as receiver:
            url = receiver.url()
        made = sdk.webhooks.create(name="t", url=url, event_types=["video.completed"])
        with SenderThread(settings), pytest.raises(openai.BadRequestError) as failed:
            sdk.webhooks.test(made.id, event_type="video.completed")
        assert failed.value.code == "webhook_test_failed"
        assert "connect_failed" in str(failed.value)

    def test_a_test_that_nobody_took_in_time_is_not_sent_later(
        self, hooks: Hooks, sdk: OpenAI, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(webhook_endpoints, "TEST_SECONDS", 0.3)
        with Receiver() as receiver:
            made = sdk.webhooks.create(name="t", url=receiver.url(), event_types=["video.completed"])
            with pytest.raises(openai.InternalServerError) as failed:
                sdk.webhooks.test(made.id, event_type="video.completed")
            assert failed.value.code == "sender_unavailable"
            job = hooks.completed()
            with SenderThread(settings):
                hooks.wait_for("delivered", job_id=job.id)
            (received,) = receiver.received
        assert not received.event_id.startswith("evt_test_")
        taken = hooks.delivery(kind="test")
        assert (taken.state, taken.last_error, taken.attempts) == ("cancelled", "sender_unavailable", 0)

    def test_rotation_keeps_the_old_secret_only_when_asked(self, hooks: Hooks, sdk: OpenAI, settings: Settings) -> None:
        with Receiver() as receiver, SenderThread(settings):
            made = sdk.webhooks.create(name="t", url=receiver.url(), event_types=["video.completed"])
            kept = sdk.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
            sdk.webhooks.test(made.id, event_type="video.completed")
            alone = sdk.webhooks.rotate_secret(made.id)
            sdk.webhooks.test(made.id, event_type="video.completed")
        both, one = receiver.received
        assert len({made.signing_secret, kept.signing_secret, alone.signing_secret}) == 3
        for secret in (made.signing_secret, kept.signing_secret):
            Webhook(secret).verify(both.body, both.signed)
        assert both.headers["webhook-signature"].count("v1,") == 2
        Webhook(alone.signing_secret).verify(one.body, one.signed)
        assert one.headers["webhook-signature"].count("v1,") == 1
        with pytest.raises(openai.InvalidWebhookSignatureError):
            sdk.webhooks.unwrap(one.body, one.headers, secret=kept.signing_secret)

    def test_an_old_secret_stops_signing_after_its_day(self, hooks: Hooks, sdk: OpenAI, settings: Settings) -> None:
        with Receiver() as receiver, SenderThread(settings):
            made = sdk.webhooks.create(name="t", url=receiver.url(), event_types=["video.completed"])
            sdk.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
            hooks.set_endpoint(made.id, previous_until=datetime.now(UTC) - timedelta(seconds=1))
            sdk.webhooks.test(made.id, event_type="video.completed")
        assert receiver.received[0].headers["webhook-signature"].count("v1,") == 1


class TestRefusals:
    @pytest.mark.parametrize(
        "url",
        [
            "http://169.254.169.254/",
            "http://2130706433/",
            "https://10.0.0.5/",
            "http://user:pw@10.0.0.5/",
            "ftp://h/",
            "http://h:6379/",
            "https://hooks.example.com:6379/",
        ],
    )
    def test_a_url_that_leads_inside_is_refused_wherever_it_is_given(
        self, hooks: Hooks, client: httpx.Client, url: str
    ) -> None:
        endpoint_id, _ = hooks.register(URL)
        hooks.project_secret()
        body = {"name": "x", "url": url, "event_types": ["video.completed"]}
        assert refused(client.post("/v1/webhook_endpoints", json=body))["param"] == "url"
        assert refused(client.post(f"/v1/webhook_endpoints/{endpoint_id}", json={"url": url}))["param"] == "url"
        for name in ("webhook_url", "callback_url"):
            error = refused(client.post("/v1/videos", json={"prompt": "a dog", name: url}))
            assert error["param"] == name
        assert hooks.endpoint(endpoint_id).url == URL

    @pytest.mark.parametrize(
        ("body", "param", "problem"),
        [
            ({"url": URL, "event_types": ["video.completed"]}, "name", "required"),
            ({"name": "", "url": URL, "event_types": ["video.completed"]}, "name", "not blank"),
            ({"name": "x", "event_types": ["video.completed"]}, "url", "required"),
            ({"name": "x", "url": URL}, "event_types", "required"),
            ({"name": "x", "url": URL, "event_types": []}, "event_types", "one or more of"),
            ({"name": "x", "url": URL, "event_types": ["batch.started"]}, "event_types", "batch.started"),
            ({"name": "x", "url": 7, "event_types": ["video.completed"]}, "url", "string"),
            ({"name": "x", "url": URL, "event_types": ["video.completed"], "secret": "s"}, "secret", "unknown"),
        ],
    )
    def test_a_wrong_field_is_named(
        self, hooks: Hooks, client: httpx.Client, body: dict[str, Any], param: str, problem: str
    ) -> None:
        error = refused(client.post("/v1/webhook_endpoints", json=body))
        assert error["param"] == param
        assert problem in error["message"]

    def test_a_project_has_a_bounded_number_of_endpoints(self, hooks: Hooks, client: httpx.Client) -> None:
        for _ in range(50):
            hooks.register(URL)
        body = {"name": "x", "url": URL, "event_types": ["video.completed"]}
        error = refused(client.post("/v1/webhook_endpoints", json=body))
        assert error["code"] == "too_many_webhook_endpoints"
        assert "50" in error["message"]

    def test_an_unknown_event_cannot_be_tested(self, hooks: Hooks, client: httpx.Client) -> None:
        endpoint_id, _ = hooks.register(URL)
        error = refused(client.post(f"/v1/webhook_endpoints/{endpoint_id}/test", json={"event_type": "x"}))
        assert error["param"] == "event_type"

    def test_a_secret_is_not_kept_for_an_idempotency_key(self, hooks: Hooks, client: httpx.Client) -> None:
        body = {"name": "x", "url": URL, "event_types": ["video.completed"]}
        headers = {"Idempotency-Key": "k"}
        refused(client.post("/v1/webhook_endpoints", json=body, headers=headers))

    def test_another_project_sees_nothing(self, hooks: Hooks, client: httpx.Client, api: ThreadedApi) -> None:
        endpoint_id, _ = hooks.register(URL)
        client.post("/v1/projects", json={"name": "other"})
        other = posted(client, "/v1/api_keys", {"name": "o", "project": "other", "scopes": ["webhooks"]})
        headers = {"Authorization": f"Bearer {other['secret']}"}
        assert client.get("/v1/webhook_endpoints", headers=headers).json()["data"] == []
        for method, path in (
            ("GET", f"/v1/webhook_endpoints/{endpoint_id}"),
            ("POST", f"/v1/webhook_endpoints/{endpoint_id}"),
            ("DELETE", f"/v1/webhook_endpoints/{endpoint_id}"),
            ("POST", f"/v1/webhook_endpoints/{endpoint_id}/rotate_secret"),
        ):
            refused(client.request(method, path, headers=headers), 404)
        body = {"event_type": "video.completed"}
        refused(client.post(f"/v1/webhook_endpoints/{endpoint_id}/test", json=body, headers=headers), 404)
        assert hooks.endpoint(endpoint_id).state == "enabled"

    def test_webhooks_need_their_own_scope(self, hooks: Hooks, client: httpx.Client) -> None:
        key = posted(client, "/v1/api_keys", {"name": "v", "scopes": ["videos:read", "videos:write"]})
        headers = {"Authorization": f"Bearer {key['secret']}"}
        for path in ("/v1/webhook_endpoints", "/v1/webhook_deliveries", "/v1/webhook_secret"):
            assert refused(client.get(path, headers=headers), 403)["code"] == "insufficient_scope"


class TestJobsOwnUrl:
    def test_a_job_needs_the_projects_secret(self, hooks: Hooks, client: httpx.Client) -> None:
        refused(client.get("/v1/webhook_secret"), 404)
        error = refused(client.post("/v1/videos", json={"prompt": "a dog", "webhook_url": URL}))
        assert (error["param"], error["code"]) == ("webhook_url", "webhook_secret_missing")
        secret = posted(client, "/v1/webhook_secret/rotate")
        assert secret["signing_secret"].startswith("whsec_")
        shown = client.get("/v1/webhook_secret").json()
        assert shown["signing_secret_hint"] == secret["signing_secret_hint"]
        assert "signing_secret" not in shown
        video = posted(client, "/v1/videos", {"prompt": "a dog", "webhook_url": URL})
        assert video["webhook"] == {"state": "pending", "attempts": 0, "last_status": None}

    def test_it_is_pending_only_while_an_end_is_to_be_told(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.project_secret()
        states = {}
        for event in ("video.started", "video.cancelled", "video.failed"):
            body = {"prompt": "a dog", "webhook_url": URL, "webhook_events": [event]}
            video = posted(client, "/v1/videos", body)
            ended = posted(client, f"/v1/videos/{video['id']}/cancel")
            states[event] = (video["webhook"]["state"], ended["webhook"]["state"])
        assert states == {
            "video.started": ("none", "none"),
            "video.cancelled": ("pending", "pending"),
            "video.failed": ("pending", "none"),
        }

    def test_a_remix_is_told_where_its_source_was(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.project_secret()
        body = {"prompt": "a dog", "webhook_url": URL, "webhook_events": ["video.completed"]}
        source = posted(client, "/v1/videos", body)
        remixed = posted(client, f"/v1/videos/{source['id']}/remix", {"prompt": "a cat"})
        hooks_of = [hooks.jobs.read(one["id"]).request["webhook"] for one in (source, remixed)]
        assert hooks_of[0] == hooks_of[1]
        assert remixed["webhook"]["state"] == "pending"

    def test_a_job_without_a_url_has_none(self, hooks: Hooks, client: httpx.Client) -> None:
        video = posted(client, "/v1/videos", {"prompt": "a dog"})
        assert video["webhook"] == {"state": "none", "attempts": 0, "last_status": None}

    def test_rotation_can_keep_the_old_secret(self, hooks: Hooks, client: httpx.Client) -> None:
        first = posted(client, "/v1/webhook_secret/rotate")
        second = posted(client, "/v1/webhook_secret/rotate", {"keep_old_secret_active_for_24_hours": True})
        assert first["previous_secret_until"] is None
        assert second["previous_secret_until"] is not None
        assert first["signing_secret"] != second["signing_secret"]
        assert posted(client, "/v1/webhook_secret/rotate")["previous_secret_until"] is None

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"webhook_url": URL, "callback_url": "https://8.8.4.4/"}, "callback_url"),
            ({"webhook_events": ["video.completed"]}, "webhook_events"),
            ({"webhook_url": URL, "webhook_events": ["batch.completed"]}, "webhook_events"),
            ({"webhook_url": URL, "webhook_events": []}, "webhook_events"),
            ({"webhook_url": ""}, "webhook_url"),
            ({"webhook_url": ["x"]}, "webhook_url"),
        ],
    )
    def test_a_wrong_field_is_named(
        self, hooks: Hooks, client: httpx.Client, fields: dict[str, Any], param: str
    ) -> None:
        hooks.project_secret()
        assert refused(client.post("/v1/videos", json={"prompt": "a dog", **fields}))["param"] == param

    def test_a_form_may_say_it_too(self, hooks: Hooks, client: httpx.Client) -> None:
        hooks.project_secret()
        form = {"prompt": "a dog", "callback_url": URL, "webhook_events[]": ["video.failed", "video.started"]}
        answer = client.post("/v1/videos", data=form)
        assert answer.status_code == 200, answer.text
        hook = hooks.jobs.read(answer.json()["id"]).request["webhook"]
        assert (hook["url"], hook["events"]) == (URL, ["video.failed", "video.started"])

    def test_a_name_that_leads_inside_is_refused(self, hooks: Hooks, client: httpx.Client, api: ThreadedApi) -> None:
        hooks.project_secret()
        error = refused(client.post("/v1/videos", json={"prompt": "a dog", "webhook_url": "https://intranet/"}))
        assert error["param"] == "webhook_url"


def test_public_keys_are_served_without_a_key(api: ThreadedApi) -> None:
    answer = httpx.get(f"{api.url}/.well-known/jwks.json", trust_env=False, timeout=60)
    assert answer.status_code == 200
    (key,) = answer.json()["keys"]
    assert (key["kty"], key["crv"], key["alg"]) == ("OKP", "Ed25519", "EdDSA")
    assert "d" not in key


def test_without_a_key_for_secrets_webhooks_are_refused_and_the_rest_works(
    stack: SharedStack, settings: Settings
) -> None:
    bare = stack.settings(checkpoint=settings.checkpoint, api_key=API_KEY)
    with ThreadedApi(bare) as api, connected(api) as client:
        body = {"name": "x", "url": URL, "event_types": ["video.completed"]}
        for path, sent in (
            ("/v1/webhook_endpoints", body),
            ("/v1/webhook_secret/rotate", {}),
            ("/v1/videos", {"prompt": "a dog", "webhook_url": URL}),
        ):
            error = refused(client.post(path, json=sent))
            assert error["code"] == "webhooks_not_configured"
            assert "RUSHES_WEBHOOK_KEY" in error["message"]
        assert client.post("/v1/videos", json={"prompt": "a dog"}).status_code == 200
        assert client.get("/.well-known/jwks.json").json() == {"keys": []}


def test_strictly_a_jobs_url_must_be_at_a_registered_origin(stack: SharedStack, settings: Settings) -> None:
    strict = stack.settings(**LOCAL, checkpoint=settings.checkpoint, api_key=API_KEY, webhook_strict=True)
    hooks = Hooks(strict)
    hooks.project_secret()
    hooks.register("https://8.8.8.8/other")
    with ThreadedApi(strict) as api, connected(api) as client:
        posted(client, "/v1/videos", {"prompt": "a dog", "webhook_url": "https://8.8.8.8:443/job"})
        for url in ("https://8.8.4.4/other", "https://8.8.8.8:8443/other"):
            error = refused(client.post("/v1/videos", json={"prompt": "a dog", "webhook_url": url}))
            assert "origin of a registered endpoint" in error["message"]
    hooks.close()


def test_silent_names_of_one_project_delay_no_look_up_of_another(settings: Settings) -> None:
    asked: list[str] = []
    over = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        if host == "unknown.example.com":
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        asked.append(host)
        over.wait(60)
        return ["8.8.8.8"]

    async def check() -> None:
        webhooks = Webhooks(settings, lookup=lookup)
        urls = [f"https://{number}.example.com/" for number in range(LOOKUP_THREADS + 1)]
        # given up after a while: each attempt asks again
        targets = await asyncio.gather(*(webhooks.target(url, project="silent") for url in urls))
        assert [one.url for one in targets] == urls
        assert len(asked) == MAX_PROJECT_LOOKUPS
        # its threads are still taken: a name that was not looked up would be let through
        with pytest.raises(InvalidRequest, match="a host that exists"):
            await webhooks.target("https://unknown.example.com/", project="well")
        over.set()
        while True:
            try:
                await webhooks.target("https://unknown.example.com/", project="silent")
            except InvalidRequest:
                break
        webhooks.close()

    asyncio.run(check())
