"""Jobs that are made from others, and requests that are only tried."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rushes_api.app import create_app
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import cast, update
from sqlalchemy.dialects.postgresql import JSONB
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver, multipart
from support.fuzz import WEBHOOK_KEY


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/videos", json={"prompt": "a dog", **body})
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def remix(client: TestClient, video_id: str, prompt: str = "a cat", **options: Any) -> dict[str, Any]:
    response = client.post(f"/v1/videos/{video_id}/remix", json={"prompt": prompt}, **options)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


@pytest.fixture(scope="module")
def hooked(api_settings: Settings) -> Iterator[TestClient]:
    """A deployment that tells by webhooks, of addresses that anybody can reach."""
    settings = api_settings.model_copy(update={"webhook_key": SecretStr(WEBHOOK_KEY)})
    with TestClient(create_app(settings), headers=AUTHORIZED) as client:
        yield client


SAME = ("seconds", "size", "size_requested", "seed", "metadata", "priority", "model")


class TestRemix:
    def test_all_but_the_prompt_is_the_same(self, client: TestClient, driver: JobDriver) -> None:
        asked = {"seconds": 5.5, "size": "720x1280", "metadata": {"client": "acme"}, "priority": "bulk"}
        source = create(client, **asked, output={"thumbnail": False})
        made = remix(client, source["id"])
        assert (made["prompt"], made["remixed_from_video_id"], made["status"]) == ("a cat", source["id"], "queued")
        assert {name: made[name] for name in SAME} == {name: source[name] for name in SAME}
        assert made["output"]["num_frames"] == source["output"]["num_frames"]
        first, second = driver.row(source["id"]), driver.row(made["id"])
        assert first is not None
        assert second is not None
        assert second.request == first.request

    def test_its_times_are_its_own(self, client: TestClient) -> None:
        tomorrow = int(time.time()) + 86_400
        source = create(client, not_before=tomorrow, deadline=tomorrow + 86_400)
        made = remix(client, source["id"])
        assert made["not_before"] is made["deadline"] is None

    def test_how_long_its_clip_is_kept_counts_from_its_own_acceptance(self, client: TestClient) -> None:
        source = create(client, retention={"seconds": 3_600})
        made = remix(client, source["id"])
        assert made["expires_at"] - made["created_at"] in (3_600, 3_601)

    def test_a_webhook_that_is_not_allowed_any_more_is_said_to_be_the_sources(
        self, hooked: TestClient, driver: JobDriver
    ) -> None:
        source = create(hooked)["id"]
        hook = {"url": "http://127.0.0.1:9000/", "events": ["video.completed"]}
        with driver.engine.begin() as connection:
            asked = Job.request.op("||")(cast({"webhook": hook}, JSONB))
            connection.execute(update(Job).where(Job.id == source).values(request=asked))
        response = hooked.post(f"/v1/videos/{source}/remix", json={"prompt": "a cat"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "webhook_url"
        assert error["message"].startswith(f"{source} cannot be remixed: its webhook_url must begin with https://, got")

    def test_the_source_may_have_any_status(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        failed, completed = (create(client)["id"] for _ in range(2))
        driver.fail(failed, code="generation_failed", message="no")
        driver.complete(completed, b"clip", tmp_path)
        for source in (failed, completed):
            assert remix(client, source)["remixed_from_video_id"] == source

    def test_every_kind_of_body_says_the_prompt(self, client: TestClient) -> None:
        path = f"/v1/videos/{create(client)['id']}/remix"
        body, headers = multipart(("prompt", "a cat"))
        answers = [
            client.post(path, json={"prompt": "a cat"}),
            client.post(path, content=body, headers=headers),
            client.post(path, data={"prompt": "a cat"}),
        ]
        assert [answer.json()["prompt"] for answer in answers] == ["a cat"] * 3

    @pytest.mark.parametrize(
        ("body", "param", "code"),
        [
            ({}, "prompt", "missing_required_parameter"),
            ({"prompt": ""}, "prompt", "invalid_value"),
            ({"prompt": "\ud83d"}, "prompt", "invalid_value"),
            ({"prompt": "x" * 20_000}, "prompt", "prompt_too_long"),
            ({"prompt": "a cat", "seed": 1}, "seed", "unknown_parameter"),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    def test_what_is_wrong_with_it_is_named(
        self, client: TestClient, driver: JobDriver, body: dict[str, Any], param: str, code: str
    ) -> None:
        path = f"/v1/videos/{create(client)['id']}/remix"
        before = driver.num_rows()
        response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert driver.num_rows() == before

    @pytest.mark.parametrize("video_id", [new_video_id(), "x", "video_01%00"])
    def test_one_that_does_not_exist_is_not_found(self, client: TestClient, video_id: str) -> None:
        response = client.post(f"/v1/videos/{video_id}/remix", json={"prompt": "a cat"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "video_not_found")

    def test_one_that_was_deleted_is_gone(self, client: TestClient) -> None:
        video_id = create(client)["id"]
        client.delete(f"/v1/videos/{video_id}")
        response = client.post(f"/v1/videos/{video_id}/remix", json={"prompt": "a cat"})
        assert (response.status_code, response.json()["error"]["code"]) == (410, "video_deleted")

    def test_the_answer_may_wait_for_its_end(self, client: TestClient, driver: JobDriver) -> None:
        path = f"/v1/videos/{create(client, not_before=time.time() + 3_600)['id']}/remix"
        response = client.post(path, json={"prompt": "a cat"}, headers={"Prefer": "wait=1"})
        assert (response.status_code, response.headers["preference-applied"]) == (200, "wait=1")
        assert driver.row(response.json()["id"]) is not None

    def test_one_key_makes_one_job(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        before = driver.num_rows()
        key = {"Idempotency-Key": "remix once"}
        first, again = (remix(client, video_id, headers=key) for _ in range(2))
        assert first == again
        assert driver.num_rows() == before + 1
        other = client.post(f"/v1/videos/{video_id}/remix", json={"prompt": "a bird"}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


class TestValidate:
    def test_it_tells_what_would_be_rendered(self, client: TestClient) -> None:
        body = {
            "prompt": "a dog",
            "seconds": "5.5",
            "size": "1280x720",
            "seed": 7,
            "priority": 90,
            "metadata": {},
        }
        found = client.post("/v1/videos/validate", json=body).json()
        assert found == {
            "object": "video.validation",
            "model": "rushes/tiny-fasth3-8-step-demo",
            "num_tokens": found["num_tokens"],
            "max_tokens": 10_240,
            "seconds": "5.5",
            "size": "1344x768",
            "size_requested": "1280x720",
            "num_frames": 141,
            "duration_seconds": 5.875,
            "fps": 24,
            "seed": 7,
            "seed_policy": "as_given",
            "metadata": {},
            "priority": "interactive",
            "not_before": None,
            "deadline": None,
            "expires_at": None,
            "output": {},
            "estimate": found["estimate"],
        }
        assert found["num_tokens"] == 5

    def test_a_seed_is_not_drawn_for_nothing(self, client: TestClient) -> None:
        found = client.post("/v1/videos/validate", json={"prompt": "a dog"}).json()
        assert (found["seed"], found["seed_policy"]) == (None, "drawn")

    def test_times_are_told(self, client: TestClient) -> None:
        body = {"prompt": "a dog", "retention": {"seconds": 3_600}}
        found = client.post("/v1/videos/validate", json=body, headers={"Cancel-After": "90m"}).json()
        assert 1_790 <= found["deadline"] - found["expires_at"] <= 1_810

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"prompt": "a dog"}, 200),
            ({"prompt": "a dog", "fps": 30}, 400),
            ({"prompt": "a dog", "model": "sora-2"}, 404),
            ({"prompt": "a dog", "conditions": ["x"]}, 400),
            ({"prompt": "a dog", "target": {"short_edge": 1}}, 400),
            ({}, 400),
        ],
        ids=str,
    )
    def test_it_answers_as_the_real_thing_and_stores_nothing(
        self, client: TestClient, driver: JobDriver, body: dict[str, Any], status: int
    ) -> None:
        before = driver.num_rows()
        tried = client.post("/v1/videos/validate", json=body)
        assert driver.num_rows() == before
        real = client.post("/v1/videos", json=body)
        assert tried.status_code == real.status_code == status
        if status != 200:
            strip = {"request_id": ""}
            assert tried.json()["error"] | strip == real.json()["error"] | strip
