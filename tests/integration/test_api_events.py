"""The events of a job: as they happen, after a pause, and while something behind the API is missing."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rushes_api.routers import events
from rushes_core.events import stories_of
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState, Phase
from sqlalchemy import update
from sqlalchemy.orm import Session
from support.api import API_KEY, AUTHORIZED, ApiProcess, JobDriver, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.event_stream import events_of
from support.stack import SharedStack
from support.waiting import wait_until
from support.worker import SCRIPTED, Jobs, Worker, eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, checkpoint: Path) -> Settings:
    return stack.settings(checkpoint=checkpoint, api_key=API_KEY)


def connected(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=AUTHORIZED, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def http(api_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("log") / "api.log"
    with ApiProcess(api_settings, log) as api, connected(api.url) as client:
        yield client


def posted(client: httpx.Client, **fields: str) -> str:
    response = client.post("/v1/videos", json={"prompt": "a dog", "size": "480x480", **fields})
    assert response.status_code == 200, response.text
    video_id: str = response.json()["id"]
    return video_id


class TestWhileItHappens:
    def test_a_job_is_told_from_the_queue_to_its_end(
        self, http: httpx.Client, driver: JobDriver, tmp_path: Path
    ) -> None:
        video_id = posted(http)
        with events_of(http, video_id) as stream:
            first = stream.next()
            assert stream.retry_ms == 2_000
            assert (first.name, first.data["status"], first.id) == ("status", "queued", "1")
            job = driver.start(video_id)
            assert stream.next("status").data["status"] == "in_progress"
            driver.report(job, phase="denoising", completed_steps=3, progress=31)
            event = stream.next("progress")
            while event.data["phase"] is None:
                event = stream.next("progress")
            assert event.id is None
            assert event.data | {"total_steps": 8} == {
                "id": video_id,
                "status": "in_progress",
                "phase": "denoising",
                "progress": 31,
                "completed_steps": 3,
                "total_steps": 8,
                "generation": 1,
                "attempt": 1,
                "cancel_requested_at": None,
            }
            driver.finish(job, b"clip", tmp_path)
            *_, last = stream
        assert (last.name, last.data["status"], last.data["progress"]) == ("status", "completed", 100)
        assert last.data == http.get(f"/v1/videos/{video_id}").json()

    def test_a_request_to_cancel_a_running_job_is_told_as_progress(self, http: httpx.Client, driver: JobDriver) -> None:
        video_id = posted(http)
        driver.start(video_id)
        with events_of(http, video_id) as stream:
            assert stream.next("progress").data["cancel_requested_at"] is None
            http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
            assert stream.next("progress").data["cancel_requested_at"] is not None

    def test_a_job_whose_worker_was_lost_is_told_to_wait_again(self, http: httpx.Client, driver: JobDriver) -> None:
        video_id = posted(http)
        with events_of(http, video_id) as stream:
            stream.next("status")
            driver.lose(video_id)
            seen = [stream.next("status").data for _ in range(2)]
        assert [data["status"] for data in seen] == ["in_progress", "queued"]
        assert seen[1]["queue"]["reason"] == "retrying"

    def test_a_deletion_is_the_last_event(self, http: httpx.Client) -> None:
        video_id = posted(http)
        with events_of(http, video_id) as stream:
            stream.next("status")
            http.delete(f"/v1/videos/{video_id}").raise_for_status()
            last = stream.next("deleted")
            assert last.data == {"id": video_id, "object": "video.deleted", "deleted": True}
            assert list(stream) == []
        again = http.get(f"/v1/videos/{video_id}/events")
        assert (again.status_code, again.json()["error"]["code"]) == (410, "video_deleted")

    def test_any_process_tells_of_any_job(
        self, http: httpx.Client, driver: JobDriver, api_settings: Settings, tmp_path: Path
    ) -> None:
        with ApiProcess(api_settings, tmp_path / "api.log") as api, connected(api.url) as other:
            video_id = posted(http)
            with events_of(other, video_id) as stream:
                stream.next("status")
                http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
                assert stream.next("status").data["error"]["code"] == "cancelled_by_user"


class TestAfterAPause:
    def test_statuses_that_were_missed_are_told(self, http: httpx.Client, driver: JobDriver, tmp_path: Path) -> None:
        video_id = posted(http)
        with events_of(http, video_id) as stream:
            place = stream.next("status").id
        driver.complete(video_id, b"clip", tmp_path)
        with events_of(http, video_id, last=place) as stream:
            missed = list(stream)
        assert [(event.name, event.data["status"]) for event in missed] == [
            ("status", "in_progress"),
            ("status", "completed"),
        ]
        assert [event.data["progress"] for event in missed] == [99, 100]
        assert missed[0].data["output"]["bytes"] is None
        assert int(missed[0].id or "") < int(missed[1].id or "")

    def test_progress_does_not_fall_with_a_worker_that_gives_its_job_back(
        self, http: httpx.Client, driver: JobDriver
    ) -> None:
        video_id = posted(http)
        job = driver.start(video_id)
        driver.report(job, phase="denoising", completed_steps=4, progress=40)
        driver.release(job)
        driver.start(video_id)
        with events_of(http, video_id, last="0") as stream:
            seen = [stream.next("status").data for _ in range(4)]
            assert stream.next("progress").data["progress"] == 40
        assert [data["status"] for data in seen] == ["queued", "in_progress", "queued", "in_progress"]
        assert [data["progress"] for data in seen] == [0, 40, 40, 40]
        http.delete(f"/v1/videos/{video_id}").raise_for_status()

    def test_nothing_is_told_twice(self, http: httpx.Client, driver: JobDriver) -> None:
        video_id = posted(http)
        driver.start(video_id)
        with events_of(http, video_id) as stream:
            place = stream.next("status").id
        with events_of(http, video_id, last=place) as stream:
            assert stream.next().name == "progress"
            http.delete(f"/v1/videos/{video_id}").raise_for_status()
            assert "status" not in {event.name for event in stream}

    def test_a_stream_of_a_job_that_ended_is_not_opened_again(self, http: httpx.Client) -> None:
        video_id = posted(http)
        http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
        with events_of(http, video_id) as stream:
            (last,) = stream
        assert last.data["status"] == "cancelled"
        again = http.get(f"/v1/videos/{video_id}/events", headers={"Last-Event-ID": last.id or ""})
        assert (again.status_code, again.content) == (204, b"")

    def test_of_a_job_that_was_retried_only_the_last_life_is_told(self, http: httpx.Client, driver: JobDriver) -> None:
        video_id = posted(http)
        driver.fail(video_id, code="generation_failed", message="no")
        http.post(f"/v1/videos/{video_id}/retry").raise_for_status()
        with events_of(http, video_id, last="1") as stream:
            first = stream.next()
            assert (first.data["status"], first.data["generation"], first.data["progress"]) == ("queued", 2, 0)
            http.post(f"/v1/videos/{video_id}/cancel").raise_for_status()
            (last,) = stream
        assert last.data["status"] == "cancelled"

    @pytest.mark.parametrize("sent", ["x", "-1", "1.5", "٣", "1" * 10, "1, 2"])
    def test_what_is_no_id_of_an_event_is_refused(self, http: httpx.Client, sent: str) -> None:
        headers = {"Last-Event-ID": sent.encode()}
        response = http.get(f"/v1/videos/{posted(http)}/events", headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Last-Event-ID"


class TestWhoMayListen:
    def test_a_job_that_is_not_there(self, http: httpx.Client) -> None:
        for video_id in (new_video_id(), "video_x"):
            response = http.get(f"/v1/videos/{video_id}/events")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "video_not_found")

    def test_a_job_of_another_project_is_not_there(self, http: httpx.Client, driver: JobDriver) -> None:
        video_id = posted(http)
        with Session(driver.engine) as session, session.begin():
            session.execute(update(Job).where(Job.id == video_id).values(project="another"))
        assert http.get(f"/v1/videos/{video_id}/events").status_code == 404
        # what the database does not even send takes no time that could tell of it
        asked = [(video_id, "default"), (video_id, "nobody"), (posted(http), "default")]
        with Session(driver.engine) as session:
            assert [job.id for job, _ in session.execute(stories_of(asked))] == [asked[2][0]]

    def test_a_key_and_a_process_have_a_bounded_number_of_streams(self, api_settings: Settings) -> None:
        settings = api_settings.model_copy(update={"api_max_waiting": 2, "api_max_waiting_per_key": 1})
        with ThreadedApi(settings) as api, connected(api.url) as client:
            video_id = posted(client)
            with events_of(client, video_id) as stream:
                stream.next()
                refused = client.get(f"/v1/videos/{video_id}/events")
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                assert 1 <= int(refused.headers["retry-after"]) <= 60
            # whoever goes away leaves the place to the next
            wait_until(lambda: opens(client, video_id))
        settings = api_settings.model_copy(update={"api_max_waiting": 1})
        with ThreadedApi(settings) as api, connected(api.url) as client, events_of(client, video_id) as stream:
            stream.next()
            refused = client.get(f"/v1/videos/{video_id}/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")


def opens(client: httpx.Client, video_id: str) -> bool:
    with client.stream("GET", f"/v1/videos/{video_id}/events") as response:
        return response.status_code == 200


class TestWhenSomethingIsMissing:
    def test_it_beats_while_there_is_nothing_to_tell(
        self, api_settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "BEAT_SECONDS", 0.1)
        with (
            ThreadedApi(api_settings) as api,
            connected(api.url) as client,
            events_of(client, posted(client)) as stream,
        ):
            stream.next()
            stream.next_comment()
            stream.next_comment()

    def test_an_outage_of_the_database_is_outlived(
        self, api_settings: Settings, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "BEAT_SECONDS", 0.1)
        rows = Jobs(api_settings)
        with ThreadedApi(api_settings) as api, connected(api.url) as client:
            video_id = posted(client)
            with events_of(client, video_id) as stream:
                stream.next()
                with rows.outage():
                    assert client.get(f"/v1/videos/{video_id}/events").status_code == 503
                    for _ in range(5):
                        stream.next_comment()
                eventually(lambda: client.post(f"/v1/videos/{video_id}/cancel").status_code == 200)
                assert stream.next("status").data["status"] == "cancelled"
        rows.close()

    def test_a_process_that_is_asked_to_stop_ends_its_streams(self, api_settings: Settings, tmp_path: Path) -> None:
        with (
            ApiProcess(api_settings, tmp_path / "api.log") as api,
            connected(api.url) as client,
            events_of(client, posted(client)) as stream,
        ):
            stream.next()
            api.end()
            assert list(stream) == []


def test_a_real_worker_is_followed_to_the_end(
    stack: SharedStack, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("worker")
    settings = stack.settings(
        checkpoint=checkpoint, api_key=API_KEY, pipeline=SCRIPTED, scratch=folder / "scratch", poll_seconds=0.1
    )
    rows = Jobs(settings)
    with (
        ThreadedApi(settings) as api,
        Worker(settings, folder / "worker.log"),
        connected(api.url) as client,
        events_of(client, posted(client, prompt="a dog [step 0.3]")) as stream,
    ):
        seen = list(stream)
    rows.close()
    statuses = [event.data["status"] for event in seen if event.name == "status"]
    assert statuses == ["queued", "in_progress", "completed"]
    progress = [event.data["progress"] for event in seen if event.name == "progress"]
    assert progress == sorted(progress)
    assert max(progress) < 100
    steps = [event.data["completed_steps"] for event in seen if event.name == "progress"]
    assert steps == sorted(steps)
    # what is over between two looks is not told
    assert len(set(steps) & set(range(1, 9))) > 1
    phases = [Phase(event.data["phase"]) for event in seen if event.name == "progress" and event.data["phase"]]
    assert Phase.DENOISING in phases
    assert phases == sorted(phases, key=list(Phase).index)
    assert seen[-1].data["status"] == JobState.COMPLETED
