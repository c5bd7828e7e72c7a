"""Answers that wait for the end of a job: `Prefer: wait=N` and `/v1/videos/sync`."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from rushes_api.routers.sync import CLIENT_GONE
from rushes_api.waiting import preferred_wait
from rushes_core.ids import new_video_id
from rushes_core.settings import ContentDelivery, Settings
from structlog.testing import capture_logs
from support.api import API_KEY, AUTHORIZED, ApiProcess, JobDriver, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack
from support.waiting import wait_until
from support.worker import SCRIPTED, Jobs, Worker

REQUEST = {"prompt": "a dog", "size": "480x480"}


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("wait")), api_key=API_KEY)


@pytest.fixture(scope="module")
def api(api_settings: Settings) -> Iterator[ThreadedApi]:
    with ThreadedApi(api_settings) as api:
        yield api


@pytest.fixture(scope="module")
def http(api: ThreadedApi) -> Iterator[httpx.Client]:
    with connected(api.url) as client:
        yield client


def connected(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=AUTHORIZED, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def later() -> Iterator[Callable[..., "Future[httpx.Response]"]]:
    """Starts a request and goes on."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def num_waiting(api: ThreadedApi) -> int:
    found: int = api.state["watcher"].num_waiting
    return found


def newest(http: httpx.Client) -> dict[str, Any]:
    """The newest video; empty if there is none."""
    (video,) = http.get("/v1/videos", params={"limit": 1}).json()["data"] or [{}]
    found: dict[str, Any] = video
    return found


def accepted(later: Callable[..., Any], http: httpx.Client, path: str, **sent: Any) -> tuple[Any, str]:
    """The answer to come of a request that waits for the job that it makes, and the id of the job."""
    before = newest(http).get("id")
    answer = later(http.post, path, **sent)
    wait_until(lambda: newest(http).get("id") != before)
    return answer, newest(http)["id"]


def left(api: ThreadedApi, http: httpx.Client, path: str, **headers: str) -> str:
    """Send a request that waits for the job that it makes, and hang up while it does; the id of the job."""
    before = newest(http).get("id")
    parts, body = urlsplit(api.url), json.dumps(REQUEST)
    sent = {**AUTHORIZED, "Host": "a", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", body]
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as peer:
        peer.sendall("\r\n".join(lines).encode())
        wait_until(lambda: newest(http).get("id") != before and num_waiting(api))
    return newest(http)["id"]


class TestPreferences:
    @pytest.mark.parametrize(
        ("sent", "seconds"),
        [
            (["wait=1"], 1),
            (["wait=60"], 60),
            (["Wait = 5"], 5),
            (['wait="7"'], 7),
            (["respond-async, wait=3"], 3),
            (["respond-async", "wait=3"], 3),
            (['foo="a,wait=9"; bar, wait=4; x=y'], 4),
            (["wait=4, wait=5"], 4),
            ([], None),
            (["wait"], None),
            (["wait="], None),
            (["wait=0"], None),
            (["wait=61"], None),
            (["wait=-1"], None),
            (["wait=1.5"], None),
            (["wait=٣"], None),
            (["wait=x, wait=5"], None),
            (["waiting=5"], None),
            (['"wait=5'], None),
            (['wait=5, "'], 5),
            (['"' + 15_000 * '\\"' + ", wait=5"], None),
        ],
    )
    def test_only_a_wait_that_is_served_counts(self, sent: list[str], seconds: int | None) -> None:
        assert preferred_wait(sent) == seconds


class TestPrefer:
    def test_a_new_job_is_answered_when_it_has_ended(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        answer, video_id = accepted(later, http, "/v1/videos", json=REQUEST, headers={"Prefer": "wait=60"})
        driver.complete(video_id, b"clip", tmp_path)
        response = answer.result()
        assert response.headers["preference-applied"] == "wait=60"
        assert response.json()["status"] == "completed"
        assert response.json()["output"]["bytes"] == 4

    def test_a_job_that_goes_on_is_answered_when_the_time_has_passed(self, http: httpx.Client) -> None:
        response = http.post("/v1/videos", json=REQUEST, headers={"Prefer": "wait=1"})
        assert (response.status_code, response.json()["status"]) == (200, "queued")
        assert response.headers["preference-applied"] == "wait=1"

    def test_a_job_is_looked_at_again_when_the_time_has_passed(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, later: Callable[..., Any]
    ) -> None:
        video_id = http.post("/v1/videos", json=REQUEST).json()["id"]
        answer = later(http.get, f"/v1/videos/{video_id}", headers={"Prefer": "wait=5"})
        wait_until(lambda: num_waiting(api))
        driver.report(driver.start(video_id), phase="denoising", completed_steps=2, progress=20)
        assert answer.result().json()["progress_detail"]["completed_steps"] == 2

    def test_a_job_that_has_ended_is_not_waited_for(self, http: httpx.Client) -> None:
        video_id = http.post("/v1/videos", json=REQUEST).json()["id"]
        http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
        response = http.get(f"/v1/videos/{video_id}", headers={"Prefer": "wait=60"})
        assert response.json()["status"] == "cancelled"
        assert "preference-applied" in response.headers

    def test_a_job_that_is_deleted_meanwhile_is_gone(
        self, http: httpx.Client, api: ThreadedApi, later: Callable[..., Any]
    ) -> None:
        video_id = http.post("/v1/videos", json=REQUEST).json()["id"]
        answer = later(http.get, f"/v1/videos/{video_id}", headers={"Prefer": "wait=60"})
        wait_until(lambda: num_waiting(api))
        http.delete(f"/v1/videos/{video_id}").raise_for_status()
        assert answer.result().status_code == 410

    def test_what_is_not_there_is_not_waited_for(self, http: httpx.Client) -> None:
        for video_id in (new_video_id(), "video_x"):
            response = http.get(f"/v1/videos/{video_id}", headers={"Prefer": "wait=60"})
            assert response.status_code == 404
            assert "preference-applied" not in response.headers

    def test_the_answer_that_a_key_keeps_is_the_immediate_one(
        self, http: httpx.Client, api: ThreadedApi, later: Callable[..., Any]
    ) -> None:
        sent = {"Idempotency-Key": "waits", "Prefer": "wait=60"}
        answer, video_id = accepted(later, http, "/v1/videos", json=REQUEST, headers=sent)
        http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
        assert answer.result().json()["status"] == "cancelled"
        kept = http.post("/v1/videos", json=REQUEST, headers={"Idempotency-Key": "waits"})
        assert (kept.json()["id"], kept.json()["status"]) == (video_id, "queued")
        again = http.post("/v1/videos", json=REQUEST, headers=sent)
        assert (again.json()["id"], again.json()["status"]) == (video_id, "cancelled")
        assert again.headers["idempotent-replayed"] == "true"

    def test_who_finds_no_seat_is_answered_at_once(self, api_settings: Settings) -> None:
        full = api_settings.model_copy(update={"api_max_waiting_per_key": 1})
        with ThreadedApi(full) as api, connected(api.url) as client:
            video_id = client.post("/v1/videos", json=REQUEST).json()["id"]
            with client.stream("GET", f"/v1/videos/{video_id}/events"):
                wait_until(lambda: num_waiting(api))
                for response in (
                    client.post("/v1/videos", json=REQUEST, headers={"Prefer": "wait=60"}),
                    client.get(f"/v1/videos/{video_id}", headers={"Prefer": "wait=60"}),
                ):
                    assert (response.status_code, response.json()["status"]) == (200, "queued")
                    assert "preference-applied" not in response.headers

    def test_a_client_that_goes_away_leaves_its_seat(self, http: httpx.Client, api: ThreadedApi) -> None:
        left(api, http, "/v1/videos", Prefer="wait=60")
        wait_until(lambda: not num_waiting(api))

    def test_no_connection_is_held_while_requests_wait(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, later: Callable[..., Any]
    ) -> None:
        waiting = [later(http.post, "/v1/videos", json=REQUEST, headers={"Prefer": "wait=60"}) for _ in range(3)]
        wait_until(lambda: num_waiting(api) == 3)
        pool = api.state["sessions"].kw["bind"].pool
        wait_until(lambda: pool.checkedout() == 0)
        for video in http.get("/v1/videos", params={"limit": 3}).json()["data"]:
            http.post(f"/v1/videos/{video['id']}/cancel").raise_for_status()
        assert {answer.result().json()["status"] for answer in waiting} == {"cancelled"}


class TestSync:
    def test_the_answer_is_the_clip(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        answer, video_id = accepted(later, http, "/v1/videos/sync", data=REQUEST, headers={"Range": "bytes=0-1"})
        driver.complete(video_id, b"clip", tmp_path)
        response = answer.result()
        assert (response.status_code, response.content) == (200, b"clip")
        assert response.headers["content-type"] == "video/mp4"
        assert response.headers["x-video-id"] == video_id
        assert float(response.headers["x-inference-time-s"]) >= 0

    def test_a_store_that_clips_are_fetched_from_is_pointed_at(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        settings = api_settings.model_copy(update={"content_delivery": ContentDelivery.REDIRECT})
        with ThreadedApi(settings) as api, connected(api.url) as client:
            answer, video_id = accepted(later, client, "/v1/videos/sync", json=REQUEST)
            driver.complete(video_id, b"clip", tmp_path)
            response = answer.result()
        assert response.status_code == 303
        assert httpx.get(response.headers["location"], timeout=60).content == b"clip"

    def test_the_error_of_a_job_is_that_of_the_request(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, later: Callable[..., Any]
    ) -> None:
        answer, video_id = accepted(later, http, "/v1/videos/sync", json=REQUEST)
        driver.fail(video_id, code="out_of_memory", message="The job ran out of device memory.")
        response = answer.result()
        assert (response.status_code, response.json()["error"]["code"]) == (409, "out_of_memory")
        assert response.headers["x-video-id"] == video_id
        assert response.headers["x-should-retry"] == "false"

    def test_a_job_that_takes_longer_goes_on_and_is_named(self, api_settings: Settings) -> None:
        settings = api_settings.model_copy(update={"sync_timeout_seconds": 1})
        with ThreadedApi(settings) as api, connected(api.url) as client:
            response = client.post("/v1/videos/sync", json=REQUEST)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "sync_timeout")
            assert response.headers["x-should-retry"] == "false"
            video_id = response.headers["x-video-id"]
            assert video_id in response.json()["error"]["message"]
            assert client.get(f"/v1/videos/{video_id}").json()["status"] == "queued"

    def test_a_store_that_is_away_does_not_have_the_job_made_again(
        self, api_settings: Settings, driver: JobDriver, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        settings = api_settings.model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"})
        with ThreadedApi(settings) as api, connected(api.url) as client:
            for key, may_retry in ({}, "false"), ({"Idempotency-Key": "stored"}, "true"):
                answer, video_id = accepted(later, client, "/v1/videos/sync", json=REQUEST, headers=key)
                driver.complete(video_id, b"clip", tmp_path)
                response = answer.result()
                assert (response.status_code, response.json()["error"]["code"]) == (503, "storage_unavailable")
                assert response.headers["x-should-retry"] == may_retry

    def test_a_database_that_goes_away_leaves_the_job_as_it_is(
        self, api_settings: Settings, driver: JobDriver, later: Callable[..., Any]
    ) -> None:
        settings, rows = api_settings.model_copy(update={"sync_timeout_seconds": 10}), Jobs(api_settings)
        with ThreadedApi(settings) as api, connected(api.url) as client:
            sync, video_id = accepted(later, client, "/v1/videos/sync", json=REQUEST)
            prefer, _ = accepted(later, client, "/v1/videos", json=REQUEST, headers={"Prefer": "wait=10"})
            with rows.outage():
                failed, shown = sync.result(), prefer.result()
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "database_unavailable")
            assert (failed.headers["x-video-id"], failed.headers["x-should-retry"]) == (video_id, "false")
            # that it was accepted is known, whatever cannot be asked now
            assert (shown.status_code, shown.json()["status"]) == (200, "queued")
        rows.close()

    def test_a_job_outlives_its_client(self, http: httpx.Client, api: ThreadedApi) -> None:
        with capture_logs() as logs:
            video_id = left(api, http, "/v1/videos/sync")
            wait_until(lambda: any(one.get("path") == "/v1/videos/sync" for one in logs))
        assert not num_waiting(api)
        assert http.get(f"/v1/videos/{video_id}").json()["status"] == "queued"
        assert [one["status"] for one in logs if one.get("path") == "/v1/videos/sync"] == [CLIENT_GONE]
        assert not [one for one in logs if one["event"] == "request_refused"]

    def test_a_request_that_is_sent_again_waits_for_the_same_job(
        self, http: httpx.Client, api: ThreadedApi, driver: JobDriver, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        sent = {"Idempotency-Key": "once"}
        video_id = left(api, http, "/v1/videos/sync", **sent)
        wait_until(lambda: not num_waiting(api))
        answer = later(http.post, "/v1/videos/sync", json=REQUEST, headers=sent)
        wait_until(lambda: num_waiting(api))
        driver.complete(video_id, b"clip", tmp_path)
        assert answer.result().headers["x-video-id"] == video_id

    def test_who_finds_no_seat_makes_no_job(self, api_settings: Settings, driver: JobDriver) -> None:
        full = api_settings.model_copy(update={"api_max_waiting_per_key": 1})
        with ThreadedApi(full) as api, connected(api.url) as client:
            video_id = client.post("/v1/videos", json=REQUEST).json()["id"]
            with client.stream("GET", f"/v1/videos/{video_id}/events"):
                wait_until(lambda: num_waiting(api))
                rows = driver.num_rows()
                assert client.post("/v1/videos/sync", json=REQUEST).status_code == 429
                assert driver.num_rows() == rows

    def test_a_process_that_is_asked_to_stop_lets_those_who_wait_go(
        self, api_settings: Settings, tmp_path: Path, later: Callable[..., Any]
    ) -> None:
        with ApiProcess(api_settings, tmp_path / "api.log") as process, connected(process.url) as client:
            sync, _ = accepted(later, client, "/v1/videos/sync", json=REQUEST)
            prefer, _ = accepted(later, client, "/v1/videos", json=REQUEST, headers={"Prefer": "wait=60"})
            process.end()
            assert sync.result().json()["error"]["code"] == "sync_timeout"
            assert prefer.result().json()["status"] == "queued"


def test_a_real_worker_is_waited_for(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("worker")
    settings = stack.settings(
        checkpoint=tiny_checkpoint(folder),
        api_key=API_KEY,
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
    )
    rows = Jobs(settings)
    with ThreadedApi(settings) as api, Worker(settings, folder / "worker.log"), connected(api.url) as client:
        rows.wait_ready()
        clip = client.post("/v1/videos/sync", json=REQUEST)
        assert (clip.status_code, clip.content[4:8]) == (200, b"ftyp")
        video = client.post("/v1/videos", json=REQUEST, headers={"Prefer": "wait=60"}).json()
        assert (video["status"], video["progress"]) == ("completed", 100)
        failed = client.post("/v1/videos/sync", json=REQUEST | {"prompt": "a dog [invalid]"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (409, "invalid_request")
    rows.close()
