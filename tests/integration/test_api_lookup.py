"""Reading single jobs past the sessions: what is read, and how old it may be."""

import psycopg
import pytest
from rushes_api.lookup import Lookup
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import JobDriver
from support.stack import libpq_url, settings_env


def post(client: TestClient) -> str:
    video_id: str = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
    return video_id


def test_places_near_the_front_are_always_counted(client: TestClient) -> None:
    first, second = post(client), post(client)
    behind = client.get(f"/v1/videos/{second}").json()["queue"]["ahead"]
    assert client.get(f"/v1/videos/{first}").json()["queue"]["ahead"] == behind - 1
    client.post(f"/v1/videos/{first}/cancel")
    client.post(f"/v1/videos/{second}/cancel")


def test_places_far_back_are_kept_for_a_while(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = post(client), post(client)
    path = f"/v1/videos/{second}"
    # one job ahead is as far back as hundreds
    monkeypatch.setattr(Lookup, "SECONDS_KEPT_PER_JOB_AHEAD", 1_000)
    monkeypatch.setattr(Lookup, "MAX_SECONDS_KEPT", 1_000)
    assert client.get(path).json()["queue"]["ahead"] == 1
    client.post(f"/v1/videos/{first}/cancel")
    assert client.get(path).json()["queue"]["ahead"] == 1
    client.post(f"{path}/cancel")
    assert client.get(path).json()["queue"]["ahead"] is None


def test_what_was_committed_before_a_request_is_in_its_answer(client: TestClient, driver: JobDriver) -> None:
    video_id = post(client)
    assert client.get(f"/v1/videos/{video_id}").json()["status"] == "queued"
    driver.start(video_id)
    assert client.get(f"/v1/videos/{video_id}").json()["status"] == "in_progress"
    client.post(f"/v1/videos/{video_id}/cancel")
    assert client.get(f"/v1/videos/{video_id}").json()["cancel_requested_at"] is not None


def test_a_row_that_is_read_so_is_shown_as_any_other(client: TestClient) -> None:
    video_id = post(client)
    listed = next(one for one in client.get("/v1/videos").json()["data"] if one["id"] == video_id)
    got = client.get(f"/v1/videos/{video_id}").json()
    # lists leave out where a job stands
    left_out = {"queue", "eta"}
    assert {k: v for k, v in got.items() if k not in left_out} == {k: v for k, v in listed.items() if k not in left_out}
    client.post(f"/v1/videos/{video_id}/cancel")


def test_a_job_is_shown_although_nobody_can_count_those_ahead(api_settings: Settings, client: TestClient) -> None:
    video_id = post(client)
    with psycopg.connect(libpq_url(settings_env(api_settings))) as other:
        # the job itself is read without this table
        other.execute("LOCK TABLE project_shares")
        answer = client.get(f"/v1/videos/{video_id}")
        other.rollback()
    assert answer.status_code == 200, answer.text
    assert (answer.json()["status"], answer.json()["queue"]["position"]) == ("queued", None)
    assert client.get(f"/v1/videos/{video_id}").json()["queue"]["position"] is not None
    client.post(f"/v1/videos/{video_id}/cancel")
