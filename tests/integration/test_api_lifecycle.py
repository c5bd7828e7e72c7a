"""What a client does to a job after it was accepted, and the times that it may set: cancel, retry, attempts, expiry."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from rushes_api.app import create_app
from rushes_core import jobs, leftovers
from rushes_core.ids import new_video_id
from rushes_core.models import Job, JobAttempt
from rushes_core.settings import Settings
from sqlalchemy import func, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import AUTHORIZED, ApiProcess, JobDriver


def create(client: TestClient | httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/videos", json={"prompt": "a dog", **body}, headers=headers)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def get(client: TestClient, video_id: str) -> dict[str, Any]:
    response = client.get(f"/v1/videos/{video_id}")
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def act(client: TestClient, video_id: str, what: str) -> dict[str, Any]:
    response = client.post(f"/v1/videos/{video_id}/{what}")
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def attempts(client: TestClient, video_id: str, query: str = "") -> dict[str, Any]:
    response = client.get(f"/v1/videos/{video_id}/attempts{query}")
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


def confirm_cancel(driver: JobDriver, job: Job) -> None:
    assert job.fence is not None
    execute(driver, jobs.confirm_cancel(job.id, fence=job.fence))


def execute(driver: JobDriver, statement: Any) -> None:
    with Session(driver.engine) as session, session.begin():
        session.execute(statement)


def refused(response: Any) -> str:
    assert response.status_code == 409, response.text
    assert response.json()["error"]["code"] == "invalid_state"
    assert response.headers["x-should-retry"] == "false"
    message: str = response.json()["error"]["message"]
    return message


class TestCancel:
    def test_a_waiting_one_is_cancelled_at_once_and_never_runs(self, client: TestClient, driver: JobDriver) -> None:
        first, second, third = (create(client, priority="interactive")["id"] for _ in range(3))
        for video_id in (first, second):
            cancelled = act(client, video_id, "cancel")
            assert (cancelled["id"], cancelled["status"]) == (video_id, "cancelled")
            assert cancelled["error"]["code"] == "cancelled_by_user"
            assert cancelled["cancel_requested_at"] >= cancelled["created_at"]
        assert driver.claim(third).id == third
        assert attempts(client, first)["data"] == attempts(client, second)["data"] == []

    def test_a_running_one_goes_on_until_its_worker_has_stopped(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        job = driver.start(video_id)
        asked = act(client, video_id, "cancel")
        assert (asked["status"], asked["error"]) == ("in_progress", None)
        assert asked["cancel_requested_at"] is not None
        confirm_cancel(driver, job)
        cancelled = get(client, video_id)
        assert (cancelled["status"], cancelled["error"]["code"]) == ("cancelled", "cancelled_by_user")

    def test_twice_is_as_good_as_once(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        assert act(client, video_id, "cancel") == act(client, video_id, "cancel")
        video_id = create(client)["id"]
        driver.start(video_id)
        assert act(client, video_id, "cancel") == act(client, video_id, "cancel")

    def test_one_that_has_ended_stays_as_it_is(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        done, failed, expired = (create(client)["id"] for _ in range(3))
        driver.complete(done, b"clip", tmp_path)
        driver.fail(failed, code="generation_failed", message="no")
        execute(driver, update(Job).where(Job.id == expired).values(deadline_at=func.now()))
        execute(driver, jobs.expire())
        for video_id, status in ((done, "completed"), (failed, "failed"), (expired, "expired")):
            before = get(client, video_id)
            assert before["status"] == status
            assert status in refused(client.post(f"/v1/videos/{video_id}/cancel"))
            assert get(client, video_id) == before


class TestRetry:
    def test_a_failed_one_starts_again_under_its_id(
        self, client: TestClient, driver: JobDriver, tmp_path: Path
    ) -> None:
        created = create(client, seed=7, metadata={"a": "b"}, priority="interactive")
        video_id = created["id"]
        driver.fail(video_id, code="generation_failed", message="no")
        queued = act(client, video_id, "retry")
        # nothing of the first generation is left but its history
        assert queued == created | {"generation": 2}
        driver.complete(video_id, b"clip", tmp_path)
        done = get(client, video_id)
        assert (done["status"], done["generation"], done["attempt"]) == ("completed", 2, 1)
        assert client.get(f"/v1/videos/{video_id}/content").content == b"clip"
        assert [(a["generation"], a["attempt"]) for a in attempts(client, video_id)["data"]] == [(1, 1), (2, 1)]

    def test_a_cancelled_one_starts_again(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        act(client, video_id, "cancel")
        queued = act(client, video_id, "retry")
        assert (queued["status"], queued["cancel_requested_at"], queued["error"]) == ("queued", None, None)
        driver.claim(video_id)

    def test_an_expired_one_starts_again_without_its_deadline(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client, deadline=time.time() + 600)["id"]
        execute(driver, update(Job).where(Job.id == video_id).values(deadline_at=func.now()))
        execute(driver, jobs.expire())
        queued = act(client, video_id, "retry")
        assert (queued["status"], queued["deadline"]) == ("queued", None)

    def test_what_goes_on_or_is_completed_is_not_started_again(
        self, client: TestClient, driver: JobDriver, tmp_path: Path
    ) -> None:
        waiting, running, done = (create(client)["id"] for _ in range(3))
        driver.start(running)
        driver.complete(done, b"clip", tmp_path)
        # to wait helps where the job may yet fail
        for video_id, status, wait in (
            (waiting, "queued", "1"),
            (running, "in_progress", "1"),
            (done, "completed", None),
        ):
            response = client.post(f"/v1/videos/{video_id}/retry")
            assert status in refused(response)
            assert response.headers.get("retry-after") == wait
            assert get(client, video_id)["generation"] == 1

    def test_only_the_first_of_two_starts_it(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.fail(video_id, code="generation_failed", message="no")
        act(client, video_id, "retry")
        assert "queued" in refused(client.post(f"/v1/videos/{video_id}/retry"))
        assert get(client, video_id)["generation"] == 2


class TestAttempts:
    def test_each_is_told_with_its_end(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.lose(video_id)
        retrying = get(client, video_id)
        assert (retrying["status"], retrying["queue"]["reason"], retrying["attempt"]) == ("queued", "retrying", 1)
        driver.start(video_id)
        page = attempts(client, video_id)
        assert (page["object"], page["has_more"]) == ("list", False)
        lost, running = page["data"]
        assert (page["first_id"], page["last_id"]) == (lost["id"], running["id"])
        assert (lost["object"], lost["status"], lost["crashed"]) == ("video.attempt", "requeued", True)
        assert lost["error"]["code"] == "worker_lost"
        assert lost["claimed_at"] <= lost["started_at"] <= lost["finished_at"]
        assert (running["generation"], running["attempt"], running["status"]) == (1, 2, "in_progress")
        assert running["finished_at"] is running["error"] is None

    def test_a_worker_has_one_name_that_hides_its_host(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        names: list[str] = []
        for owner in ("gpu-3-r0#1", "gpu-3-r0#2", "gpu-3-r1#3"):
            driver.fail(video_id, code="generation_failed", message="no")
            taken = update(JobAttempt).where(JobAttempt.job_id == video_id, JobAttempt.lease_owner == driver.OWNER)
            execute(driver, taken.values(lease_owner=owner))
            act(client, video_id, "retry")
            names.append(attempts(client, video_id)["data"][-1]["worker"])
        assert names[0] == names[1] != names[2]
        assert "gpu-3" not in client.get(f"/v1/videos/{video_id}/attempts").text

    def test_one_that_was_given_back_has_no_error(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.lose(video_id)
        job = driver.start(video_id)
        assert job.fence is not None
        execute(driver, jobs.release(video_id, fence=job.fence))
        driver.start(video_id)
        lost, released, running = attempts(client, video_id)["data"]
        assert (lost["attempt"], lost["error"]["code"]) == (1, "worker_lost")
        assert (released["attempt"], released["status"], released["error"]) == (2, "requeued", None)
        assert (running["attempt"], running["status"]) == (2, "in_progress")

    def test_errors_name_no_hosts_and_no_paths(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        message = "cannot write /var/lib/rushes/x.mp4 to http://10.0.0.7:8333/clips?a=b: 3/4 units, and/or 24 fps"
        driver.fail(video_id, code="generation_failed", message=message)
        expected = "cannot write [...] to [...] 3/4 units, and/or 24 fps"
        assert get(client, video_id)["error"]["message"] == expected
        assert attempts(client, video_id)["data"][0]["error"]["message"] == expected

    @pytest.mark.parametrize(("order", "generations"), [("asc", [1, 2, 3]), ("desc", [3, 2, 1])])
    def test_pages_hold_every_attempt_once(
        self, client: TestClient, driver: JobDriver, order: str, generations: list[int]
    ) -> None:
        video_id = create(client)["id"]
        for _ in range(3):
            driver.fail(video_id, code="generation_failed", message="no")
            act(client, video_id, "retry")
        found: list[int] = []
        after = ""
        while True:
            page = attempts(client, video_id, f"?limit=2&order={order}{after}")
            found += [attempt["generation"] for attempt in page["data"]]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert found == generations

    @pytest.mark.parametrize(
        "query", ["after=x", "after=attempt_", "limit=0", "after=attempt_1234567890123456789", "order=up", "x=1"]
    )
    def test_a_wrong_parameter_is_named(self, client: TestClient, query: str) -> None:
        video_id = create(client)["id"]
        response = client.get(f"/v1/videos/{video_id}/attempts?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]


class TestTimes:
    def test_one_that_may_not_start_yet_says_so(self, client: TestClient, driver: JobDriver) -> None:
        start = int(time.time()) + 3_600
        moment = datetime.fromtimestamp(start, UTC) + timedelta(microseconds=5)
        video = create(client, not_before=moment.isoformat(), deadline=start + 60)
        held = get(client, video["id"])
        assert held["status"] == "queued"
        assert held["queue"] == {"position": None, "ahead": None, "reason": "not_before"}
        assert (held["not_before"], held["deadline"]) == (start, start + 60)
        assert client.get(f"/v1/videos/{video['id']}").headers["openai-poll-after-ms"] == "10000"
        # nor when it is cancelled and retried meanwhile
        act(client, video["id"], "cancel")
        assert act(client, video["id"], "retry")["queue"]["reason"] == "not_before"
        row = driver.row(video["id"])
        assert row is not None
        assert row.run_at == moment
        execute(driver, update(Job).where(Job.id == video["id"]).values(run_at=func.now()))
        assert get(client, video["id"])["queue"]["reason"] is None

    def test_one_that_did_not_start_in_time_is_expired(self, client: TestClient, driver: JobDriver) -> None:
        video = create(client, {"Cancel-After": "90m"})
        assert 5_390 <= video["deadline"] - video["created_at"] <= 5_401
        execute(driver, update(Job).where(Job.id == video["id"]).values(deadline_at=func.now()))
        execute(driver, jobs.expire())
        expired = get(client, video["id"])
        assert (expired["status"], expired["error"]["code"]) == ("expired", "deadline_exceeded")
        assert client.get("/v1/videos?status=expired").json()["first_id"] == video["id"]
        content = client.get(f"/v1/videos/{video['id']}/content")
        assert (content.status_code, content.json()["error"]["code"]) == (409, "deadline_exceeded")

    def test_one_that_still_runs_then_is_cancelled(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client, deadline=time.time() + 600)["id"]
        job = driver.start(video_id)
        execute(driver, update(Job).where(Job.id == video_id).values(deadline_at=func.now()))
        confirm_cancel(driver, job)
        cancelled = get(client, video_id)
        assert (cancelled["status"], cancelled["error"]["code"]) == ("cancelled", "deadline_exceeded")

    @pytest.mark.parametrize(
        ("headers", "body", "param"),
        [
            ({}, {"not_before": "tomorrow"}, "not_before"),
            ({}, {"deadline": "2026-12-01T10:00:00"}, "deadline"),
            ({}, {"deadline": 1}, "deadline"),
            ({"Cancel-After": "soon"}, {}, "Cancel-After"),
            ({"Cancel-After": ""}, {}, "Cancel-After"),
            ({"Cancel-After": "90m"}, {"deadline": "2099-01-01T00:00:00Z"}, "deadline"),
        ],
    )
    def test_a_wrong_one_is_named(
        self, client: TestClient, headers: dict[str, str], body: dict[str, Any], param: str
    ) -> None:
        response = client.post("/v1/videos", json={"prompt": "a dog", **body}, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_a_clip_that_is_kept_for_some_days_says_until_when(
    api_settings: Settings, driver: JobDriver, tmp_path: Path
) -> None:
    with TestClient(create_app(api_settings.model_copy(update={"retention_days": 3})), headers=AUTHORIZED) as client:
        video_id = create(client)["id"]
        assert get(client, video_id)["expires_at"] is None
        driver.complete(video_id, b"clip", tmp_path)
        done = get(client, video_id)
        assert done["expires_at"] - done["completed_at"] == 3 * 86_400


def test_a_clip_that_retention_removed_is_gone(client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
    video_id = create(client)["id"]
    driver.complete(video_id, b"clip", tmp_path)
    done = get(client, video_id)
    assert done["expires_at"] is done["output"]["deleted_at"] is None
    execute(driver, leftovers.mark_result_removed(video_id))
    video = get(client, video_id)
    assert video["status"] == "completed"
    assert video["output"]["deleted_at"] >= video["completed_at"]
    response = client.get(f"/v1/videos/{video_id}/content")
    assert (response.status_code, response.json()["error"]["code"]) == (410, "video_expired")


@pytest.mark.parametrize(("method", "what"), [("POST", "cancel"), ("POST", "retry"), ("GET", "attempts")])
def test_what_is_not_there_is_not_found(client: TestClient, method: str, what: str) -> None:
    for video_id in (new_video_id(), "x", "%ED%A0%80", "video_01%00"):
        response = client.request(method, f"/v1/videos/{video_id}/{what}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "video_not_found"


@pytest.mark.parametrize("what", ["cancel", "retry"])
def test_they_take_no_parameters(client: TestClient, what: str) -> None:
    path = f"/v1/videos/{create(client)['id']}/{what}"
    response = client.post(path, json={"seed": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")
    assert client.post(f"{path}?drain=1").status_code == 400
    assert client.post(path, json={}).status_code in (200, 409)


def test_any_process_cancels_and_retries_any_job(api_settings: Settings, client: TestClient, tmp_path: Path) -> None:
    video_id = create(client)["id"]
    with (
        ApiProcess(api_settings, tmp_path / "api.log") as other,
        httpx.Client(base_url=other.url, headers=AUTHORIZED, timeout=60, trust_env=False) as http,
    ):
        assert http.post(f"/v1/videos/{video_id}/cancel").json()["status"] == "cancelled"
        assert get(client, video_id)["status"] == "cancelled"
        assert act(client, video_id, "retry")["generation"] == 2
        assert http.get(f"/v1/videos/{video_id}").json()["status"] == "queued"
        assert http.get(f"/v1/videos/{video_id}/attempts").json()["data"] == []
