"""What the jobs of a key may take: strict under concurrency, over HTTP, with real replicas."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from rushes_api.deps import find_job
from rushes_core import jobs, keys
from rushes_core.fields import counted
from rushes_core.models import ApiKeyUsage, Job
from rushes_core.settings import Settings
from rushes_core.states import LEASED_STATES, JobState
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import API_KEY, ApiProcess, JobDriver
from support.checkpoints import tiny_checkpoint
from support.keys import bearer, create_key
from support.service import Service
from support.stack import SharedStack
from support.worker import SCRIPTED, eventually

RETRY_AFTER = re.compile(r"[1-9][0-9]?")


def post(client: TestClient | httpx.Client, key: dict[str, Any], **body: Any) -> httpx.Response:
    headers = bearer(key) | {name: body.pop(name) for name in list(body) if name == "Idempotency-Key"}
    return client.post("/v1/videos", json={"prompt": "a dog", **body}, headers=headers)


def accept(client: TestClient, key: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = post(client, key, **body)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def refused(response: httpx.Response, status: int, code: str) -> str:
    """The message. A refusal can be told from others and says when to come again."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert response.headers["x-request-id"] == error["request_id"]
    if status == 429:
        assert RETRY_AFTER.fullmatch(response.headers["retry-after"])
        assert int(response.headers["retry-after"]) <= 60
    message: str = error["message"]
    return message


def num_queued(driver: JobDriver, key: dict[str, Any]) -> int:
    with Session(driver.engine) as session:
        statement = select(func.count()).where(Job.api_key == key["id"], Job.state == JobState.QUEUED)
        return session.execute(statement).scalar_one()


def usage(driver: JobDriver, key: dict[str, Any]) -> ApiKeyUsage | None:
    with Session(driver.engine) as session:
        return session.execute(select(ApiKeyUsage).where(ApiKeyUsage.api_key == key["id"])).scalar_one_or_none()


class TestMaxQueued:
    def test_one_too_many_is_refused_and_leaves_nothing(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, max_queued=2)
        first = accept(client, key)
        accept(client, key)
        before = driver.num_rows()
        message = refused(post(client, key), 429, "queue_full")
        assert "2 jobs waiting" in message
        assert counted(1, "job") == "1 job"
        assert driver.num_rows() == before
        # what runs or has ended does not wait
        driver.start(first["id"])
        accept(client, key)
        refused(post(client, key), 429, "queue_full")

    def test_jobs_of_other_keys_take_no_place(self, client: TestClient) -> None:
        full, other = create_key(client, max_queued=1), create_key(client, max_queued=1)
        accept(client, full)
        accept(client, other)
        accept(client, create_key(client))
        refused(post(client, full), 429, "queue_full")

    def test_a_key_that_may_queue_nothing_queues_nothing(self, client: TestClient) -> None:
        refused(post(client, create_key(client, max_queued=0)), 429, "queue_full")

    def test_a_repeated_request_takes_no_second_place(self, client: TestClient) -> None:
        key = create_key(client, max_queued=1)
        header = {"Idempotency-Key": "only one"}
        first = post(client, key, **header)
        assert first.status_code == 200
        again = post(client, key, **header)
        assert (again.status_code, again.content) == (200, first.content)
        assert again.headers["idempotent-replayed"] == "true"
        refused(post(client, key), 429, "queue_full")

    def test_a_request_that_was_refused_may_be_sent_again_with_its_key(self, client: TestClient) -> None:
        key = create_key(client, max_queued=1)
        waiting = accept(client, key)
        header = {"Idempotency-Key": "later"}
        refused(post(client, key, **header), 429, "queue_full")
        client.post(f"/v1/videos/{waiting['id']}/cancel", headers=bearer(key))
        assert post(client, key, **header).status_code == 200

    def test_a_retry_takes_a_place_of_the_key_that_sent_the_job(self, client: TestClient, driver: JobDriver) -> None:
        key, other = create_key(client, max_queued=1), create_key(client, max_queued=5)
        failed = accept(client, key)
        driver.fail(failed["id"], code="generation_failed", message="no")
        waiting = accept(client, key)
        for one in (key, other):
            response = client.post(f"/v1/videos/{failed['id']}/retry", headers=bearer(one))
            refused(response, 429, "queue_full")
        assert client.get(f"/v1/videos/{failed['id']}").json()["status"] == "failed"
        client.delete(f"/v1/videos/{waiting['id']}")
        assert client.post(f"/v1/videos/{failed['id']}/retry", headers=bearer(other)).status_code == 200
        refused(post(client, key), 429, "queue_full")

    def test_a_job_that_ends_while_its_retry_is_looked_at_takes_no_place_of_another(
        self, client: TestClient, driver: JobDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = create_key(client, max_queued=1)
        running = accept(client, key)
        fence = driver.start(running["id"]).fence
        assert fence is not None
        accept(client, key)

        async def ends_afterwards(video_id: str, **options: Any) -> Job:
            job = await find_job(video_id, **options)
            if job.state is JobState.RUNNING:
                with Session(driver.engine) as session, session.begin():
                    session.execute(jobs.fail(video_id, fence=fence, error={"code": "generation_failed"})).one()
            return job

        monkeypatch.setattr("rushes_api.routers.actions.find_job", ends_afterwards)
        response = client.post(f"/v1/videos/{running['id']}/retry", headers=bearer(key))
        assert response.status_code == 409, response.text
        assert num_queued(driver, key) == 1

    def test_a_remix_takes_a_place(self, client: TestClient) -> None:
        key = create_key(client, max_queued=1)
        waiting = accept(client, key)
        response = client.post(f"/v1/videos/{waiting['id']}/remix", json={"prompt": "a cat"}, headers=bearer(key))
        refused(response, 429, "queue_full")

    def test_a_changed_limit_counts_what_waits_already(self, client: TestClient) -> None:
        key = create_key(client)
        for _ in range(3):
            accept(client, key)
        client.patch(f"/v1/api_keys/{key['id']}", json={"max_queued": 3})
        refused(post(client, key), 429, "queue_full")
        client.patch(f"/v1/api_keys/{key['id']}", json={"max_queued": None})
        accept(client, key)

    def test_parallel_requests_to_two_processes_get_exactly_the_limit(
        self, client: TestClient, driver: JobDriver, api_settings: Settings, tmp_path: Path
    ) -> None:
        key = create_key(client, max_queued=3)
        with (
            ApiProcess(api_settings, tmp_path / "a.log") as first,
            ApiProcess(api_settings, tmp_path / "b.log") as second,
            httpx.Client(timeout=60, trust_env=False) as http,
            ThreadPoolExecutor(20) as pool,
        ):

            def send(url: str) -> httpx.Response:
                return http.post(f"{url}/v1/videos", json={"prompt": "a dog"}, headers=bearer(key))

            answers = list(pool.map(send, [first.url, second.url] * 10))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 17
        assert num_queued(driver, key) == 3


@pytest.mark.usefixtures("one_day")
class TestDailyGpuSeconds:
    def test_attempts_are_counted_and_a_new_day_frees(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, daily_gpu_seconds=1)
        failed = accept(client, key)
        driver.fail(failed["id"], code="generation_failed", message="no")
        counted = usage(driver, key)
        assert counted is not None
        assert counted.attempts == 1
        assert counted.gpu_seconds > 0
        own = client.get("/v1/api_keys/me", headers=bearer(key)).json()["usage"]
        assert own["attempts"] == 1
        # below the limit
        accept(client, key)
        self.spend(driver, key, seconds=1.0)
        response = post(client, key)
        message = refused(response, 429, "quota_exceeded")
        assert "1 GPU-seconds a day (UTC), and has used 1.0 today" in message
        assert response.headers["x-should-retry"] == "false"
        refused(client.post(f"/v1/videos/{failed['id']}/retry", headers=bearer(key)), 429, "quota_exceeded")
        self.spend(driver, key, seconds=5.0, day=datetime.now(UTC).date() - timedelta(days=1))
        accept(client, key)
        assert client.get("/v1/api_keys/me", headers=bearer(key)).json()["usage"]["gpu_seconds"] == 0

    def test_requests_of_a_key_do_not_wait_for_one_another(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, daily_gpu_seconds=1)
        with driver.engine.begin() as other:
            other.execute(keys.lock_limits(key["id"]))
            accept(client, key)

    def test_a_job_that_never_ran_used_nothing(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, daily_gpu_seconds=1)
        waiting = accept(client, key)
        client.post(f"/v1/videos/{waiting['id']}/cancel", headers=bearer(key))
        assert usage(driver, key) is None

    @staticmethod
    def spend(driver: JobDriver, key: dict[str, Any], *, seconds: float, **values: Any) -> None:
        statement = update(ApiKeyUsage).where(ApiKeyUsage.api_key == key["id"])
        with Session(driver.engine) as session, session.begin():
            session.execute(statement.values(gpu_seconds=seconds, **values))


class TestPriorities:
    def test_a_class_that_is_not_allowed_is_refused_by_name(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, priorities=["bulk"])
        before = driver.num_rows()
        response = post(client, key, priority="interactive")
        message = refused(response, 403, "priority_not_allowed")
        assert message == "this API key may not use priority interactive; allowed: bulk"
        assert response.json()["error"]["param"] == "priority"
        # the default is a class like any other
        refused(post(client, key), 403, "priority_not_allowed")
        assert driver.num_rows() == before
        assert accept(client, key, priority="bulk")["priority"] == "bulk"

    def test_a_retry_needs_the_class_of_the_job(self, client: TestClient, driver: JobDriver) -> None:
        urgent = accept(client, create_key(client), priority="interactive")
        driver.fail(urgent["id"], code="generation_failed", message="no")
        path = f"/v1/videos/{urgent['id']}/retry"
        refused(client.post(path, headers=bearer(create_key(client, priorities=["bulk"]))), 403, "priority_not_allowed")
        assert client.post(path, headers=bearer(create_key(client))).status_code == 200


class TestMaxRunning:
    def test_what_is_over_the_limit_waits_and_says_why(self, client: TestClient) -> None:
        key = create_key(client, max_running=1)
        first, second = accept(client, key), accept(client, key)
        assert first["queue"]["reason"] is None
        assert second["queue"]["reason"] == "concurrency"
        shown = client.get(f"/v1/videos/{second['id']}", headers=bearer(key)).json()
        assert (shown["status"], shown["queue"]["reason"]) == ("queued", "concurrency")

    def test_a_retry_waits_too(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, max_running=1)
        failed = accept(client, key, priority="interactive")
        driver.fail(failed["id"], code="generation_failed", message="no")
        accept(client, key, priority="interactive")
        again = client.post(f"/v1/videos/{failed['id']}/retry", headers=bearer(key)).json()
        assert (again["status"], again["queue"]["reason"]) == ("queued", "concurrency")

    def test_parallel_requests_leave_one_that_may_run(
        self, client: TestClient, driver: JobDriver, api_settings: Settings, tmp_path: Path
    ) -> None:
        key = create_key(client, max_running=1, max_queued=12)
        with (
            ApiProcess(api_settings, tmp_path / "a.log") as first,
            ApiProcess(api_settings, tmp_path / "b.log") as second,
            httpx.Client(timeout=60, trust_env=False) as http,
            ThreadPoolExecutor(16) as pool,
        ):

            def send(url: str) -> httpx.Response:
                return http.post(f"{url}/v1/videos", json={"prompt": "a dog"}, headers=bearer(key))

            answers = list(pool.map(send, [first.url, second.url] * 8))
        assert sorted(answer.status_code for answer in answers) == [200] * 12 + [429] * 4
        with Session(driver.engine) as session:
            holds = session.execute(select(Job.hold).where(Job.api_key == key["id"])).scalars().all()
        assert sorted(hold or "" for hold in holds) == ["", *["concurrency"] * 11]

    @pytest.mark.usefixtures("one_day")
    def test_two_replicas_never_run_two_jobs_of_a_key_that_may_run_one(
        self, stack: SharedStack, tmp_path: Path
    ) -> None:
        settings = stack.settings(
            checkpoint=tiny_checkpoint(tmp_path / "checkpoint"),
            api_key=API_KEY,
            pipeline=SCRIPTED,
            scratch=tmp_path / "scratch",
            poll_seconds=0.1,
        )
        with Service(settings, tmp_path, layout="r2s1") as service:
            limited, free = create_key(service.http, max_running=1), create_key(service.http)

            def send(key: dict[str, Any]) -> str:
                body = {"prompt": "a dog [step 0.05]", "size": "480x480"}
                response = service.http.post("/v1/videos", json=body, headers=bearer(key))
                assert response.status_code == 200, response.text
                video_id: str = response.json()["id"]
                return video_id

            sent = [send(key) for _ in range(3) for key in (limited, free)]
            most = self.watch(service, limited["id"], sent)
            attempts = [service.jobs.attempts(video_id)[0] for video_id in sent[::2]]
            usages = [
                service.http.get("/v1/api_keys/me", headers=bearer(key)).json()["usage"] for key in (limited, free)
            ]
        assert most == 1
        spans = sorted((one.claimed_at, one.finished_at) for one in attempts)
        assert all(end is not None and end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert [one["attempts"] for one in usages] == [3, 3]
        assert all(one["gpu_seconds"] > 3 * 8 * 0.05 for one in usages)

    @staticmethod
    def watch(service: Service, api_key: str, video_ids: list[str]) -> int:
        """The most jobs of the key that were seen leased at once, until all jobs have ended."""
        most = 0
        with Session(service._driver.engine) as session:  # pyright: ignore[reportPrivateUsage]

            def all_ended() -> bool:
                nonlocal most
                session.rollback()
                leased = select(func.count()).where(Job.api_key == api_key, Job.state.in_(LEASED_STATES))
                most = max(most, session.execute(leased).scalar_one())
                states = session.execute(select(Job.state).where(Job.id.in_(video_ids))).scalars().all()
                return all(state.is_final for state in states)

            eventually(all_ended, seconds=120)
        return most
