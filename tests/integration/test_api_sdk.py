"""The API as its own process, driven by the official SDK and by plain HTTP."""

import random
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import openai
import psycopg
import pytest
from openai import OpenAI
from openai.types import Video
from psycopg import sql
from rushes_core.settings import Settings
from sqlalchemy import make_url
from support.api import API_KEY, AUTHORIZED, ApiProcess, JobDriver
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack

# the SDK marks its own videos resource so
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

CLIP = random.Random(8).randbytes(300_000)


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("sdk"))
    return stack.settings(checkpoint=checkpoint, api_key=API_KEY, api_max_body_bytes=100_000)


@pytest.fixture(scope="module")
def server(api_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with ApiProcess(api_settings, tmp_path_factory.mktemp("server") / "api.log") as server:
        yield server


@pytest.fixture(scope="module")
def sdk(server: ApiProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, timeout=30) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def http(server: ApiProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTHORIZED, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def driver(api_settings: Settings) -> Iterator[JobDriver]:
    driver = JobDriver(api_settings)
    yield driver
    driver.close()


class TestSdk:
    def test_a_session(self, sdk: OpenAI, driver: JobDriver, tmp_path: Path) -> None:
        video = sdk.videos.create(
            prompt="a dog\nand a “cat” 😀",
            model="rushes/tiny-fasth3-8-step-demo",
            seconds="8",
            size="1280x720",
            extra_body={"seed": 2**53 + 1, "priority": "bulk", "metadata": {"client": "acme", 'odd "key" [x]': ""}},
        )
        assert (video.object, video.status, video.progress) == ("video", "queued", 0)
        assert (video.seconds, video.size, video.prompt) == ("8", "1344x768", "a dog\nand a “cat” 😀")
        extra = video.model_extra or {}
        assert extra["seed"] == 2**53 + 1
        assert extra["metadata"] == {"client": "acme", 'odd "key" [x]': ""}

        with pytest.raises(openai.ConflictError) as caught:
            sdk.videos.download_content(video.id)
        assert caught.value.code == "video_not_ready"

        driver.complete(video.id, CLIP, tmp_path)
        done = sdk.videos.poll(video.id)
        assert (done.status, done.progress, done.error) == ("completed", 100, None)
        assert sdk.videos.download_content(video.id).read() == CLIP
        remix = sdk.videos.remix(video.id, prompt="a cat")
        assert (remix.remixed_from_video_id, remix.prompt, remix.seconds) == (video.id, "a cat", "8")
        assert sdk.videos.delete(video.id).deleted is True
        with pytest.raises(openai.APIStatusError) as gone:
            sdk.videos.retrieve(video.id)
        assert (gone.value.status_code, gone.value.code) == (410, "video_deleted")

    def test_pictures_are_fetched_as_the_sdk_names_them(self, sdk: OpenAI, driver: JobDriver, tmp_path: Path) -> None:
        video = sdk.videos.create(prompt="a dog")
        beside = {"thumbnail": b"a picture", "spritesheet": b"many pictures", "audio": b"sound"}
        driver.complete(video.id, CLIP, tmp_path, variants=beside)
        assert sdk.videos.download_content(video.id, variant="thumbnail").read() == beside["thumbnail"]
        assert sdk.videos.download_content(video.id, variant="spritesheet").read() == beside["spritesheet"]
        assert sdk.videos.download_content(video.id, extra_query={"variant": "audio"}).read() == beside["audio"]
        assert sdk.videos.download_content(video.id, variant="video").read() == CLIP

    def test_a_call_with_a_key_may_be_repeated(self, sdk: OpenAI, http: httpx.Client) -> None:
        headers = {"Idempotency-Key": "an SDK's"}
        extra = {"metadata": {"b": "1", "a": "2"}, "seed": 7}
        made = [sdk.videos.create(prompt="a dog", seconds="8", extra_body=extra, extra_headers=headers) for _ in "ab"]
        # the older line sends JSON
        as_json = http.post("/v1/videos", json={"prompt": "a dog", "seconds": "8", **extra}, headers=headers)
        assert {video.id for video in made} == {as_json.json()["id"]}
        with pytest.raises(openai.UnprocessableEntityError):
            sdk.videos.create(prompt="a cat", extra_headers=headers)

    def test_a_job_is_cancelled_once_and_retried_once(self, sdk: OpenAI) -> None:
        video = sdk.videos.create(prompt="a dog")
        assert sdk.post(f"/videos/{video.id}/cancel", cast_to=Video).status == "cancelled"
        assert sdk.videos.poll(video.id).status == "cancelled"
        assert sdk.post(f"/videos/{video.id}/retry", cast_to=Video).status == "queued"
        with pytest.raises(openai.ConflictError) as caught:
            sdk.post(f"/videos/{video.id}/retry", cast_to=Video)
        # the SDK did not try again by itself
        assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"

    def test_polling_ends_with_a_failure(self, sdk: OpenAI, driver: JobDriver) -> None:
        video = sdk.videos.create(prompt="a dog")
        driver.fail(video.id, code="generation_failed", message="The clip was blank.")
        failed = sdk.videos.poll(video.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("generation_failed", "The clip was blank.")

    def test_polling_is_paced_by_the_server(self, sdk: OpenAI) -> None:
        video = sdk.videos.create(prompt="a dog")
        hint = sdk.videos.with_raw_response.retrieve(video.id).headers["openai-poll-after-ms"]
        assert 1_000 <= int(hint) <= 10_000

    def test_lists_page_by_themselves(self, sdk: OpenAI) -> None:
        made = [sdk.videos.create(prompt=f"dog {i}").id for i in range(7)]
        found = [video.id for video in sdk.videos.list(limit=3)]
        assert found[:7] == made[::-1]
        assert len(set(found)) == len(found)

    def test_errors_carry_message_code_and_parameter(self, sdk: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.videos.create(prompt="a dog", extra_body={"secnds": 4})
        error = caught.value
        assert (error.code, error.param, error.type) == ("unknown_parameter", "secnds", "invalid_request_error")
        assert "secnds" in error.message
        assert error.request_id

    def test_problem_details_do_not_disturb_it(self, sdk: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="unknown parameter: secnds"):
            sdk.videos.create(
                prompt="x", extra_body={"secnds": 4}, extra_headers={"Accept": "application/problem+json"}
            )

    def test_an_uploaded_reference_is_refused(self, sdk: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.videos.create(prompt="x", input_reference=("a.png", b"\x89PNG", "image/png"))
        assert caught.value.code == "unsupported_input"

    def test_a_wrong_key_is_an_authentication_error(self, server: ApiProcess) -> None:
        with OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as sdk, pytest.raises(openai.AuthenticationError):
            sdk.videos.list()

    def test_files_are_uploaded_listed_fetched_and_deleted(self, sdk: OpenAI) -> None:
        data = random.Random(9).randbytes(6_000_000)
        made = sdk.files.create(file=("夜.jsonl", data), purpose="batch")
        assert (made.object, made.bytes, made.filename, made.status) == ("file", len(data), "夜.jsonl", "processed")
        assert sdk.files.retrieve(made.id) == made
        assert sdk.files.list(limit=1).data == [made]
        assert sdk.files.content(made.id).read() == data
        assert sdk.files.delete(made.id).deleted is True
        with pytest.raises(openai.APIStatusError) as gone:
            sdk.files.content(made.id)
        assert (gone.value.status_code, gone.value.code) == (410, "file_deleted")

    def test_models_are_listed(self, sdk: OpenAI) -> None:
        (model,) = sdk.models.list().data
        assert sdk.models.retrieve(model.id) == model


class TestHttp:
    def test_the_json_body_of_the_older_sdk(self, http: httpx.Client) -> None:
        response = http.post("/v1/videos", json={"prompt": "a dog", "seconds": "4", "size": "720x1280", "seed": 5})
        assert response.status_code == 200
        assert (response.json()["size"], response.json()["seed"]) == ("768x1344", 5)

    @pytest.mark.parametrize("is_chunked", [False, True])
    def test_a_body_that_is_too_large_is_answered(self, http: httpx.Client, is_chunked: bool) -> None:
        body = (b"x" * 65_536 for _ in range(64)) if is_chunked else b"x" * 4_194_304
        response = http.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "file_too_large"
        # the connection is still in step
        assert http.get("/healthz").status_code == 200

    def test_a_path_that_cannot_be_decoded_is_not_found(self, http: httpx.Client) -> None:
        assert http.get("/v1/videos/%ff%fe").status_code == 404
        assert http.get("/%ed%a0%80").status_code == 404

    def test_the_log_holds_no_key(self, server: ApiProcess, http: httpx.Client) -> None:
        http.get("/v1/videos", headers={"Authorization": "Bearer another-key"})
        log = server.log.read_text()
        assert "api_started" in log
        assert API_KEY not in log
        assert "another-key" not in log


def test_any_process_serves_any_job(
    server: ApiProcess, api_settings: Settings, driver: JobDriver, tmp_path: Path
) -> None:
    with httpx.Client(headers=AUTHORIZED, timeout=30) as http:
        with ApiProcess(api_settings, tmp_path / "a.log") as first:
            video_id = http.post(f"{first.url}/v1/videos", json={"prompt": "a dog"}).json()["id"]
            at_second = f"{server.url}/v1/videos/{video_id}"
            assert http.get(at_second).json()["status"] == "queued"
        driver.complete(video_id, CLIP, tmp_path)
        with ApiProcess(api_settings, tmp_path / "b.log") as restarted:
            assert http.get(f"{restarted.url}/v1/videos/{video_id}").json()["status"] == "completed"
            assert http.get(f"{at_second}/content").content == CLIP
            listed = http.get(f"{server.url}/v1/videos?limit=1").json()
            assert listed["first_id"] == video_id
            assert http.delete(at_second).json()["deleted"] is True
            assert http.get(f"{restarted.url}/v1/videos/{video_id}").status_code == 410


def test_times_are_the_same_wherever_a_process_or_a_database_lives(
    stack: SharedStack, api_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = stack.settings(checkpoint=api_settings.checkpoint, api_key=API_KEY)
    url = make_url(settings.database_url).set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as connection:
        name = sql.Identifier(url.database or "")
        connection.execute(sql.SQL("ALTER DATABASE {} SET timezone = 'Asia/Kolkata'").format(name))
    monkeypatch.setenv("TZ", "America/St_Johns")
    driver = JobDriver(settings)
    began = int(time.time())
    with ApiProcess(settings, tmp_path / "far.log") as server, httpx.Client(headers=AUTHORIZED, timeout=30) as http:
        deadline = datetime.fromtimestamp(began + 7_200, timezone(timedelta(hours=-9))).isoformat()
        times = {"not_before": began + 3_600, "deadline": deadline}
        later = http.post(f"{server.url}/v1/videos", json={"prompt": "a dog", **times}).json()
        assert (later["not_before"], later["deadline"]) == (began + 3_600, began + 7_200)
        video_id = http.post(f"{server.url}/v1/videos", json={"prompt": "a dog"}).json()["id"]
        driver.complete(video_id, CLIP, tmp_path)
        video = http.get(f"{server.url}/v1/videos/{video_id}").json()
        (attempt,) = http.get(f"{server.url}/v1/videos/{video_id}/attempts").json()["data"]
        told = [video["created_at"], attempt["claimed_at"], attempt["started_at"], video["completed_at"]]
        assert told == sorted(told)
        assert began <= told[0] <= told[-1] <= time.time()
        query = {"created_after": began - 1, "created_before": int(time.time()) + 1}
        found = http.get(f"{server.url}/v1/videos", params=query).json()["data"]
        assert [one["id"] for one in found] == [video_id, later["id"]]
    driver.close()
