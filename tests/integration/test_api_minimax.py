"""MiniMax's video API, version 2, as its clients use it: create, query until the end, fetch without a key."""

import hmac
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
from rushes_api import once
from rushes_api.app import create_app
from rushes_api.content import signed_url
from rushes_api.content_link import PARAMETERS
from rushes_api.lookup import Lookup
from rushes_core import jobs
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import ContentDelivery, Settings
from rushes_core.states import JobState
from sqlalchemy import cast, func, make_url, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, JobDriver, ThreadedApi
from support.faults.proxy import Mode, TcpProxy
from support.keys import bearer, create_key, create_project

CLIP = random.Random(8).randbytes(300_001)
REQUEST: dict[str, Any] = {
    "model": "MiniMax-H3",
    "content": [{"type": "text", "text": "a lighthouse at dusk"}],
    "resolution": "768P",
    "duration": 5,
    "ratio": "16:9",
}
QUERY = "/v2/query/video_generation"
CREATE = "/v2/video_generation"


def create(client: TestClient, **changes: Any) -> str:
    response = client.post(CREATE, json=REQUEST | changes)
    assert response.status_code == 200, response.text
    assert list(response.json()) == ["task_id"]
    task_id: str = response.json()["task_id"]
    return task_id


def task(client: TestClient, task_id: str) -> dict[str, Any]:
    response = client.get(f"{QUERY}/{task_id}")
    assert response.status_code == 200, response.text
    assert list(response.json()) == ["task"]
    found: dict[str, Any] = response.json()["task"]
    return found


def error(response: Any) -> dict[str, Any]:
    body = response.json()
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["error"]["http_code"] == str(response.status_code)
    found: dict[str, Any] = body["error"]
    return found


class TestTask:
    def test_it_is_a_job_of_the_clip_that_was_asked_for(self, client: TestClient, driver: JobDriver) -> None:
        job = driver.row(create(client, resolution="480P", ratio="9:16", duration=12))
        assert job is not None
        assert (job.width, job.height, job.prompt) == (480, 832, "a lighthouse at dusk")
        assert client.get(f"/v1/videos/{job.id}").json()["seconds"] == "12"

    @pytest.mark.parametrize(
        "changes", [{"resolution": "480p"}, {"duration": "6"}, {"duration": 6.0}, {"seed": 7}], ids=str
    )
    def test_what_is_meant_counts(self, client: TestClient, driver: JobDriver, changes: dict[str, Any]) -> None:
        job = driver.row(create(client, **({"resolution": "480P", "duration": 6} | changes)))
        assert job is not None
        assert (job.width, job.height, job.num_frames) == (832, 480, 158)
        assert job.seed == changes.get("seed", job.seed)

    def test_members_that_say_nothing_are_passed_over(self, client: TestClient, driver: JobDriver) -> None:
        nothing = {"role": "", "image_url": None, "video_url": None, "audio_url": None}
        job = driver.row(create(client, content=[TEXT | nothing]))
        assert job is not None
        assert job.prompt == "a dog"
        create(client, content=[TEXT | {"role": None}])

    @pytest.mark.parametrize("seconds", range(4, 16))
    def test_it_is_as_long_as_was_asked_for(
        self, client: TestClient, driver: JobDriver, tmp_path: Path, seconds: int
    ) -> None:
        task_id = create(client, duration=seconds)
        driver.complete(task_id, CLIP, tmp_path)
        done = task(client, task_id)
        assert (done["duration"], done["usage"]["output_seconds"]) == (seconds, seconds)

    def test_its_life_has_the_words_of_that_api(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        before = int(time.time())
        task_id = create(client)
        waiting = task(client, task_id)
        assert before - 1 <= waiting.pop("created_at") <= waiting.pop("updated_at") <= time.time() + 1
        assert waiting == {
            "id": task_id,
            "model": "MiniMax-H3",
            "status": "queued",
            "resolution": "768P",
            "duration": 5,
            "ratio": "16:9",
            "task_type": "generation",
            "modality": "video",
        }
        driver.start(task_id)
        assert task(client, task_id)["status"] == "running"

    def test_one_that_failed_says_why(self, client: TestClient, driver: JobDriver) -> None:
        task_id = create(client)
        driver.fail(task_id, code="generation_failed", message="The pipeline stopped.")
        failed = task(client, task_id)
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": "generation_failed", "message": "The pipeline stopped."}
        assert "content" not in failed

    def test_its_clip_is_fetched_without_a_key(self, api_settings: Settings, driver: JobDriver, tmp_path: Path) -> None:
        with ThreadedApi(api_settings) as api, httpx.Client(base_url=api.url, timeout=60) as client:
            client.headers.update(AUTHORIZED)
            task_id = client.post(CREATE, json=REQUEST).json()["task_id"]
            driver.complete(task_id, CLIP, tmp_path)
            done = client.get(f"{QUERY}/{task_id}").json()["task"]
            assert done["status"] == "succeeded"
            assert done["usage"] == {
                "total_seconds": 5,
                "input_seconds": 0,
                "output_seconds": 5,
                "input_image_count": 0,
            }
            url = done["content"]["url"]
            assert httpx.get(url, timeout=60).content == CLIP
            part = httpx.get(url, headers={"Range": "bytes=10-19"}, timeout=60)
            assert (part.status_code, part.content) == (206, CLIP[10:20])
            head = httpx.head(url, timeout=60)
            assert (head.status_code, head.headers["content-type"]) == (200, "video/mp4")

    @pytest.mark.parametrize("name", ["MiniMax-H3", "MiniMax-H3-Max"])
    def test_it_keeps_the_name_that_its_model_was_asked_for_by(self, client: TestClient, name: str) -> None:
        task_id = create(client, model=name)
        assert task(client, task_id)["model"] == name
        own = client.get(f"/v1/videos/{task_id}").json()["model"]
        assert own not in ("MiniMax-H3", "MiniMax-H3-Max")
        assert task(client, create(client, model=own))["model"] == own

    def test_a_job_of_the_other_api_is_one_too(self, client: TestClient) -> None:
        made = client.post("/v1/videos", json={"prompt": "a dog", "seconds": "15", "size": "480x640"}).json()
        found = task(client, made["id"])
        assert (found["model"], found["resolution"], found["ratio"]) == (made["model"], "480P", "3:4")
        assert found["duration"] == 15

    def test_one_that_expired_has_failed(self, client: TestClient, driver: JobDriver) -> None:
        task_id = create(client)
        with driver.engine.begin() as connection:
            late = {"deadline_at": func.now() - timedelta(seconds=1)}
            connection.execute(update(Job).where(Job.id == task_id).values(late))
            connection.execute(jobs.expire())
        found = task(client, task_id)
        assert found["status"] == "failed"
        assert found["error"]["code"] == "deadline_exceeded"

    def test_a_clip_that_was_removed_has_no_address(
        self, client: TestClient, driver: JobDriver, tmp_path: Path
    ) -> None:
        task_id = create(client)
        driver.complete(task_id, CLIP, tmp_path)
        with driver.engine.begin() as connection:
            removed = Job.result.op("||")(cast({"deleted_at": "2026-01-02T03:04:05+00:00"}, JSONB))
            connection.execute(update(Job).where(Job.id == task_id).values(result=removed))
        found = task(client, task_id)
        assert found["status"] == "succeeded"
        assert "content" not in found

    def test_a_key_makes_it_once(self, client: TestClient) -> None:
        key = {"Idempotency-Key": f"once-{random.random()}"}
        first, second = (client.post(CREATE, json=REQUEST, headers=key) for _ in range(2))
        assert first.json() == second.json()
        assert second.headers["Idempotent-Replayed"] == "true"
        other = client.post(CREATE, json=REQUEST | {"duration": 6}, headers=key)
        assert other.status_code == 422
        assert error(other)["code"] == "idempotency_key_reused"


class TestAddress:
    @pytest.fixture
    def url(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> str:
        task_id = create(client)
        driver.complete(task_id, CLIP, tmp_path)
        address: str = task(client, task_id)["content"]["url"]
        return address

    @pytest.fixture
    def anybody(self, client: TestClient, url: str) -> Iterator[TestClient]:
        """Who sends no key, once there is an address."""
        sent = client.headers.pop("authorization")
        yield client
        client.headers["authorization"] = sent

    def test_it_is_of_one_clip(self, anybody: TestClient, url: str) -> None:
        assert anybody.get(url).content == CLIP
        other = url.replace(url.split("/")[5], new_video_id())
        response = anybody.get(other)
        assert response.status_code == 403
        assert error(response)["code"] == "invalid_link"

    @pytest.mark.parametrize("name", PARAMETERS)
    def test_each_of_its_parameters_counts(self, anybody: TestClient, url: str, name: str) -> None:
        parameters = dict(httpx.URL(url).params)
        path = urlsplit(url).path
        for value in ("", "1", "99999999999", "9" * 300, "\u0661", "\x00", None):
            changed = parameters | {name: value}
            response = anybody.get(path, params={key: text for key, text in changed.items() if text is not None})
            assert response.status_code == 403, value
            assert error(response)["code"] == "invalid_link"

    def test_the_operators_key_cannot_be_guessed_from_it(self, anybody: TestClient, url: str) -> None:
        expires = httpx.URL(url).params["expires"]
        said = f"content of {url.split('/')[5]} until {expires}".encode()
        signature = hmac.new(API_KEY.encode(), said, sha256).hexdigest()
        response = anybody.get(urlsplit(url).path, params={"expires": expires, "signature": signature})
        assert response.status_code == 403

    def test_it_ends(
        self, anybody: TestClient, url: str, monkeypatch: pytest.MonkeyPatch, api_settings: Settings
    ) -> None:
        later = time.time() + api_settings.presigned_url_seconds + 2
        monkeypatch.setattr("rushes_api.content_link.time.time", lambda: later)
        response = anybody.get(url)
        assert response.status_code == 403
        assert error(response)["code"] == "link_expired"

    def test_it_ends_with_its_task(self, client: TestClient, url: str) -> None:
        task_id = url.split("/")[5]
        assert client.delete(f"{CREATE}/{task_id}").json()["action"] == "deleted"
        assert client.get(url).status_code == 410

    def test_no_cache_keeps_it(self, client: TestClient, url: str) -> None:
        for path in (f"{QUERY}/{url.split('/')[5]}", QUERY):
            response = client.get(path)
            assert url.split("?")[0] in response.text
            assert response.headers["cache-control"] == "no-store"

    def test_it_is_at_the_origin_of_the_settings(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path
    ) -> None:
        settings = api_settings.model_copy(update={"api_origin": "https://video.example"})
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            task_id = create(client)
            driver.complete(task_id, CLIP, tmp_path)
            assert task(client, task_id)["content"]["url"].startswith(
                f"https://video.example/v2/video_generation/{task_id}/"
            )

    def test_it_is_the_stores_where_content_is_redirected(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path
    ) -> None:
        settings = api_settings.model_copy(update={"content_delivery": ContentDelivery.REDIRECT})
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            task_id = create(client)
            driver.complete(task_id, CLIP, tmp_path)
            url = task(client, task_id)["content"]["url"]
            assert url.startswith(str(api_settings.s3_endpoint_url))
            assert httpx.get(url, timeout=60).content == CLIP
            listed = client.get(QUERY, params={"filter.task_ids": task_id}).json()["items"]
            assert httpx.get(listed[0]["content"]["url"], timeout=60).content == CLIP


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, "role": "first_frame"}
TEXT = {"type": "text", "text": "a dog"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"resolution": "2K"}, "resolution", "resolution must be one of 768P, 480P, got '2K'"),
    ({"resolution": "2k"}, "resolution", "resolution must be one of 768P, 480P, got '2k'"),
    ({"resolution": 768}, "resolution", "resolution must be one of 768P, 480P, got 768"),
    ({"resolution": ["768P"]}, "resolution", "resolution must be one of"),
    ({"resolution": None}, "resolution", "resolution is required"),
    ({"ratio": "adaptive"}, "ratio", "ratio must be one of 21:9, 16:9, 4:3, 1:1, 3:4, 9:16, got 'adaptive'"),
    ({"ratio": None}, "ratio", "ratio is required"),
    ({"ratio": ["16:9"]}, "ratio", "ratio must be one of"),
    ({"duration": 3}, "duration", "duration must be a whole number of seconds between 4 and 15, got 3"),
    ({"duration": 16}, "duration", "between 4 and 15, got 16"),
    ({"duration": 5.5}, "duration", "between 4 and 15, got 5.5"),
    ({"duration": "5.5"}, "duration", "between 4 and 15, got '5.5'"),
    ({"duration": "16"}, "duration", "between 4 and 15, got '16'"),
    ({"duration": [5]}, "duration", "between 4 and 15, got [5]"),
    ({"duration": True}, "duration", "between 4 and 15, got True"),
    (
        {"content": [TEXT, IMAGE]},
        "content.1",
        "content.1 is not supported: image_url: this checkpoint renders from text",
    ),
    ({"content": [{"type": "video_url"}, TEXT]}, "content.0", "content.0 is not supported: video_url"),
    ({"content": [{"type": "audio"}]}, "content.0.type", "content.0.type must be text, got 'audio'"),
    ({"content": [{"text": "a dog"}]}, "content.0.type", "content.0.type is required"),
    ({"content": [TEXT, TEXT]}, "content", "content must hold exactly one text, got 2"),
    ({"content": []}, "content", "content must hold exactly one text, got 0"),
    ({"content": "a dog"}, "content", "content must be a valid list, got 'a dog'"),
    ({"content": ["a dog"]}, "content.0", "content.0 must be an object, got 'a dog'"),
    ({"content": None}, "content", "content is required"),
    ({"content": [{"type": "text", "text": " "}]}, "content.0.text", "prompt"),
    ({"content": [{"type": "text", "text": "a" * 60_000}]}, "content.0.text", "prompt"),
    ({"content": [{"type": "text", "text": 7}]}, "content.0.text", "content.0.text must be a string, got 7"),
    ({"content": [{"type": "text", "text": "a\x00"}]}, "content.0.text", "prompt"),
    ({"content": [TEXT | {"role": "first_frame"}]}, "content.0.role", "unknown parameter: content.0.role"),
    ({"callback_url": "https://example.com"}, "callback_url", "register an endpoint with POST /v1/webhook_endpoints"),
    ({"aigc_watermark": True}, "aigc_watermark", "aigc_watermark is not supported: clips bear no mark, got True"),
    (
        {"extra": {"prompt_expansion_mode": "quality"}},
        "extra.prompt_expansion_mode",
        "prompts are rendered as they are",
    ),
    ({"extra": {"other": 1}}, "extra.other", "unknown parameter: extra.other"),
    ({"content": [TEXT | {"other": ""}]}, "content.0.other", "unknown parameter: content.0.other"),
    ({"content": [{"type": "text", "text": None}]}, "content.0.text", "content.0.text is required"),
    ({"content": [{"type": ["text"], "text": "a dog"}]}, "content.0.type", "content.0.type must be text, got ['text']"),
    ({"seed": -1}, "seed", "seed must be greater than or equal to 0, got -1"),
    ({"negative_prompt": "a cat"}, "negative_prompt", "unknown parameter: negative_prompt"),
    ({"model": None}, "model", "model is required"),
]


class TestRefusals:
    @pytest.mark.parametrize(("changes", "param", "message"), WRONG)
    def test_what_is_wrong_is_named(
        self, client: TestClient, driver: JobDriver, changes: dict[str, Any], param: str, message: str
    ) -> None:
        before = driver.num_rows()
        response = client.post(CREATE, json=REQUEST | changes)
        assert response.status_code == 400, response.text
        found = error(response)
        assert found["type"] == "bad_request_error"
        assert found["param"] == param
        assert message in found["message"]
        assert found["message"].endswith(" (2013)")
        assert driver.num_rows() == before

    def test_null_and_what_asks_for_nothing_are_no_fault(self, client: TestClient) -> None:
        harmless = {"callback_url": "", "aigc_watermark": False, "extra": {"prompt_expansion_mode": "disabled"}}
        create(client, **harmless)
        create(client, callback_url=None, aigc_watermark=None, extra=None)

    def test_a_model_that_is_not_served(self, client: TestClient) -> None:
        response = client.post(CREATE, json=REQUEST | {"model": "MiniMax-Hailuo-02"})
        assert response.status_code == 404
        assert "served: MiniMax-H3, MiniMax-H3-Max, " in error(response)["message"]

    def test_a_request_without_a_key(self, client: TestClient) -> None:
        response = client.post(CREATE, json=REQUEST, headers={"Authorization": ""})
        assert response.status_code == 401
        found = error(response)
        assert found["type"] == "authorized_error"
        assert found["message"].endswith(" (1004)")

    @pytest.mark.parametrize("path", ["/v2/h3_context_ir", "/v2/video_regeneration", "/v2/"])
    def test_what_is_not_served(self, client: TestClient, path: str) -> None:
        response = client.post(path, json=REQUEST)
        assert response.status_code == 404
        assert error(response)["code"] == "unknown_url"

    def test_a_task_that_there_is_not(self, client: TestClient) -> None:
        for path in (f"{QUERY}/{new_video_id()}", f"{QUERY}/424010985738629"):
            response = client.get(path)
            assert response.status_code == 404
            assert error(response)["code"] == "video_not_found"

    def test_too_many_requests(self, client: TestClient) -> None:
        limited = bearer(create_key(client, requests_per_minute=1))
        answers = [client.get(QUERY, headers=limited) for _ in range(3)]
        assert answers[-1].status_code == 429
        found = error(answers[-1])
        assert found["type"] == "rate_limit_error"
        assert found["message"].endswith(" (1002)")


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}])
def test_nobody_counts_what_is_ahead_of_a_new_task(
    client: TestClient, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count(*arguments: object, **values: object) -> None:
        raise AssertionError("counted")

    monkeypatch.setattr(Lookup, "num_before_end", count)
    assert client.post(CREATE, json=REQUEST, headers=headers).status_code == 200


class TestList:
    @pytest.fixture
    def own(self, client: TestClient) -> Iterator[TestClient]:
        """Who sends a key of a project that has nothing else."""
        project = create_project(client, f"list-{random.randrange(10**9)}")
        with TestClient(client.app, headers=bearer(create_key(client, project=project))) as own:
            yield own

    def ids(self, own: TestClient, **parameters: Any) -> tuple[list[str], int]:
        response = own.get(QUERY, params=parameters)
        assert response.status_code == 200, response.text
        body = response.json()
        assert list(body) == ["items", "total"]
        return [item["id"] for item in body["items"]], body["total"]

    def test_it_goes_page_by_page_from_the_newest(self, own: TestClient) -> None:
        assert self.ids(own) == ([], 0)
        made = [create(own) for _ in range(5)][::-1]
        assert self.ids(own) == (made, 5)
        assert self.ids(own, page_size=2) == (made[:2], 5)
        assert self.ids(own, page_num=3, page_size=2) == (made[4:], 5)
        assert self.ids(own, page_num=4, page_size=2) == ([], 5)

    def test_its_items_are_tasks(self, own: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        task_id = create(own)
        driver.complete(task_id, CLIP, tmp_path)
        (listed,), queried = own.get(QUERY).json()["items"], task(own, task_id)
        addresses = [one.pop("content")["url"] for one in (listed, queried)]
        assert listed == queried
        # not the same ones: each works from when it was given
        assert {urlsplit(address).path for address in addresses} == {f"{CREATE}/{task_id}/content"}
        assert [own.get(address).content for address in addresses] == [CLIP, CLIP]

    def test_it_holds_those_that_pass_the_filters(
        self, own: TestClient, client: TestClient, driver: JobDriver, tmp_path: Path
    ) -> None:
        waiting, running, done, failed, cancelled = (create(own) for _ in range(5))
        driver.start(running)
        driver.complete(done, CLIP, tmp_path)
        driver.fail(failed, code="generation_failed", message="")
        own.delete(f"{CREATE}/{cancelled}")
        for status, expected in {
            "queued": waiting,
            "running": running,
            "succeeded": done,
            "failed": failed,
            "cancelled": cancelled,
        }.items():
            assert self.ids(own, **{"filter.status": status}) == ([expected], 1)
        assert self.ids(own, **{"filter.status": "expired"}) == ([], 0)
        with driver.engine.begin() as connection:
            late = {"state": JobState.EXPIRED, "finished_at": func.now()}
            connection.execute(update(Job).where(Job.id == waiting).values(**late))
        assert self.ids(own, **{"filter.status": "expired"}) == ([waiting], 1)
        assert self.ids(own, **{"filter.status": "failed"}) == ([failed, waiting], 2)
        other = create(own, model="MiniMax-H3-Max")
        assert self.ids(own, **{"filter.model": "MiniMax-H3-Max"}) == ([other], 1)
        assert self.ids(own, **{"filter.model": "MiniMax-H3"})[1] == 5
        assert self.ids(own, **{"filter.model": "nobody's"}) == ([], 0)
        assert self.ids(own, **{"filter.task_type": "generation"})[1] == 6
        assert self.ids(own, **{"filter.task_type": "regeneration"}) == ([], 0)
        stranger = create(client)
        for ids in ([waiting, done, stranger], f"{waiting},{done},{stranger}"):
            assert self.ids(own, **{"filter.task_ids": ids}) == ([done, waiting], 2)

    def test_no_connection_waits_for_the_store(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = api_settings.model_copy(update={"content_delivery": ContentDelivery.REDIRECT})
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            task_id = create(client)
            driver.complete(task_id, CLIP, tmp_path)
            pool = client.app_state["sessions"].kw["bind"].pool
            taken: list[int] = []

            def sign(*arguments: Any) -> str:
                taken.append(pool.checkedout())
                return signed_url(*arguments)

            monkeypatch.setattr("rushes_api.content_link.signed_url", sign)
            assert self.ids(client, **{"filter.task_ids": task_id}) == ([task_id], 1)
            assert taken == [0]

    def test_it_goes_back_seven_days(self, own: TestClient, driver: JobDriver) -> None:
        old, recent = create(own), create(own)
        for task_id, hours in ((old, 7 * 24 + 1), (recent, 7 * 24 - 1)):
            with driver.engine.begin() as connection:
                then = func.now() - timedelta(hours=hours)
                connection.execute(update(Job).where(Job.id == task_id).values(created_at=then))
        assert self.ids(own) == ([recent], 1)
        assert task(own, old)["status"] == "queued"

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("page_num", "0", "page_num must be between 1 and 10000, got '0'"),
            ("page_num", "10001", "got '10001'"),
            ("page_size", "101", "page_size must be between 1 and 100, got '101'"),
            ("page_size", "\u0661", "page_size must be between 1 and 100"),
            (
                "filter.status",
                "in_progress",
                "must be one of queued, running, succeeded, failed, cancelled, expired, got",
            ),
            ("filter.task_type", "video", "filter.task_type must be one of generation, h3_context_ir, regeneration"),
            ("filter.model", "\x00", "filter.model must be the name of a model"),
            ("filter.task_ids", "424010985738629", "filter.task_ids must be ids of tasks, got '4240"),
            (
                "filter.task_ids",
                ",".join(new_video_id() for _ in range(101)),
                "filter.task_ids must be at most 100 ids, got 101",
            ),
            ("limit", "1", "unknown query parameter: limit"),
        ],
    )
    def test_what_is_wrong_is_named(self, client: TestClient, name: str, value: str, message: str) -> None:
        response = client.get(QUERY, params={name: value})
        assert response.status_code == 400
        assert error(response)["param"] == name
        assert message in error(response)["message"]

    def test_a_parameter_that_is_no_list_is_given_once(self, client: TestClient) -> None:
        response = client.get(f"{QUERY}?page_num=1&page_num=2")
        assert error(response)["code"] == "duplicate_parameter"


class TestDelete:
    def test_one_that_waits_is_cancelled(self, client: TestClient) -> None:
        task_id = create(client)
        answer = client.delete(f"{CREATE}/{task_id}")
        assert answer.json() == {"task_id": task_id, "action": "cancelled", "status": "cancelled"}
        assert task(client, task_id)["status"] == "cancelled"
        refused = client.delete(f"{CREATE}/{task_id}")
        assert refused.status_code == 409
        assert f"{task_id} is cancelled" in error(refused)["message"]

    def test_one_that_runs_goes_on(self, client: TestClient, driver: JobDriver) -> None:
        task_id = create(client)
        driver.start(task_id)
        refused = client.delete(f"{CREATE}/{task_id}")
        assert refused.status_code == 409
        assert f"{task_id} is running" in error(refused)["message"]
        job = driver.row(task_id)
        assert job is not None
        assert job.cancel_requested_at is None

    def test_one_that_has_ended_is_deleted(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        done, failed = create(client), create(client)
        driver.complete(done, CLIP, tmp_path)
        driver.fail(failed, code="generation_failed", message="")
        for task_id in (done, failed):
            answer = client.delete(f"{CREATE}/{task_id}")
            assert answer.json() == {"task_id": task_id, "action": "deleted", "status": "deleted"}
            gone = client.get(f"{QUERY}/{task_id}")
            assert gone.status_code == 410
            assert error(gone)["code"] == "video_deleted"
            assert client.delete(f"{CREATE}/{task_id}").status_code == 410

    def test_of_many_at_once_one_does_it(self, api_settings: Settings, driver: JobDriver, tmp_path: Path) -> None:
        with (
            ThreadedApi(api_settings) as api,
            httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=60) as http,
            ThreadPoolExecutor(8) as pool,
        ):
            waiting, done = (http.post(CREATE, json=REQUEST).json()["task_id"] for _ in range(2))
            driver.complete(done, CLIP, tmp_path)
            for task_id, refusal in ((waiting, 409), (done, 410)):
                answers = list(pool.map(lambda path: http.delete(path).status_code, [f"{CREATE}/{task_id}"] * 8))
                assert sorted(answers) == [200, *[refusal] * 7]

    def test_a_commit_without_a_reply_is_answered_as_if_nothing_had_been(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path
    ) -> None:
        url = make_url(api_settings.database_url)
        assert url.host is not None
        assert url.port is not None
        with TcpProxy(url.host, url.port) as proxy:
            by_proxy = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
            settings = api_settings.model_copy(update={"database_url": by_proxy})
            with TestClient(create_app(settings), headers=AUTHORIZED) as client:
                waiting, done = create(client), create(client)
                driver.complete(done, CLIP, tmp_path)
                for task_id, action in ((waiting, "cancelled"), (done, "deleted")):
                    proxy.set(Mode.LOSE_REPLY, budget=1)
                    answer = client.delete(f"{CREATE}/{task_id}")
                    assert answer.json() == {"task_id": task_id, "action": action, "status": action}
                assert proxy.strikes == 2

    def test_one_that_started_when_the_commit_was_lost_is_not_called_cancelled(
        self, client: TestClient, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task_id = create(client)
        note_sent = once.Commit.note_sent

        def lose(commit: once.Commit) -> None:
            note_sent(commit)
            raise OperationalError("COMMIT", {}, psycopg.OperationalError("the connection is lost"))

        async def start_it(seconds: float) -> None:
            driver.start(task_id)

        monkeypatch.setattr(once.Commit, "note_sent", lose)
        monkeypatch.setattr(once, "asyncio", SimpleNamespace(sleep=start_it))
        refused = client.delete(f"{CREATE}/{task_id}")
        assert refused.status_code == 409
        assert f"{task_id} is running" in error(refused)["message"]

    def test_one_that_there_is_not(self, client: TestClient) -> None:
        response = client.delete(f"{CREATE}/{new_video_id()}")
        assert response.status_code == 404
        assert error(response)["code"] == "video_not_found"


class TestOthers:
    def test_tasks_of_another_project_are_none(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        project = create_project(client, f"other-{random.randrange(10**9)}")
        theirs = bearer(create_key(client, project=project))
        task_id = create(client)
        driver.complete(task_id, CLIP, tmp_path)
        assert client.get(f"{QUERY}/{task_id}", headers=theirs).status_code == 404
        assert client.delete(f"{CREATE}/{task_id}", headers=theirs).status_code == 404
        assert client.get(QUERY, headers=theirs).json() == {"items": [], "total": 0}
        assert task(client, task_id)["status"] == "succeeded"

    def test_a_key_that_may_only_read_makes_none(self, client: TestClient) -> None:
        reader = bearer(create_key(client, scopes=["videos:read"]))
        task_id = create(client)
        assert client.get(f"{QUERY}/{task_id}", headers=reader).status_code == 200
        for refused in (
            client.post(CREATE, json=REQUEST, headers=reader),
            client.delete(f"{CREATE}/{task_id}", headers=reader),
        ):
            assert refused.status_code == 403
            assert error(refused)["code"] == "insufficient_scope"
