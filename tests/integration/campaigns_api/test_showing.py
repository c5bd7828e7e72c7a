"""What is shown of campaigns over HTTP: lists, items and forecasts, and nothing of other projects."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.campaigns import Campaigns, jsonl, openai_line
from support.campaigns_api import LINES, get, made, measure, refused, send
from support.keys import bearer, create_key, create_project
from support.waiting import wait_until


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
    # what a test before it scraped is told for a second
    wait_until(lambda: 'rushes_queue_in_campaigns{priority="bulk"} 2.0' in client.get("/metrics").text)
    text = client.get("/metrics").text
    assert 'rushes_queue_held{priority="bulk"} 0.0' in text
    assert 'rushes_campaigns{state="cancelling"} 1.0' in text


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
