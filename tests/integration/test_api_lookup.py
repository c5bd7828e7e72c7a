"""Reading single jobs past the sessions: what is read, and how old it may be."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from rushes_api import lookup
from rushes_api.app import create_app
from rushes_api.lookup import Lookup
from rushes_core.models import Job
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver
from support.stack import libpq_url, settings_env


def post(client: TestClient) -> str:
    video_id: str = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
    return video_id


@pytest.fixture(autouse=True)
def _empty_queue(client: TestClient) -> Iterator[None]:
    yield
    for video in client.get("/v1/videos", params={"status": "queued", "limit": 100}).json()["data"]:
        client.post(f"/v1/videos/{video['id']}/cancel")


@pytest.fixture
def keeping(api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """Another process, for which one job ahead is as far back as hundreds."""
    monkeypatch.setattr(Lookup, "SECONDS_KEPT_PER_JOB_AHEAD", 1_000)
    monkeypatch.setattr(Lookup, "MAX_SECONDS_KEPT", 1_000)
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
        yield client


def ahead(answer: Any) -> int | None:
    assert answer.status_code == 200, answer.text
    queue = answer.json()["queue"]
    assert queue["position"] == (None if queue["ahead"] is None else queue["ahead"] + 1)
    found: int | None = queue["ahead"]
    return found


def test_whatever_is_queued_is_told_its_place_at_once(
    client: TestClient, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a count that is a few milliseconds old knows nothing of who came into another class meanwhile
    monkeypatch.setattr(Lookup, "SECONDS_KEPT_PER_JOB_AHEAD", 0)
    body = {"prompt": "a dog"}
    first, second = (client.post("/v1/videos", json=body) for _ in range(2))
    assert [ahead(first), ahead(second)] == [0, 1]
    urgent = client.post("/v1/videos", json=body | {"priority": "interactive"})
    assert ahead(urgent) == 0
    remixed = client.post(f"/v1/videos/{first.json()['id']}/remix", json=body)
    assert ahead(remixed) == 3
    failed = post(client)
    driver.fail(failed, code="generation_failed", message="no")
    retried = client.post(f"/v1/videos/{failed}/retry")
    # whoever made it fail had made it urgent
    assert ahead(retried) == 1
    now = [ahead(client.get(f"/v1/videos/{answer.json()['id']}")) for answer in (first, second, urgent, remixed)]
    # the urgent ones stand before those who came earlier
    assert now == [2, 3, 0, 4]
    assert ahead(client.get(f"/v1/videos/{failed}")) == 1


def test_the_place_is_part_of_what_an_idempotency_key_repeats(client: TestClient) -> None:
    headers = {"Idempotency-Key": "place"}
    before = post(client)
    first, again = (client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers) for _ in range(2))
    client.post(f"/v1/videos/{before}/cancel")
    later = client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers)
    assert ahead(first) == 1
    assert first.content == again.content == later.content


def test_those_who_come_at_once_stand_behind_each_other(keeping: TestClient) -> None:
    post(keeping)
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: keeping.post("/v1/videos", json={"prompt": "a dog"}), range(12)))
    assert sorted(found for answer in answers if (found := ahead(answer)) is not None) == list(range(1, 13))


def test_one_whose_queue_is_forgotten_while_it_is_counted_is_told_its_place(
    api_settings: Settings, client: TestClient, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lookup, "MAX_KEPT_PLACES", 1)
    monkeypatch.setattr(Lookup, "SECONDS_KEPT_PER_JOB_AHEAD", 0)
    mine, other = post(client), client.post("/v1/videos", json={"prompt": "a dog", "priority": "bulk"}).json()["id"]

    async def places(mine: Job, other: Job) -> list[int | None]:
        lookup = Lookup(api_settings)
        await lookup.num_ahead_of_newcomer(mine)
        # the first to have its answer makes room, and there is room for one
        found = await asyncio.gather(lookup.num_ahead_of_newcomer(other), lookup.num_ahead_of_newcomer(mine))
        await lookup.close()
        return found

    jobs = [job for video_id in (mine, other) if (job := driver.row(video_id)) is not None]
    assert asyncio.run(places(*jobs)) == [2, 1]


def test_the_end_of_a_long_queue_is_not_counted_for_everybody(keeping: TestClient) -> None:
    first, _ = post(keeping), post(keeping)
    bulk = {"prompt": "a dog", "priority": "bulk"}
    assert ahead(keeping.post("/v1/videos", json=bulk)) == 2
    keeping.post(f"/v1/videos/{first}/cancel")
    assert ahead(keeping.post("/v1/videos", json=bulk)) == 3


@pytest.mark.parametrize("wait", [{}, {"Prefer": "wait=1"}])
def test_a_job_that_waits_for_its_time_has_no_place(client: TestClient, wait: dict[str, str]) -> None:
    later = {"prompt": "a dog", "not_before": int(time.time()) + 3_600}
    assert ahead(client.post("/v1/videos", json=later, headers=wait)) is None


def test_one_that_was_waited_for_in_vain_is_told_its_place(client: TestClient) -> None:
    post(client)
    answer = client.post("/v1/videos", json={"prompt": "a dog"}, headers={"Prefer": "wait=1"})
    assert answer.headers["preference-applied"] == "wait=1"
    assert ahead(answer) == 1


def test_a_job_is_accepted_although_nobody_can_count_those_ahead(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "WAIT_SECONDS", 0.0)
    assert ahead(client.post("/v1/videos", json={"prompt": "a dog"})) is None
    monkeypatch.undo()
    assert ahead(client.post("/v1/videos", json={"prompt": "a dog"})) == 1


def test_places_near_the_front_are_always_counted(client: TestClient) -> None:
    first, second = post(client), post(client)
    behind = client.get(f"/v1/videos/{second}").json()["queue"]["ahead"]
    assert client.get(f"/v1/videos/{first}").json()["queue"]["ahead"] == behind - 1
    client.post(f"/v1/videos/{first}/cancel")
    client.post(f"/v1/videos/{second}/cancel")


def test_places_far_back_are_kept_for_a_while(keeping: TestClient) -> None:
    client, first, second = keeping, post(keeping), post(keeping)
    path = f"/v1/videos/{second}"
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


def test_a_job_is_shown_although_nobody_can_count_those_ahead(
    api_settings: Settings, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "WAIT_SECONDS", 2.0)
    video_id = post(client)
    with psycopg.connect(libpq_url(settings_env(api_settings))) as other:
        # the job itself is read without this table
        other.execute("LOCK TABLE project_shares")
        answer = client.get(f"/v1/videos/{video_id}")
        other.rollback()
    monkeypatch.undo()
    assert answer.status_code == 200, answer.text
    assert (answer.json()["status"], answer.json()["queue"]["position"]) == ("queued", None)
    assert client.get(f"/v1/videos/{video_id}").json()["queue"]["position"] is not None
    client.post(f"/v1/videos/{video_id}/cancel")
