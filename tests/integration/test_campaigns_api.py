"""Campaigns over HTTP: how they are sent, changed, shown, fetched and deleted."""

import csv
import gzip
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_api.app import create_app
from rushes_core.campaigns import statements
from rushes_core.models import ApiKeyUsage, File, Job
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore, file_key
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, JobDriver
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.keys import bearer, create_key, create_project
from support.plans import generic_plan, scans
from support.stack import SharedStack
from support.waiting import wait_until

LINES = jsonl(*(openai_line(number) for number in range(1, 4)))
CLIP = bytes(range(256)) * 50


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("campaigns"))
    return stack.settings(
        checkpoint=checkpoint,
        api_key=API_KEY,
        files_max_bytes=1_000_000,
        webhook_key="A" * 43 + "=",
        webhook_loopback=True,
    )


@pytest.fixture(scope="module")
def client(api_settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
        yield client


@pytest.fixture(scope="module")
def shared(api_settings: Settings) -> Iterator[Campaigns]:
    campaigns = Campaigns(api_settings)
    yield campaigns
    campaigns.close()


@pytest.fixture
def campaigns(shared: Campaigns) -> Campaigns:
    shared.clear()
    return shared


def upload(client: TestClient, data: bytes = LINES, name: str = "lines.jsonl", **more: Any) -> str:
    response = client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "batch"}, **more)
    assert response.status_code == 200, response.text
    file_id: str = response.json()["id"]
    return file_id


def made(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def send(client: TestClient, data: bytes = LINES, **options: Any) -> dict[str, Any]:
    return made(client.post("/v1/campaigns", json={"input_file_id": upload(client, data), **options}))


def refused(response: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    return error


def get(client: TestClient, campaign_id: str) -> dict[str, Any]:
    return made(client.get(f"/v1/campaigns/{campaign_id}"))


def prompts(campaigns: Campaigns, campaign_id: str) -> list[str]:
    return [job.prompt for job in campaigns.items(campaign_id)]


class TestSending:
    def test_a_batch_as_openai_has_it(self, client: TestClient, campaigns: Campaigns) -> None:
        body = {"input_file_id": upload(client), "endpoint": "/v1/videos", "completion_window": "24h"}
        batch = made(client.post("/v1/batches", json=body | {"metadata": {"client": "acme"}}))
        assert batch["object"] == "batch"
        assert (batch["status"], batch["completion_window"], batch["endpoint"]) == ("validating", "24h", "/v1/videos")
        assert (batch["input_file_id"], batch["metadata"]) == (body["input_file_id"], {"client": "acme"})
        assert batch["expires_at"] - batch["created_at"] == 86_400
        assert (batch["priority"], batch["request_counts"]["total"]) == ("bulk", 0)
        campaigns.load()
        batch = made(client.get(f"/v1/batches/{batch['id']}"))
        assert batch["status"] == "in_progress"
        assert batch["request_counts"] == {
            "total": 3,
            "completed": 0,
            "failed": 0,
            "queued": 3,
            "in_progress": 0,
            "cancelled": 0,
            "expired": 0,
            "invalid": 0,
        }
        assert get(client, batch["id"]) == batch

    @pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
    def test_what_openai_requires_is_required_of_batches(
        self, client: TestClient, campaigns: Campaigns, name: str
    ) -> None:
        body = {"input_file_id": upload(client), "endpoint": "/v1/videos", "completion_window": "24h"}
        del body[name]
        refused(client.post("/v1/batches", json=body), 400, "missing_required_parameter", name)

    def test_lines_in_the_body(self, client: TestClient, campaigns: Campaigns) -> None:
        body = {"requests": [{"prompt": "a dog"}, {"prompt": "a cat", "custom_id": "c"}], "defaults": {"seconds": 5}}
        campaign = made(client.post("/v1/campaigns", json=body))
        campaigns.load()
        assert prompts(campaigns, campaign["id"]) == ["a dog", "a cat"]
        assert [job.custom_id for job in campaigns.items(campaign["id"])] == [None, "c"]
        assert {job.request["seconds"] for job in campaigns.items(campaign["id"])} == {"5"}

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(
        ("media_type", "data"),
        [
            ("application/jsonl", jsonl({"prompt": "a dog"}, {"prompt": "a cat"})),
            ("application/x-ndjson", jsonl({"prompt": "a dog"}, {"prompt": "a cat"})),
            ("text/csv", "\ufeffprompt;seed\r\na dog;1\r\na cat;2\r\n".encode()),
            ("text/csv; charset=utf-8", b"prompt,seed\na dog,1\na cat,2\n"),
        ],
    )
    def test_the_file_as_the_body(
        self, client: TestClient, campaigns: Campaigns, media_type: str, data: bytes, packed: bool
    ) -> None:
        headers = {"Content-Type": media_type} | ({"Content-Encoding": "gzip"} if packed else {})
        query = "name=Night&max_parallel=3&metadata[client]=acme&budget[gpu_seconds]=9.5&window[timezone]=UTC"
        query += "&window[start]=22:00&window[end]=06:00&window[days]=mo,fr&proof[count]=2&start_paused=true"
        response = client.post(
            f"/v1/campaigns?{query}", content=gzip.compress(data) if packed else data, headers=headers
        )
        campaign = made(response)
        assert (campaign["name"], campaign["max_parallel"], campaign["metadata"]) == ("Night", 3, {"client": "acme"})
        assert campaign["window"]["days"] == ["mo", "fr"]
        assert (campaign["budget"]["gpu_seconds"], campaign["proof"]["count"]) == (9.5, 2)
        assert (campaign["paused"], campaign["hold_reason"]) == (True, "paused")
        campaigns.load()
        assert prompts(campaigns, campaign["id"]) == ["a dog", "a cat"]

    def test_a_form_with_the_file(self, client: TestClient, campaigns: Campaigns) -> None:
        fields = {"name": "Night", "priority": "normal", "defaults": '{"seconds": 6}', "proof[count]": "1"}
        response = client.post("/v1/campaigns", files={"file": ("夜.csv", b"prompt\na dog\n")}, data=fields)
        campaign = made(response)
        assert (campaign["name"], campaign["priority"], campaign["defaults"]) == ("Night", "normal", {"seconds": 6})
        campaigns.load()
        assert prompts(campaigns, campaign["id"]) == ["a dog"]
        assert made(client.get(f"/v1/files/{campaign['input_file_id']}"))["filename"] == "夜.csv"

    @pytest.mark.parametrize(
        ("options", "code", "param"),
        [
            ({"nmae": "x"}, "unknown_parameter", "nmae"),
            ({"endpoint": "/v1/chat/completions"}, "invalid_value", "endpoint"),
            ({"completion_window": "30m"}, "invalid_value", "completion_window"),
            ({"completion_window": "31d"}, "invalid_value", "completion_window"),
            ({"completion_window": 24}, "invalid_value", "completion_window"),
            ({"priority": "urgent"}, "invalid_value", "priority"),
            ({"max_parallel": 0}, "invalid_value", "max_parallel"),
            ({"max_parallel": "3"}, "invalid_value", "max_parallel"),
            ({"budget": {"gpu_seconds": 0}}, "invalid_value", "budget.gpu_seconds"),
            ({"budget": {"gpu_seconds": 1, "gpu": 1}}, "unknown_parameter", "budget.gpu"),
            ({"window": {"timezone": "Mars/Base", "start": "1:00", "end": "2:00"}}, "invalid_value", "window.timezone"),
            ({"window": {"start": "01:00", "end": "02:00"}}, "missing_required_parameter", "window.timezone"),
            ({"proof": {"count": 0}}, "invalid_value", "proof.count"),
            ({"proof": {"count": 1, "auto_continue_after": "1s"}}, "invalid_value", "proof.auto_continue_after"),
            ({"on_failure": "cancel"}, "invalid_value", "on_failure"),
            ({"defaults": {"prompt": "x"}}, "unsupported_input", "defaults.prompt"),
            ({"defaults": {"secnds": 5}}, "unknown_parameter", "defaults.secnds"),
            ({"defaults": {"seconds": 99}}, "invalid_value", "defaults.seconds"),
            ({"webhook_events": ["batch.completed"]}, "invalid_value", "webhook_events"),
            ({"webhook_url": "ftp://x"}, "invalid_value", "webhook_url"),
            ({"validate": "loose"}, "invalid_value", "validate"),
            ({"not_before": "2020-01-01T00:00:00Z"}, "invalid_value", "not_before"),
            ({"metadata": {"a": 1}}, "invalid_value", "metadata"),
            ({"requests": []}, "invalid_value", "requests"),
            ({"requests": [{"prompt": "x"}]}, "invalid_value", "requests"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, client: TestClient, campaigns: Campaigns, options: dict[str, Any], code: str, param: str
    ) -> None:
        refused(client.post("/v1/campaigns", json={"input_file_id": upload(client), **options}), 400, code, param)

    def test_what_is_wrong_in_the_query_is_named(self, client: TestClient, campaigns: Campaigns) -> None:
        def wrong(query: str, code: str, param: str) -> str:
            sent = client.post(f"/v1/campaigns?{query}", content=LINES, headers={"Content-Type": "application/jsonl"})
            return str(refused(sent, 400, code, param)["message"])

        assert "greater than 0" in wrong("budget[gpu_seconds]=-1", "invalid_value", "budget.gpu_seconds")
        assert wrong("defaults={bad", "invalid_value", "defaults").startswith("defaults is not valid JSON")
        wrong('defaults={"seed":1,"seed":2}', "duplicate_parameter", "defaults.seed")

    def test_another_model_is_not_found(self, client: TestClient, campaigns: Campaigns) -> None:
        response = client.post("/v1/campaigns", json={"input_file_id": upload(client), "model": "sora-2"})
        refused(response, 404, "model_not_found", "model")

    def test_a_file_that_is_not_there(self, client: TestClient, campaigns: Campaigns) -> None:
        gone = upload(client)
        client.delete(f"/v1/files/{gone}")
        for file_id, status, code in (("file_" + "0" * 26, 404, "file_not_found"), (gone, 410, "file_deleted")):
            refused(client.post("/v1/campaigns", json={"input_file_id": file_id}), status, code, "input_file_id")
        refused(client.post("/v1/campaigns", json={}), 400, "missing_required_parameter", "input_file_id")

    def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(
        self, client: TestClient, campaigns: Campaigns, api_settings: Settings
    ) -> None:
        data = jsonl({"prompt": "x" * 1_100_000})
        for content in (data, (data[start : start + 65_536] for start in range(0, len(data), 65_536))):
            response = client.post("/v1/campaigns", content=content, headers={"Content-Type": "application/jsonl"})
            refused(response, 413, "file_too_large", "file")
        with Session(campaigns.engine) as session:
            assert session.scalars(select(File)).all() == []

    def test_types_that_are_not_read(self, client: TestClient, campaigns: Campaigns) -> None:
        for headers in (
            {"Content-Type": "application/xml"},
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            {"Content-Type": "text/csv; charset=utf-16"},
            {"Content-Type": "text/csv", "Content-Encoding": "br"},
        ):
            response = client.post("/v1/campaigns", content=b"{}", headers=headers)
            error = refused(response, 415, "unsupported_media_type")
        assert "gzip" in error["message"]
        response = client.post("/v1/batches", content=LINES, headers={"Content-Type": "application/jsonl"})
        refused(response, 415, "unsupported_media_type")
        refused(client.post("/v1/campaigns", content=b"", headers={"Content-Type": "text/csv"}), 400, "invalid_body")
        clash = client.post(
            "/v1/campaigns?input_format=jsonl", content=b"prompt\nx\n", headers={"Content-Type": "text/csv"}
        )
        refused(clash, 400, "invalid_value", "input_format")

    def test_a_member_in_query_and_body_is_refused(self, client: TestClient, campaigns: Campaigns) -> None:
        response = client.post("/v1/campaigns?name=a", json={"input_file_id": upload(client), "name": "b"})
        refused(response, 400, "duplicate_parameter", "name")

    def test_the_same_key_makes_one_campaign(self, client: TestClient, campaigns: Campaigns) -> None:
        headers = {"Idempotency-Key": "night", "Content-Type": "application/jsonl"}
        answers = [client.post("/v1/campaigns", content=LINES, headers=headers) for _ in range(2)]
        assert answers[0].content == answers[1].content
        assert answers[1].headers["idempotent-replayed"] == "true"
        other = client.post("/v1/campaigns", content=LINES + LINES, headers=headers)
        refused(other, 422, "idempotency_key_reused", "Idempotency-Key")
        with Session(campaigns.engine) as session:
            (file,) = session.scalars(select(File))
        # what the repetitions stored is gone
        store = ObjectStore(campaigns.settings)
        assert [one.key for page in store.list_pages("files/") for one in page if file.id in one.key] == [
            file_key("default", file.id)
        ]
        assert len(made(client.get("/v1/campaigns"))["data"]) == 1

    def test_a_file_is_not_deleted_before_it_is_read(self, client: TestClient, campaigns: Campaigns) -> None:
        file_id = upload(client)
        campaign_id = made(client.post("/v1/campaigns", json={"input_file_id": file_id}))["id"]
        error = refused(client.delete(f"/v1/files/{file_id}"), 409, "invalid_state")
        assert campaign_id in error["message"]
        campaigns.load()
        assert client.delete(f"/v1/files/{file_id}").json()["deleted"] is True
        assert client.delete(f"/v1/files/{file_id}").json()["deleted"] is True

    def test_an_answer_is_given_again_whatever_is_wrong_by_then(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file_id = upload(client)
        headers = {"Idempotency-Key": "later"}
        body = {"input_file_id": file_id, "not_before": time.time() + 60}
        query = {"not_before": body["not_before"]}
        raw = {"content": LINES, "headers": {"Idempotency-Key": "raw", "Content-Type": "application/jsonl"}}
        first = made(client.post("/v1/campaigns", json=body, headers=headers))
        second = made(client.post("/v1/campaigns", params=query, **raw))
        campaigns.execute("UPDATE files SET deleted_at = now()")
        hours_later = datetime.now(UTC) + timedelta(hours=3)

        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return hours_later

        monkeypatch.setattr("rushes_core.campaigns.options.datetime", Later)
        assert made(client.post("/v1/campaigns", json=body, headers=headers)) == first
        assert made(client.post("/v1/campaigns", params=query, **raw)) == second
        refused(client.post("/v1/campaigns", json=body), 400, "invalid_value", "not_before")

    def test_what_was_wrong_takes_no_key(self, client: TestClient, campaigns: Campaigns) -> None:
        headers = {"Idempotency-Key": "wrong"}
        body = {"requests": [{"prompt": "x"}], "max_parallel": 0}
        refused(client.post("/v1/campaigns", json=body, headers=headers), 400, "invalid_value", "max_parallel")
        made(client.post("/v1/campaigns", json=body | {"max_parallel": 1}, headers=headers))
        with Session(campaigns.engine) as session:
            assert len(session.scalars(select(File)).all()) == 1

    def test_a_class_that_the_key_may_not_use(self, client: TestClient, campaigns: Campaigns) -> None:
        key = bearer(create_key(client, priorities=["normal"], scopes=["batches"]))
        file_id = upload(client, headers=key)
        response = client.post("/v1/campaigns", json={"input_file_id": file_id}, headers=key)
        refused(response, 403, "priority_not_allowed", "priority")
        campaign = made(
            client.post("/v1/campaigns", json={"input_file_id": file_id, "priority": "normal"}, headers=key)
        )
        change = client.patch(f"/v1/campaigns/{campaign['id']}", json={"priority": "interactive"}, headers=key)
        refused(change, 403, "priority_not_allowed", "priority")

    def test_the_scope_is_needed(self, client: TestClient, campaigns: Campaigns) -> None:
        key = bearer(create_key(client, scopes=["videos:read", "videos:write"]))
        campaign_id = send(client)["id"]
        for method, path in (
            ("GET", "/v1/batches"),
            ("POST", "/v1/campaigns"),
            ("GET", f"/v1/campaigns/{campaign_id}"),
            ("POST", f"/v1/campaigns/{campaign_id}/cancel"),
            ("GET", f"/v1/campaigns/{campaign_id}/manifest"),
            ("DELETE", f"/v1/campaigns/{campaign_id}"),
        ):
            refused(client.request(method, path, headers=key), 403, "insufficient_scope")

    def test_a_dry_run_makes_no_jobs_and_tells_what_it_found(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_api.campaigns.DRY_RUN_SECONDS", 0)
        file_id = upload(client, jsonl({"prompt": "a dog"}, {"prompt": 5}))
        asked = made(client.post("/v1/batches?dry_run=1", json=batch_body(file_id)))
        assert (asked["status"], asked["dry_run"]) == ("validating", True)
        campaigns.load()
        found = get(client, asked["id"])
        assert (found["status"], found["request_counts"]["total"]) == ("completed", 0)
        assert (found["report"]["valid"], found["report"]["invalid"]) == (1, 1)
        assert found["report"]["errors"][0]["line"] == 2

    @pytest.mark.parametrize("line", [{"prompt": "a dog"}, None])
    def test_a_dry_run_is_in_lists_if_asked_for_and_leaves_no_file(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any] | None
    ) -> None:
        monkeypatch.setattr("rushes_api.campaigns.DRY_RUN_SECONDS", 0)
        data = b"\n" if line is None else jsonl(line)
        headers = {"Content-Type": "application/jsonl"}
        dry = made(client.post("/v1/campaigns?dry_run=1", content=data, headers=headers))
        named = made(client.post("/v1/campaigns", json={"input_file_id": upload(client), "dry_run": True}))
        real = made(client.post("/v1/campaigns", content=data, headers=headers))
        campaigns.load()
        assert get(client, dry["id"])["status"] == ("failed" if line is None else "completed")
        for path in ("/v1/campaigns", "/v1/batches"):
            assert [one["id"] for one in made(client.get(path))["data"]] == [real["id"]]
            found = made(client.get(f"{path}?dry_run=true&order=asc"))["data"]
            assert [one["id"] for one in found] == [dry["id"], named["id"]]
        kept = {one["id"] for one in made(client.get("/v1/files"))["data"]}
        assert kept == {named["input_file_id"], real["input_file_id"]}

    def test_a_dry_run_is_answered_with_what_it_found_if_that_is_soon(
        self, client: TestClient, campaigns: Campaigns
    ) -> None:
        file_id = upload(client, jsonl({"prompt": "a dog"}, {"prompt": 5}))
        stop = threading.Event()

        def load() -> None:
            while not stop.wait(0.05):
                campaigns.load()

        thread = threading.Thread(target=load)
        thread.start()
        try:
            found = made(client.post("/v1/batches?dry_run=true", json=batch_body(file_id)))
        finally:
            stop.set()
            thread.join()
        assert (found["status"], found["report"]["invalid"], found["report"]["errors"][0]["param"]) == (
            "completed",
            1,
            "prompt",
        )

    def test_who_is_told_is_checked_and_kept(self, client: TestClient, campaigns: Campaigns) -> None:
        create_project(client, "told")
        key = bearer(create_key(client, project="told", scopes=["batches", "webhooks"]))
        body = {
            "requests": [{"prompt": "x"}],
            "webhook_url": "http://127.0.0.1:9/hook",
            "webhook_events": ["batch.completed", "video.failed"],
        }
        refused(client.post("/v1/campaigns", json=body, headers=key), 400, "webhook_secret_missing", "webhook_url")
        # nor does what was sent with it stay in the store
        assert [one for page in campaigns.store.list_pages("files/told/") for one in page] == []
        made(client.post("/v1/webhook_secret/rotate", headers=key))
        campaign = made(client.post("/v1/campaigns", json=body, headers=key))
        assert campaign["webhook_url"] == body["webhook_url"]
        hook = campaigns.read(campaign["id"]).webhook
        assert hook is not None
        assert hook["events"] == ["video.failed", "batch.completed"]
        wrong = client.post("/v1/campaigns", json=body | {"webhook_events": ["batch.ended"]}, headers=key)
        refused(wrong, 400, "invalid_value", "webhook_events")

    def test_strict_fails_as_a_whole(self, client: TestClient, campaigns: Campaigns) -> None:
        file_id = upload(client, jsonl({"prompt": "a dog"}, {"prompt": 5}))
        asked = made(client.post("/v1/batches?validate=strict", json=batch_body(file_id)))
        campaigns.load()
        found = get(client, asked["id"])
        assert (found["status"], found["request_counts"]["total"]) == ("failed", 0)
        assert found["errors"]["object"] == "list"
        assert (found["errors"]["data"][0]["line"], found["errors"]["data"][0]["param"]) == (2, "prompt")

    def test_more_than_may_wait_is_refused(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_api.campaigns.MAX_ACTIVE", 1)
        send(client)
        response = client.post("/v1/campaigns", json={"input_file_id": upload(client)})
        refused(response, 429, "quota_exceeded")
        assert response.headers["x-should-retry"] == "false"

    def test_lines_that_are_still_to_be_loaded_take_their_places(
        self, client: TestClient, campaigns: Campaigns
    ) -> None:
        campaign = send(client)
        most = campaigns.settings.campaign_max_queued
        campaigns.execute("UPDATE campaigns SET num_lines = :most + 3, loaded_lines = 3", most=most)
        refused(client.post("/v1/campaigns", json={"input_file_id": upload(client)}), 429, "queue_full")
        made(client.post(f"/v1/campaigns/{campaign['id']}/cancel"))
        made(client.post("/v1/campaigns", json={"input_file_id": upload(client)}))

    def test_its_jobs_do_not_fill_the_queue_of_the_key(self, client: TestClient, campaigns: Campaigns) -> None:
        key = bearer(create_key(client, max_queued=1, scopes=["batches", "videos:write"]))
        campaign = made(client.post("/v1/campaigns", json={"requests": [{"prompt": "x"}] * 3}, headers=key))
        campaigns.load()
        campaigns.open(campaign["id"], 1, 2)
        assert client.post("/v1/videos", json={"prompt": "a dog"}, headers=key).status_code == 200
        refused(client.post("/v1/videos", json={"prompt": "a dog"}, headers=key), 429, "queue_full")
        made(client.post("/v1/campaigns", json={"requests": [{"prompt": "x"}]}, headers=key))

    def test_a_key_whose_day_is_used_up_sends_none(self, client: TestClient, campaigns: Campaigns) -> None:
        key = create_key(client, daily_gpu_seconds=10, scopes=["batches"])
        with Session(campaigns.engine) as session, session.begin():
            today = datetime.now(UTC).date()
            session.add(ApiKeyUsage(api_key=key["id"], day=today, gpu_seconds=10.5, attempts=1))
        response = client.post("/v1/campaigns", json={"requests": [{"prompt": "x"}]}, headers=bearer(key))
        refused(response, 429, "quota_exceeded")


def batch_body(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h"}


class TestLists:
    def test_pages_and_filters(self, client: TestClient, campaigns: Campaigns) -> None:
        ids = [send(client, metadata={"n": str(number)})["id"] for number in range(3)]
        made(client.post(f"/v1/batches/{ids[0]}/cancel"))
        page = made(client.get("/v1/batches?limit=2"))
        assert [one["id"] for one in page["data"]] == [ids[2], ids[1]]
        assert page["has_more"]
        rest = made(client.get(f"/v1/batches?limit=2&after={page['last_id']}"))
        assert [one["id"] for one in rest["data"]] == [ids[0]]
        found = made(client.get("/v1/campaigns?metadata[n]=1"))
        assert [one["id"] for one in found["data"]] == [ids[1]]
        found = made(client.get("/v1/campaigns?status=cancelling,completed&order=asc"))
        assert [one["id"] for one in found["data"]] == [ids[0]]
        refused(client.get("/v1/campaigns?status=paused"), 400, "invalid_value", "status")
        refused(client.get("/v1/campaigns?after=x"), 400, "invalid_value", "after")

    def test_one_that_has_ended_is_done_and_held_by_nothing(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES, paused_at=datetime.now(UTC), pause_reason="request", hold_reason="paused")
        campaigns.run(campaign_id, 1)
        shown = get(client, campaign_id)
        assert (shown["progress"], shown["hold_reason"]) == (33, "paused")
        shown = made(client.post(f"/v1/campaigns/{campaign_id}/cancel"))
        assert (shown["status"], shown["progress"], shown["hold_reason"]) == ("cancelling", 33, None)
        campaigns.end()
        shown = get(client, campaign_id)
        assert (shown["status"], shown["progress"], shown["hold_reason"]) == ("cancelled", 100, None)
        failed = campaigns.loaded(b"\n", paused_at=datetime.now(UTC), pause_reason="request", hold_reason="paused")
        shown = get(client, failed)
        assert (shown["status"], shown["progress"], shown["hold_reason"]) == ("failed", 100, None)

    def test_items_are_jobs_and_bad_lines_in_order(self, client: TestClient, campaigns: Campaigns) -> None:
        data = jsonl(*(openai_line(n) if n % 3 else {"prompt": n, "custom_id": f"id-{n}"} for n in range(1, 11)))
        campaign_id = campaigns.loaded(data)
        campaigns.run(campaign_id, 2)
        campaigns.run(campaign_id, 4, code="generation_failed")
        path = f"/v1/campaigns/{campaign_id}/items"
        found: list[dict[str, Any]] = []
        query = "?limit=3"
        while True:
            page = made(client.get(path + query))
            found += page["data"]
            if not page["has_more"]:
                break
            assert len(page["data"]) == 3
            query = f"?limit=3&after={page['last_id']}"
        assert [item["line"] for item in found] == list(range(1, 11))
        assert [item["id"] for item in found] == [f"item_{n}" for n in range(1, 11)]
        assert {item["line"]: item["status"] for item in found if item["status"] != "queued"} == {
            2: "completed",
            3: "failed",
            4: "failed",
            6: "failed",
            9: "failed",
        }
        bad, failed = found[2], found[3]
        assert (bad["video_id"], bad["custom_id"], bad["error"]["line"], bad["error"]["param"]) == (
            None,
            "id-3",
            3,
            "prompt",
        )
        assert failed["error"]["code"] == "generation_failed"
        assert client.get(f"/v1/videos/{failed['video_id']}").json()["status"] == "failed"
        assert [item["line"] for item in made(client.get(f"{path}?status=failed"))["data"]] == [3, 4, 6, 9]
        assert [item["line"] for item in made(client.get(f"{path}?status=failed,completed&limit=2"))["data"]] == [2, 3]
        assert [item["line"] for item in made(client.get(f"{path}?status=completed"))["data"]] == [2]
        refused(client.get(f"{path}?after=7"), 400, "invalid_value", "after")

    def test_videos_say_their_campaign_and_are_found_by_it(self, client: TestClient, campaigns: Campaigns) -> None:
        first, second = campaigns.loaded(LINES), campaigns.loaded(LINES)
        page = made(client.get(f"/v1/videos?campaign_id={first}&order=asc"))
        assert {(video["batch_id"], video["campaign_id"]) for video in page["data"]} == {(first, first)}
        assert [video["custom_id"] for video in page["data"]] == ["id-1", "id-2", "id-3"]
        assert len(made(client.get("/v1/videos?custom_id=id-2"))["data"]) == 2
        (one,) = made(client.get(f"/v1/videos?custom_id=id-2&campaign_id={second}"))["data"]
        assert (one["campaign_id"], one["custom_id"]) == (second, "id-2")
        assert made(client.get(f"/v1/videos?campaign_id={first}&status=completed"))["data"] == []
        refused(client.get("/v1/videos?campaign_id=x"), 400, "invalid_value", "campaign_id")


def measure(campaigns: Campaigns, *, num_jobs: int, seconds: float) -> None:
    """Have clips as those of `openai_line` known to run so long, and one replica up."""
    job = {"w": 480, "h": 480, "n": 107, "model": campaigns.model.name, "jobs": num_jobs, "s": seconds}
    campaigns.execute(
        "INSERT INTO measured_times (model, width, height, num_frames, num_jobs, run_p50, run_p80, run_p90, phases) "
        "VALUES (:model, :w, :h, :n, :jobs, :s, :s, :s, '{}')",
        **job,
    )
    campaigns.execute(
        "INSERT INTO replicas (id, pool, layout, model, device, state, epoch) "
        "VALUES ('eta#1', 'default', 'r1s2', :model, 'cpu', 'ready', 1)",
        model=campaigns.model.name,
    )


class TestForecast:
    @pytest.fixture(autouse=True)
    def nothing_measured(self, campaigns: Campaigns) -> Iterator[None]:
        yield
        campaigns.execute("DELETE FROM measured_times")
        campaigns.execute("DELETE FROM replicas")

    def test_there_is_none_before_enough_was_measured(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        assert get(client, campaign_id)["eta"] is None
        measure(campaigns, num_jobs=19, seconds=10)
        campaigns.foresee()
        assert get(client, campaign_id)["eta"] is None

    def test_what_is_left_takes_as_long_as_clips_did_lately(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, 101))))
        measure(campaigns, num_jobs=50, seconds=10)
        campaigns.foresee()
        now = time.time()
        eta = get(client, campaign_id)["eta"]
        assert eta["basis"] == "last 50 clips"
        assert eta["gpu_seconds"] == pytest.approx(100 * 10 * 2, rel=0.01)
        assert 900 < eta["completes_at"] - now < 1_060
        assert eta["completes_at_latest"] > eta["completes_at"]
        assert eta["fits_window"] is None
        (listed,) = made(client.get("/v1/batches"))["data"]
        assert listed["eta"]["gpu_seconds"] == eta["gpu_seconds"]
        paused = made(client.post(f"/v1/campaigns/{campaign_id}/pause"))
        assert (paused["eta"]["completes_at"], paused["eta"]["gpu_seconds"]) == (None, eta["gpu_seconds"])

    def test_how_far_off_it_was_is_scraped(self, client: TestClient, campaigns: Campaigns) -> None:
        # it was to take 100 seconds, or 200, and took 150
        told = {"10": {"at": 1_000, "p50": 1_100, "p90": 1_200}}
        campaigns.execute(
            "INSERT INTO campaign_forecasts (campaign_id, made_at, num_ended, num_dropped, work_left, may_run, told, "
            "ended_at) VALUES (:id, now(), 0, 0, 0, true, CAST(:told AS jsonb), to_timestamp(1150))",
            id=campaigns.loaded(LINES),
            told=json.dumps(told),
        )
        wait_until(lambda: 'rushes_campaign_eta_campaigns{done="10"} 1.0' in client.get("/metrics").text)
        scraped = client.get("/metrics").text
        assert 'rushes_campaign_eta_error{done="10",forecast="p50",quantile="0.5"} 0.5' in scraped
        assert 'rushes_campaign_eta_error{done="10",forecast="p90",quantile="0.5"} -0.25' in scraped
        assert 'rushes_campaign_eta_late{done="10",forecast="p50"} 1.0' in scraped
        assert 'rushes_campaign_eta_late{done="10",forecast="p90"} 0.0' in scraped
        assert 'rushes_campaign_eta_late{done="50"' not in scraped

    def test_it_is_said_whether_the_window_is_long_enough(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, 101))))
        measure(campaigns, num_jobs=50, seconds=10)
        campaigns.foresee()
        path = f"/v1/campaigns/{campaign_id}"
        window = {"timezone": "UTC", "start": "00:00", "end": "24:00"}
        assert made(client.patch(path, json={"window": window}))["eta"]["fits_window"] is True
        days = ["mo", "tu", "we", "th", "fr", "sa", "su"]
        window = {"timezone": "UTC", "days": days[:1], "start": "03:00", "end": "03:05"}
        changed = made(client.patch(path, json={"window": window}))
        assert changed["eta"]["fits_window"] is False
        # a hundred clips of ten seconds, five minutes a week
        assert changed["eta"]["completes_at"] - time.time() > 2 * 7 * 86_400


def test_what_waits_in_campaigns_is_counted_apart(client: TestClient, campaigns: Campaigns) -> None:
    first, second = campaigns.loaded(LINES), campaigns.loaded(LINES, priority=1)
    campaigns.open(first, 1)
    campaigns.stop(second)
    queue = made(client.get("/v1/queue"))
    assert queue["queued"] == 6
    assert queue["reasons"] == {"campaign": 5}
    assert {one["priority"]: one["queued"] for one in queue["classes"]} == {"interactive": 1, "normal": 3, "bulk": 2}
    text = client.get("/metrics").text
    assert 'rushes_queue_in_campaigns{priority="bulk"} 2.0' in text
    assert 'rushes_queue_held{priority="bulk"} 0.0' in text
    assert 'rushes_campaigns{state="cancelling"} 1.0' in text


class TestChanging:
    def test_what_waits_says_why(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        job = campaigns.items(campaign_id)[0]
        waiting = client.get(f"/v1/videos/{job.id}")
        assert waiting.json()["queue"]["reason"] is None
        # thousands wait with it
        assert waiting.headers["openai-poll-after-ms"] == "10000"
        made(client.post(f"/v1/campaigns/{campaign_id}/pause", json={}))
        assert client.get(f"/v1/videos/{job.id}").json()["queue"]["reason"] == "paused"
        assert {one["queue"]["reason"] for one in client.get("/v1/videos").json()["data"]} == {"paused"}

    def test_pause_and_resume(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.open(campaign_id, 1, 2)
        paused = made(client.post(f"/v1/campaigns/{campaign_id}/pause"))
        assert (paused["paused"], paused["pause_reason"], paused["hold_reason"]) == (True, "request", "paused")
        assert paused["status"] == "in_progress"
        assert {job.hold for job in campaigns.items(campaign_id)} == {"campaign"}
        assert campaigns.events(campaign_id) == ["batch.paused"]
        assert made(client.post(f"/v1/campaigns/{campaign_id}/pause"))["paused"]
        assert campaigns.events(campaign_id) == ["batch.paused"]
        resumed = made(client.post(f"/v1/campaigns/{campaign_id}/resume"))
        assert (resumed["paused"], resumed["hold_reason"]) == (False, None)

    def test_a_pause_that_stops_what_runs(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.open(campaign_id, 1)
        campaigns.start(1)
        made(client.post(f"/v1/campaigns/{campaign_id}/pause", json={"drain": True}))
        assert campaigns.items(campaign_id)[0].stop_at is None
        made(client.post(f"/v1/campaigns/{campaign_id}/pause", json={"drain": False}))
        assert campaigns.items(campaign_id)[0].stop_at is not None
        refused(client.post(f"/v1/campaigns/{campaign_id}/pause", json={"drian": 1}), 400, "unknown_parameter", "drian")

    def test_changes_close_what_is_open_and_are_shown(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES, name="before", max_parallel=3)
        campaigns.open(campaign_id, 1, 2)
        path = f"/v1/campaigns/{campaign_id}"
        changed = made(client.patch(path, json={"name": "after", "metadata": {"a": "b"}}))
        assert (changed["name"], changed["metadata"], changed["max_parallel"]) == ("after", {"a": "b"}, 3)
        assert [job.hold for job in campaigns.items(campaign_id)] == [None, None, "campaign"]
        window = {"timezone": "Europe/Berlin", "start": "22:00", "end": "06:00"}
        changed = made(
            client.patch(
                path,
                json={"priority": "interactive", "window": window, "budget": {"gpu_seconds": 5}, "max_parallel": None},
            )
        )
        assert (changed["priority"], changed["max_parallel"]) == ("interactive", None)
        assert changed["window"]["days"] == ["mo", "tu", "we", "th", "fr", "sa", "su"]
        assert changed["budget"]["gpu_seconds"] == 5
        assert {job.hold for job in campaigns.items(campaign_id)} == {"campaign"}
        assert made(client.patch(path, json={"window": None, "budget": None}))["window"] is None
        refused(client.patch(path, json={"priority": None}), 400, "invalid_value", "priority")
        for name in ("input_file_id", "proof", "completion_window", "max_attempts", "validate"):
            error = refused(client.patch(path, json={name: 1}), 400, "unsupported_input", name)
            assert error["message"].startswith(f"{name} cannot be changed")
        refused(client.patch(path, json={"prof": 1}), 400, "unknown_parameter", "prof")
        campaigns.stop(campaign_id)
        refused(client.patch(path, json={"max_parallel": 1}), 409, "invalid_state")
        assert made(client.patch(path, json={"name": None}))["name"] is None

    def test_cancel_stops_everything_and_writes_what_became_of_it(
        self, client: TestClient, campaigns: Campaigns
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        campaigns.open(campaign_id, 2)
        cancelled = made(client.post(f"/v1/batches/{campaign_id}/cancel"))
        assert cancelled["status"] == "cancelling"
        assert {job.hold for job in campaigns.items(campaign_id)} == {None, "campaign"}
        assert made(client.post(f"/v1/campaigns/{campaign_id}/cancel"))["status"] in ("cancelling", "cancelled")
        campaigns.end()
        ended = get(client, campaign_id)
        assert (ended["status"], ended["request_counts"]["completed"], ended["request_counts"]["cancelled"]) == (
            "cancelled",
            1,
            2,
        )
        output = client.get(f"/v1/files/{ended['output_file_id']}/content")
        assert [json.loads(line)["custom_id"] for line in output.text.splitlines()] == ["id-1"]
        file = made(client.get(f"/v1/files/{ended['error_file_id']}"))
        assert file["purpose"] == "batch_output"
        listed = made(client.get("/v1/files?purpose=batch_output"))
        assert {one["id"] for one in listed["data"]} == {ended["output_file_id"], ended["error_file_id"]}
        refused(client.post("/v1/campaigns", json={"input_file_id": file["id"]}), 400, "invalid_value", "input_file_id")

    def test_failed_items_are_retried_in_place(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        campaigns.run(campaign_id, 2, code="generation_failed")
        campaigns.run(campaign_id, 3, code="out_of_memory")
        campaigns.end()
        assert get(client, campaign_id)["status"] == "completed"
        before = campaigns.items(campaign_id)
        path = f"/v1/campaigns/{campaign_id}/retry_failed"
        refused(client.post(path, json={"codes": ["worker_lost"]}), 409, "invalid_state")
        again = made(client.post(path, json={"codes": ["generation_failed"], "new_seeds": True}))
        assert (again["status"], again["retrying"], again["completed_at"]) == ("in_progress", False, None)
        assert (again["request_counts"]["queued"], again["request_counts"]["failed"]) == (1, 1)
        after = campaigns.items(campaign_id)
        assert [job.id for job in after] == [job.id for job in before]
        assert (after[1].generation, after[1].hold, after[1].error) == (2, "campaign", None)
        assert after[1].seed != before[1].seed
        assert (after[2].generation, after[2].seed) == (1, before[2].seed)
        campaigns.counts(campaign_id)
        campaigns.run(campaign_id, 2)
        made(client.post(path))
        assert get(client, campaign_id)["request_counts"]["queued"] == 1
        campaigns.run(campaign_id, 3)
        campaigns.end()
        ended = get(client, campaign_id)
        assert (ended["status"], ended["request_counts"]["completed"], ended["error_file_id"]) == ("completed", 3, None)

    def test_a_single_item_is_retried_as_any_video(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(openai_line(1)))
        campaigns.run(campaign_id, 1, code="generation_failed")
        campaigns.end()
        (job,) = campaigns.items(campaign_id)
        video = made(client.post(f"/v1/videos/{job.id}/retry"))
        assert (video["status"], video["campaign_id"], video["custom_id"]) == ("queued", campaign_id, "id-1")
        reopened = get(client, campaign_id)
        assert (reopened["status"], reopened["request_counts"]["queued"]) == ("in_progress", 1)
        assert campaigns.items(campaign_id)[0].hold == "campaign"
        assert made(client.post(f"/v1/videos/{job.id}/cancel"))["status"] == "cancelled"
        campaigns.end()
        ended = get(client, campaign_id)
        assert (ended["status"], ended["request_counts"]["cancelled"]) == ("completed", 1)

    def test_many_are_retried_by_whoever_ends_campaigns(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_core.campaigns.statements.CHANGED_AT_ONCE", 2)
        monkeypatch.setattr("rushes_api.campaign_changes.CHANGED_AT_ONCE", 2)
        campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, 8))))
        made(client.post(f"/v1/campaigns/{campaign_id}/cancel"))
        campaigns.end()
        asked = made(client.post(f"/v1/campaigns/{campaign_id}/retry_failed", json={"include_cancelled": True}))
        assert (asked["retrying"], asked["request_counts"]["queued"]) == (True, 2)
        campaigns.end()
        done = get(client, campaign_id)
        assert (done["status"], done["retrying"], done["request_counts"]["queued"]) == ("in_progress", False, 7)
        assert campaigns.counts(campaign_id)["queued"] == 7

    def test_a_proof_is_approved(self, client: TestClient, campaigns: Campaigns) -> None:
        file_id = upload(client)
        body = {"input_file_id": file_id, "proof": {"count": 1, "auto_continue_after": "30m"}}
        campaign = made(client.post("/v1/campaigns", json=body))
        assert campaign["proof"] == {"count": 1, "state": "running", "auto_continue_after": "30m", "done_at": None}
        approved = made(client.post(f"/v1/campaigns/{campaign['id']}/approve"))
        assert approved["proof"]["state"] == "approved"
        plain = send(client)
        refused(client.post(f"/v1/campaigns/{plain['id']}/approve"), 409, "invalid_state")

    def test_what_has_ended_cannot_be_changed(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(openai_line(1)))
        campaigns.run(campaign_id, 1)
        campaigns.end()
        for action in ("pause", "resume", "cancel", "approve", "retry_failed"):
            error = refused(client.post(f"/v1/campaigns/{campaign_id}/{action}"), 409, "invalid_state")
            assert campaign_id in error["message"]

    def test_a_campaign_that_is_not_there(self, client: TestClient, campaigns: Campaigns) -> None:
        for campaign_id in ("batch_" + "0" * 26, "x", "%00"):
            for method, path in (("GET", ""), ("POST", "/cancel"), ("PATCH", ""), ("DELETE", ""), ("GET", "/archive")):
                body: dict[str, Any] = {"json": {}} if method == "PATCH" else {}
                response = client.request(method, f"/v1/campaigns/{campaign_id}{path}", **body)
                refused(response, 404, "batch_not_found")


class TestFetching:
    def test_a_manifest_while_it_runs(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(openai_line(1), openai_line(2), openai_line(3), {"prompt": ""}))
        campaigns.run(campaign_id, 1)
        campaigns.run(campaign_id, 2, code="generation_failed")
        path = f"/v1/campaigns/{campaign_id}/manifest"
        (output,) = (json.loads(line) for line in client.get(f"{path}?part=output").text.splitlines())
        assert (output["custom_id"], output["error"], output["response"]["status_code"]) == ("id-1", None, 200)
        assert output["response"]["body"]["status"] == "completed"
        assert output["response"]["body"]["custom_id"] == "id-1"
        errors = [json.loads(line) for line in client.get(f"{path}?part=errors").text.splitlines()]
        assert [(one["custom_id"], one["error"]["code"], one["error"]["line"]) for one in errors] == [
            ("id-2", "generation_failed", 2),
            (None, "invalid_value", 4),
        ]
        assert {one["response"] for one in errors} == {None}
        every = [json.loads(line) for line in client.get(path).text.splitlines()]
        assert [one["custom_id"] for one in every] == ["id-1", "id-2", "id-3", None]
        assert (every[2]["response"], every[2]["error"]) == (None, None)
        assert len({one["id"] for one in every}) == 4
        response = client.get(f"{path}?format=csv")
        assert response.headers["content-type"].startswith("text/csv")
        assert response.content.startswith(b"\xef\xbb\xbf")
        rows = list(csv.DictReader(io.StringIO(response.content.decode("utf-8-sig"))))
        assert [row["status"] for row in rows] == ["completed", "failed", "queued", "failed"]
        assert [row["error_code"] for row in rows] == ["", "generation_failed", "", "invalid_value"]
        refused(client.get(f"{path}?format=xml"), 400, "invalid_value", "format")
        refused(client.get(f"{path}?part=some"), 400, "invalid_value", "part")

    def test_many_pages_hold_every_line_once(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_api.campaign_pages.PAGE", 4)
        lines = [{"prompt": "x"} if number % 5 else {"prompt": 1} for number in range(1, 60)]
        campaign_id = campaigns.loaded(jsonl(*lines[:20], *[b""] * 3, *[{"prompt": 2}] * 9, *lines[20:]))
        rows = client.get(f"/v1/campaigns/{campaign_id}/manifest?format=csv").content.decode("utf-8-sig")
        numbers = [int(row["line"]) for row in csv.DictReader(io.StringIO(rows))]
        assert numbers == [*range(1, 21), *range(24, 72)]

    def test_cells_are_no_formulas(self, client: TestClient, campaigns: Campaigns) -> None:
        ids = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\nx", "plain", "a=b", 'quo"te', "007"]
        campaign_id = campaigns.loaded(jsonl(*({"prompt": "x", "custom_id": one} for one in ids)))
        text = client.get(f"/v1/campaigns/{campaign_id}/manifest?format=csv").content.decode("utf-8-sig")
        found = [row["custom_id"] for row in csv.DictReader(io.StringIO(text, newline=""))]
        assert found == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\tx", "'\rx", "'\nx", "plain", "a=b", 'quo"te', "007"]
        lines = client.get(f"/v1/campaigns/{campaign_id}/manifest").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == ids

    def test_an_archive_has_every_clip_and_tells_of_those_it_lacks(
        self, client: TestClient, campaigns: Campaigns, api_settings: Settings, tmp_path: Path
    ) -> None:
        ids = ["shot-1", "Shot 1", "../../etc/passwd", "CON", "con", "manifest", None, "shot-2", "é", "lost", "e" * 200]
        lines = [{"prompt": "x"} | ({} if one is None else {"custom_id": one}) for one in [*ids, "waiting"]]
        campaign_id = campaigns.loaded(jsonl(*lines))
        driver = JobDriver(api_settings)
        items = campaigns.items(campaign_id)
        for number, job in enumerate(items[:-1]):
            with Session(campaigns.engine) as session, session.begin():
                session.execute(update(Job).where(Job.id == job.id).values(hold=None))
            driver.complete(job.id, CLIP + bytes([number]), tmp_path, is_stored=job.custom_id != "lost")
        driver.close()
        response = client.get(f"/v1/campaigns/{campaign_id}/archive")
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/zip"
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert archive.testzip() is None
            names = archive.namelist()
            clips = [name for name in names if name.endswith(".mp4")]
            assert clips[0] == "shot-1.mp4"
            assert clips[1] == "Shot_1~2.mp4"
            assert len({name.lower() for name in clips}) == len(clips) == 10
            assert not any("/" in name or name.startswith(".") or len(name) > 200 for name in names)
            assert [archive.read(name)[-1] for name in clips] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
            assert {archive.getinfo(name).compress_type for name in clips} == {zipfile.ZIP_STORED}
            manifest = list(csv.DictReader(io.StringIO(archive.read("manifest.csv").decode("utf-8-sig"))))
            assert len(manifest) == 12
            assert {row["file"] for row in manifest if row["file"]} == {*clips, "lost.mp4"}
            missing = list(csv.DictReader(io.StringIO(archive.read("missing.csv").decode("utf-8-sig"))))
            assert [(row["custom_id"], row["line"]) for row in missing] == [("lost", "10")]

    def test_an_archive_of_nothing_is_one(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        with zipfile.ZipFile(io.BytesIO(client.get(f"/v1/campaigns/{campaign_id}/archive").content)) as archive:
            assert archive.namelist() == ["manifest.csv"]

    def test_more_clips_than_an_archive_may_have_are_refused(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        monkeypatch.setattr("rushes_api.routers.campaigns.MAX_CLIPS", 0)
        error = refused(client.get(f"/v1/campaigns/{campaign_id}/archive"), 409, "archive_too_large")
        assert f"may have 0 clips, and {campaign_id} has 1" in error["message"]

    @pytest.mark.parametrize("path", ["archive", "manifest", "manifest?format=csv&part=errors"])
    def test_a_head_makes_nothing(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        whole = client.get(f"/v1/campaigns/{campaign_id}/{path}")

        async def made(*_: Any, **more: Any) -> Any:
            raise AssertionError("a page was read")

        monkeypatch.setattr("rushes_api.campaign_pages.items", made)
        monkeypatch.setattr("rushes_api.campaign_archive.items", made)
        head = client.head(f"/v1/campaigns/{campaign_id}/{path}")
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "content-disposition"):
            assert head.headers[name] == whole.headers[name]
        assert "content-length" not in head.headers
        refused(client.put(f"/v1/campaigns/{campaign_id}/{path}"), 405, "method_not_allowed")
        assert client.head(f"/v1/campaigns/batch_{'0' * 26}/{path}").status_code == 404


class TestDeleting:
    def test_a_file_that_came_with_it_goes_with_it_unless_another_one_is_read_from_it(
        self, client: TestClient, campaigns: Campaigns
    ) -> None:
        first = made(client.post("/v1/campaigns", json={"requests": [{"prompt": "a dog"}]}))
        second = made(client.post("/v1/campaigns", json={"requests": [{"prompt": "a cat"}]}))
        named = made(client.post("/v1/campaigns", json={"input_file_id": upload(client)}))
        reader = made(client.post("/v1/campaigns", json={"input_file_id": second["input_file_id"]}))
        for one in (first, second, named):
            made(client.delete(f"/v1/campaigns/{one['id']}"))
        kept = {one["id"] for one in made(client.get("/v1/files"))["data"]}
        assert kept == {second["input_file_id"], named["input_file_id"]}
        campaigns.load()
        assert get(client, reader["id"])["request_counts"]["total"] == 1

    def test_what_would_go_is_told_first(
        self, client: TestClient, campaigns: Campaigns, api_settings: Settings, tmp_path: Path
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        driver = JobDriver(api_settings)
        job = campaigns.items(campaign_id)[0]
        campaigns.open(campaign_id, 1)
        driver.complete(job.id, CLIP, tmp_path)
        driver.close()
        told = made(client.delete(f"/v1/campaigns/{campaign_id}?dry_run=1"))
        assert told == {
            "id": campaign_id,
            "object": "batch.deleted",
            "deleted": False,
            "jobs": 3,
            "clips": 1,
            "bytes": len(CLIP),
            "estimated": False,
        }
        assert get(client, campaign_id)["status"] == "in_progress"

    def test_of_many_it_is_told_by_some_of_them(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statements, "COUNTED_AT_ONCE", 2)
        campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, 9))))
        path = f"/v1/campaigns/{campaign_id}?dry_run=1"
        told = made(client.delete(path))
        assert (told["jobs"], told["clips"], told["bytes"], told["estimated"]) == (8, 0, 0, True)
        for line in (1, 2, 4, 7):
            campaigns.run(campaign_id, line)
        campaigns.run(campaign_id, 8, code="not_finite")
        campaigns.execute("""UPDATE jobs SET result = result || '{"bytes": 1000}' WHERE state = 'completed'""")
        told = made(client.delete(path))
        assert (told["jobs"], told["clips"], told["bytes"]) == (8, 4, 4_000)
        # a clip whose retention ended, and one that was deleted by itself
        gone = """UPDATE jobs SET result = result || '{"deleted_at": "2026-12-01T00:00:00Z"}' WHERE line = 2"""
        campaigns.execute(gone)
        campaigns.execute("UPDATE jobs SET deleted_at = now() WHERE line = 7")
        told = made(client.delete(path))
        assert told["clips"] in (1, 2, 3)
        assert told["bytes"] == pytest.approx(told["clips"] * 1_000, abs=500)

    def test_what_would_go_is_read_by_the_index_whatever_there_is(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.execute("ANALYZE jobs")
        with campaigns.engine.connect() as connection:
            connection.exec_driver_sql("SET enable_seqscan = off")
            nodes = list(scans(generic_plan(connection, statements.sample_clips(campaign_id))))
        assert {node.get("Index Name") for node in nodes if node.get("Relation Name") == "jobs"} == {
            "ix_jobs_campaign_state"
        }

    def test_it_goes_with_its_jobs_and_files(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        campaigns.run(campaign_id, 2)
        campaigns.run(campaign_id, 3)
        campaigns.end()
        output = get(client, campaign_id)["output_file_id"]
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        refused(client.get(f"/v1/campaigns/{campaign_id}"), 410, "batch_deleted")
        refused(client.get(f"/v1/files/{output}"), 410, "file_deleted")
        assert made(client.get("/v1/campaigns"))["data"] == []
        campaigns.end()
        assert {job.deleted_at is not None for job in campaigns.items(campaign_id)} == {True}
        assert made(client.get("/v1/videos"))["data"] == []
        assert campaigns.read(campaign_id).purged_at is not None

    def test_one_that_runs_is_cancelled_first(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        refused(client.delete(f"/v1/campaigns/{campaign_id}?dry_run=1"), 410, "batch_deleted")
        campaigns.end()
        campaigns.end()
        row = campaigns.read(campaign_id)
        assert (row.state, row.purged_at is not None) == ("cancelled", True)
        assert {job.state.value for job in campaigns.items(campaign_id)} == {"cancelled"}
        assert {job.deleted_at is not None for job in campaigns.items(campaign_id)} == {True}


def test_nothing_of_another_project_is_found(client: TestClient, campaigns: Campaigns) -> None:
    create_project(client, "others")
    key = bearer(create_key(client, project="others", scopes=["batches", "videos:read", "videos:write"]))
    campaign_id = campaigns.loaded(LINES)
    campaigns.run(campaign_id, 1)
    campaigns.end()
    campaigns.end()
    mine = get(client, campaign_id)
    never = "batch_" + "0" * 26
    paths = [path for path in client.get("/openapi.json").json()["paths"] if "{batch_id}" in path]
    assert len(paths) >= 11
    for path in paths:
        for method in client.get("/openapi.json").json()["paths"][path]:
            body: dict[str, Any] = {"json": {}} if method in ("post", "patch") else {}
            answers = [
                client.request(
                    method.upper(),
                    path.replace("{batch_id}", one),
                    headers={**key, "x-request-id": "same"},
                    **body,
                )
                for one in (campaign_id, never)
            ]
            assert [answer.status_code for answer in answers] == [404, 404], (method, path)
            assert answers[0].text.replace(campaign_id, "ID") == answers[1].text.replace(never, "ID")
    assert made(client.get("/v1/batches", headers=key))["data"] == []
    assert made(client.get(f"/v1/videos?campaign_id={campaign_id}", headers=key))["data"] == []
    assert made(client.get("/v1/videos?custom_id=id-1", headers=key))["data"] == []
    refused(
        client.post("/v1/campaigns", json={"input_file_id": mine["input_file_id"]}, headers=key),
        404,
        "file_not_found",
        "input_file_id",
    )
    assert get(client, campaign_id) == mine
