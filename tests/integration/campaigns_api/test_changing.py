"""What is done with campaigns over HTTP while they go on, and afterwards."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.campaigns import Campaigns, jsonl, openai_line
from support.campaigns_api import LINES, get, made, refused, send, upload


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
