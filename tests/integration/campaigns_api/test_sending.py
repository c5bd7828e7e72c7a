"""How campaigns are sent over HTTP, and what is refused of them."""

import gzip
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rushes_core.models import ApiKeyUsage, File
from rushes_core.object_keys import file_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.campaigns import Campaigns, jsonl
from support.campaigns_api import (
    LINES,
    batch_body,
    get,
    made,
    prompts,
    refused,
    send,
    upload,
)
from support.keys import bearer, create_key, create_project

ZONE = ("invalid_value", "window.timezone")


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
        ("fields", "query", "code", "param"),
        [
            ({"max_parallel": "0"}, "", "invalid_value", "max_parallel"),
            ({"window[timezone]": "Mars/Base", "window[start]": "1:00", "window[end]": "2:00"}, "", *ZONE),
            ({"defaults": "{bad"}, "", "invalid_value", "defaults"),
            ({"name": "a"}, "name=b", "duplicate_parameter", "name"),
            ({}, "max_parallel=0", "invalid_value", "max_parallel"),
        ],
    )
    def test_options_before_the_file_of_a_form_are_judged_before_it_is_read(
        self, client: TestClient, campaigns: Campaigns, fields: dict[str, str], query: str, code: str, param: str
    ) -> None:
        texts: list[tuple[str, Any]] = [(name, (None, value)) for name, value in fields.items()]
        file = ("file", ("lines.jsonl", b"x" * (campaigns.settings.files_max_bytes + 1)))
        url = f"/v1/campaigns?{query}"
        refused(client.post(url, files=[*texts, file]), 400, code, param)
        if fields:
            refused(client.post(url, files=[file, *texts]), 413, "file_too_large", "file")
            # what is sent again is first looked for under its key
            again = client.post(url, files=[*texts, file], headers={"Idempotency-Key": "form"})
            refused(again, 413, "file_too_large", "file")

    @pytest.mark.parametrize(
        ("before", "after", "code", "param"),
        [
            (
                {"window[start]": "22:00"},
                {"window[timezone]": "UTC", "window[end]": "06:00"},
                "missing_required_parameter",
                "window.timezone",
            ),
            (
                {"budget[on_limit]": "cancel"},
                {"budget[gpu_seconds]": "9"},
                "missing_required_parameter",
                "budget.gpu_seconds",
            ),
            ({"on_failure": "cancel"}, {"max_failures": "3"}, "invalid_value", "on_failure"),
        ],
    )
    def test_options_before_the_file_of_a_form_may_lack_what_comes_after_it(
        self,
        client: TestClient,
        campaigns: Campaigns,
        before: dict[str, str],
        after: dict[str, str],
        code: str,
        param: str,
    ) -> None:
        parts: list[tuple[str, Any]] = [(name, (None, value)) for name, value in before.items()]
        parts.append(("file", ("lines.jsonl", LINES)))
        made(client.post("/v1/campaigns", files=[*parts, *((name, (None, value)) for name, value in after.items())]))
        # what is still missing at the end is said then
        refused(client.post("/v1/campaigns", files=parts), 400, code, param)

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

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "is empty"),
            (b"null", "must be a JSON object, got null"),
            (b"[1]", "must be a JSON object, got an array"),
            (b"{", "is not valid JSON"),
            (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
            ('{"requests": [{"prompt": "x"}]}'.encode("utf-16"), "is not valid UTF-8: byte 0xff at 0"),
        ],
    )
    def test_a_body_that_is_no_json_object_is_refused_as_any_other(
        self, client: TestClient, campaigns: Campaigns, body: bytes, reason: str
    ) -> None:
        response = client.post("/v1/campaigns", content=body, headers={"Content-Type": "application/json"})
        assert reason in refused(response, 400, "invalid_body")["message"]

    @pytest.mark.parametrize("told", ["csv", "xml", 1])
    def test_lines_in_the_body_have_one_format(self, client: TestClient, campaigns: Campaigns, told: Any) -> None:
        body = {"requests": [{"prompt": "a dog"}], "input_format": told}
        error = refused(client.post("/v1/campaigns", json=body), 400, "invalid_value", "input_format")
        assert error["message"] == f"input_format must be jsonl with requests, got {told!r}"
        made(client.post("/v1/campaigns", json=body | {"input_format": "jsonl"}))

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

    @pytest.mark.usefixtures("one_day")
    def test_a_key_whose_day_is_used_up_sends_none(self, client: TestClient, campaigns: Campaigns) -> None:
        key = create_key(client, daily_gpu_seconds=10, scopes=["batches"])
        with Session(campaigns.engine) as session, session.begin():
            today = datetime.now(UTC).date()
            session.add(ApiKeyUsage(api_key=key["id"], day=today, gpu_seconds=10.5, attempts=1))
        response = client.post("/v1/campaigns", json={"requests": [{"prompt": "x"}]}, headers=bearer(key))
        refused(response, 429, "quota_exceeded")
