"""The queue as clients see it, pausing it, and the workers as operators see them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_api.app import create_app
from rushes_core.models import Job, Replica
from rushes_core.settings import Settings
from rushes_core.states import JobState
from sqlalchemy import func, text, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, JobDriver
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, Worker, eventually


@pytest.fixture(autouse=True)
def _empty(driver: JobDriver) -> None:
    with driver.engine.begin() as connection:
        for table in ("jobs", "queue_pauses", "replicas"):
            connection.execute(text(f"DELETE FROM {table}"))


def posted(client: TestClient, **fields: Any) -> str:
    response = client.post("/v1/videos", json={"prompt": "a dog", "size": "480x480", **fields})
    assert response.status_code == 200, response.text
    video_id: str = response.json()["id"]
    return video_id


def key_of(client: TestClient, project: str, *scopes: str, **limits: int) -> dict[str, str]:
    """The header of a new key."""
    client.post("/v1/projects", json={"name": project})
    body = {"project": project, "name": "test", "scopes": list(scopes), **limits}
    response = client.post("/v1/api_keys", json=body)
    assert response.status_code == 200, response.text
    return {"Authorization": f"Bearer {response.json()['secret']}"}


def move(driver: JobDriver, video_id: str, **values: Any) -> None:
    with Session(driver.engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == video_id).values(**values))


class TestQueue:
    def test_an_empty_one(self, client: TestClient) -> None:
        empty = {"queued": 0, "in_progress": 0, "reasons": {}, "oldest_waiting_s": None}
        assert client.get("/v1/queue").json() == {
            "object": "queue",
            "project": "default",
            "paused": False,
            "paused_at": None,
            **empty,
            "classes": [{"priority": name, **empty} for name in ("interactive", "normal", "bulk")],
            "empty_at": None,
        }

    def test_jobs_are_counted_by_class_and_by_what_they_wait_for(self, client: TestClient, driver: JobDriver) -> None:
        waits = posted(client)
        move(driver, waits, run_at=datetime.now(UTC) - timedelta(hours=1))
        posted(client, priority="bulk")
        posted(client, priority="bulk", not_before=int(datetime.now(UTC).timestamp()) + 3_600)
        driver.start(posted(client))
        client.post(f"/v1/videos/{posted(client)}/cancel").raise_for_status()
        queue = client.get("/v1/queue").json()
        interactive, normal, bulk = queue["classes"]
        # the driver claims with the highest priority
        assert (interactive["queued"], interactive["in_progress"]) == (0, 1)
        assert (normal["queued"], normal["in_progress"], normal["reasons"]) == (1, 0, {})
        assert (bulk["queued"], bulk["reasons"]) == (2, {"not_before": 1})
        assert (queue["queued"], queue["in_progress"], queue["reasons"]) == (3, 1, {"not_before": 1})
        assert 3_600 <= queue["oldest_waiting_s"] < 3_700
        assert bulk["oldest_waiting_s"] < 60

    def test_jobs_over_a_limit_of_their_key_are_told_apart(self, client: TestClient) -> None:
        key = key_of(client, "limited", "videos:write", "videos:read", max_running=1)
        for _ in range(3):
            client.post("/v1/videos", json={"prompt": "a dog"}, headers=key).raise_for_status()
        queue = client.get("/v1/queue", headers=key).json()
        assert (queue["queued"], queue["reasons"]) == (3, {"concurrency": 2})

    def test_a_project_sees_its_own_jobs_alone(self, client: TestClient) -> None:
        posted(client)
        key = key_of(client, "another", "videos:read")
        assert client.get("/v1/queue", headers=key).json()["queued"] == 0
        assert client.get("/v1/queue", params={"project": "another"}, headers=key).status_code == 200
        for project in ("default", "*", "nobody"):
            refused = client.get("/v1/queue", params={"project": project}, headers=key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
        client.post("/v1/videos", json={"prompt": "a dog"}, headers=key_of(client, "another", "videos:write"))
        assert client.get("/v1/queue").json()["queued"] == 1
        assert client.get("/v1/queue", params={"project": "another"}).json()["queued"] == 1
        assert client.get("/v1/queue", params={"project": "*"}).json()["queued"] == 2

    def test_a_project_that_is_not_there(self, client: TestClient) -> None:
        for project in ("nobody", "No Body"):
            response = client.get("/v1/queue", params={"project": project})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "project_not_found")


class TestPause:
    def test_one_of_a_project_is_told_where_all_are_counted(self, client: TestClient) -> None:
        posted(client)
        client.post("/v1/videos", json={"prompt": "a dog"}, headers=key_of(client, "still", "videos:write"))
        client.post("/v1/queue/pause", params={"project": "still"}).raise_for_status()
        queue = client.get("/v1/queue", params={"project": "*"}).json()
        assert (queue["paused"], queue["queued"], queue["reasons"]) == (False, 2, {"paused": 1})

    def test_a_paused_queue_starts_nothing_until_it_is_resumed(self, client: TestClient, driver: JobDriver) -> None:
        video_id = posted(client)
        for _ in range(2):
            paused = client.post("/v1/queue/pause").json()
        assert (paused["paused"], paused["reasons"]) == (True, {"paused": 1})
        assert paused["paused_at"] is not None
        assert client.get("/v1/queue").json() | {"oldest_waiting_s": 0, "classes": 0} == paused | {
            "oldest_waiting_s": 0,
            "classes": 0,
        }
        with pytest.raises(Exception, match="No row was found"):
            driver.claim(video_id)
        for _ in range(2):
            assert client.post("/v1/queue/resume").json()["paused"] is False
        assert driver.claim(video_id).state is JobState.CLAIMED

    def test_an_operator_pauses_another_project_or_all(self, client: TestClient) -> None:
        key = key_of(client, "another", "videos:read", "videos:write")
        client.post("/v1/queue/pause", params={"project": "another"}).raise_for_status()
        assert client.get("/v1/queue", headers=key).json()["paused"]
        assert not client.get("/v1/queue").json()["paused"]
        client.post("/v1/queue/pause", params={"project": "*"}).raise_for_status()
        assert client.get("/v1/queue").json()["paused"]
        # that of all is apart from a project's own
        assert client.post("/v1/queue/resume", headers=key).json()["paused"]
        client.post("/v1/queue/resume", params={"project": "*"}).raise_for_status()
        assert not client.get("/v1/queue", headers=key).json()["paused"]

    def test_only_who_may_write_pauses(self, client: TestClient) -> None:
        reader = key_of(client, "another", "videos:read")
        writer = key_of(client, "another", "videos:write")
        for name in ("pause", "resume"):
            assert client.post(f"/v1/queue/{name}", headers=reader).status_code == 403
            assert client.post(f"/v1/queue/{name}", params={"project": "*"}, headers=writer).status_code == 403
            assert client.post(f"/v1/queue/{name}", headers=writer).status_code == 200

    def test_a_body_is_not_taken(self, client: TestClient) -> None:
        assert client.post("/v1/queue/pause", json={"project": "*"}).status_code == 400


class TestWorkers:
    def test_only_operators_see_them(self, client: TestClient) -> None:
        key = key_of(client, "another", "videos:read", "videos:write")
        assert client.get("/v1/workers", headers=key).status_code == 403
        assert client.post("/v1/workers/a-r0~1-x/drain", headers=key).status_code == 403

    def test_one_that_is_not_there(self, client: TestClient) -> None:
        assert client.get("/v1/workers").json()["data"] == []
        for worker_id in ("a-r0~1-x", "a", "~", "a%00~b"):
            for name in ("drain", "resume"):
                response = client.post(f"/v1/workers/{worker_id}/{name}")
                assert (response.status_code, response.json()["error"]["code"]) == (404, "worker_not_found")

    def test_one_that_falls_silent_is_said_to_be(self, client: TestClient, driver: JobDriver) -> None:
        driver.report_replica(model="tiny", state="ready")
        with Session(driver.engine) as session, session.begin():
            session.execute(update(Replica).values(id="host-r0#1-a"))
        (worker,) = client.get("/v1/workers").json()["data"]
        assert (worker["id"], worker["name"], worker["status"]) == ("host-r0~1-a", "host-r0", "ready")
        assert worker["silent_seconds"] is None

        def silent_for(seconds: float) -> list[dict[str, Any]]:
            with Session(driver.engine) as session, session.begin():
                session.execute(update(Replica).values(last_seen=func.now() - timedelta(seconds=seconds)))
            told: list[dict[str, Any]] = client.get("/v1/workers").json()["data"]
            return told

        # leases are 30 s here
        (worker,) = silent_for(31)
        assert worker["status"] == "silent"
        assert 31 <= worker["silent_seconds"] < 60
        assert (worker["checkpoint"], worker["precision"], worker["devices"]) == (None, None, [])

    def test_one_that_is_silent_for_long_is_lost_and_told_of_for_another_hour(
        self, client: TestClient, driver: JobDriver
    ) -> None:
        driver.report_replica(model="tiny", state="busy")

        def told(seconds: float) -> list[tuple[str, int]]:
            with Session(driver.engine) as session, session.begin():
                session.execute(update(Replica).values(last_seen=func.now() - timedelta(seconds=seconds)))
            workers = client.get("/v1/workers").json()["data"]
            return [(worker["status"], worker["silent_seconds"] // 60) for worker in workers]

        assert told(240) == [("silent", 4)]
        assert told(300) == [("lost", 5)]
        assert told(3_840) == [("lost", 64)]
        assert told(3_900) == []

    def test_a_job_that_it_has_lost_is_no_more_told_as_its_own(self, client: TestClient, driver: JobDriver) -> None:
        def told() -> tuple[str | None, str | None]:
            (worker,) = client.get("/v1/workers").json()["data"]
            return worker["job_id"], worker["stage"]

        video_id = posted(client, prompt="a dog")
        driver.report_replica(model="tiny", state="ready")
        job = driver.start(video_id)
        driver.report(job, phase="denoising", completed_steps=1, progress=10)
        with Session(driver.engine) as session, session.begin():
            session.execute(update(Replica).values(job_id=video_id))
        assert told() == (video_id, "denoising")
        # as of a replica that was killed and whose job another one holds
        with Session(driver.engine) as session, session.begin():
            session.execute(update(Replica).values(id="host-r0#1-a"))
        assert told() == (None, None)

    def test_they_are_listed_in_pages(self, client: TestClient, driver: JobDriver) -> None:
        for number in range(3):
            driver.report_replica(model="tiny", state="ready")
            with Session(driver.engine) as session, session.begin():
                session.execute(update(Replica).where(Replica.id == driver.OWNER).values(id=f"host-r{number}#1-a"))
        first = client.get("/v1/workers", params={"limit": 2}).json()
        assert [worker["name"] for worker in first["data"]] == ["host-r0", "host-r1"]
        assert first["has_more"]
        rest = client.get("/v1/workers", params={"after": first["last_id"]}).json()
        assert [worker["name"] for worker in rest["data"]] == ["host-r2"]
        assert client.get("/v1/workers", params={"after": "x"}).status_code == 400


@pytest.fixture(scope="class")
def rendering(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Jobs]]:
    """An API and a worker on the scripted pipeline."""
    folder = tmp_path_factory.mktemp("worker")
    settings: Settings = stack.settings(
        checkpoint=tiny_checkpoint(folder),
        api_key=API_KEY,
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        lease_seconds=6,
        heartbeat_seconds=0.5,
    )
    rows = Jobs(settings)
    with (
        TestClient(create_app(settings), headers=AUTHORIZED) as client,
        Worker(settings, folder / "worker.log"),
    ):
        rows.wait_ready()
        yield client, rows
    rows.close()


class TestRealWorker:
    def test_it_is_described(self, rendering: tuple[TestClient, Jobs], tmp_path: Path) -> None:
        client, rows = rendering
        (worker,) = client.get("/v1/workers").json()["data"]
        assert worker["status"] == "ready"
        assert worker["model"] == client.get("/v1/models").json()["data"][0]["id"]
        assert worker["version"]
        (device,) = worker["devices"]
        assert device["name"].startswith("cpu")
        assert 0 < device["memory_used_bytes"] < device["memory_total_bytes"]
        assert (worker["rank_groups"], worker["restarts"]) == (1, 0)
        assert (worker["failures_in_a_row"], worker["crashed_jobs"]) == (0, [])
        assert (worker["precision"], worker["stage"]) == ("no model", None)
        assert worker["checkpoint"]["model_id"] == "rushes/tiny-fasth3-8-step-demo"
        assert len(worker["checkpoint"]["revision"]) == 64
        video_id = posted(client, prompt="a dog [step 0.3]")

        def runs() -> bool:
            (worker,) = client.get("/v1/workers").json()["data"]
            return (worker["status"], worker["job_id"], worker["stage"]) == ("busy", video_id, "denoising")

        eventually(runs)
        rows.wait_completed(video_id)

        def memory() -> int:
            (worker,) = client.get("/v1/workers").json()["data"]
            assert worker["stage"] is None or worker["status"] == "busy"
            used: int = worker["devices"][0]["memory_used_bytes"]
            return used

        # frames that the rank made are more than it had when it started
        eventually(lambda: memory() != device["memory_used_bytes"])

    def test_a_drained_one_finishes_its_job_and_takes_no_more_until_it_is_resumed(
        self, rendering: tuple[TestClient, Jobs]
    ) -> None:
        client, rows = rendering
        running, waits = posted(client, prompt="a dog [step 0.3]"), posted(client)
        rows.wait_for(running, JobState.RUNNING)
        (worker,) = client.get("/v1/workers").json()["data"]
        drained = client.post(f"/v1/workers/{worker['id']}/drain").json()
        assert drained["drain_requested_at"] is not None
        assert drained["status"] == "draining"

        def status() -> str:
            (worker,) = client.get("/v1/workers").json()["data"]
            found: str = worker["status"]
            return found

        eventually(lambda: status() == "drained")
        assert rows.get(running).state is JobState.COMPLETED
        assert rows.get(waits).state is JobState.QUEUED
        eventually(lambda: client.get(f"/v1/videos/{waits}").json()["queue"]["reason"] == "drained")
        assert client.get("/v1/queue").json()["reasons"] == {"drained": 1}
        resumed = client.post(f"/v1/workers/{worker['id']}/resume").json()
        assert (resumed["status"], resumed["drain_requested_at"]) == ("ready", None)
        rows.wait_completed(waits)
