"""What Prometheus scrapes."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rushes_api import metrics
from rushes_api.app import create_app
from rushes_core import beats
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import text, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver, offline_settings
from support.checkpoints import tiny_checkpoint
from support.waiting import wait_until

Labels = dict[str, str]


@pytest.fixture(autouse=True)
def _fresh(driver: JobDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)
    with driver.engine.begin() as connection:
        for table in ("jobs", "queue_pauses", "replicas"):
            connection.execute(text(f"DELETE FROM {table}"))


def scraped(client: TestClient) -> dict[str, list[tuple[Labels, float]]]:
    """Every sample, by name."""
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(client: TestClient, name: str, **labels: str) -> float:
    """The one sample of this name with these labels; 0 if there is none."""
    values = [number for found, number in scraped(client).get(name, []) if labels.items() <= found.items()]
    assert len(values) <= 1, values
    return values[0] if values else 0.0


def test_the_depth_of_the_queue_is_that_of_the_table(client: TestClient, driver: JobDriver) -> None:
    for priority in ("interactive", "normal", "bulk"):
        for _ in range(3):
            client.post("/v1/videos", json={"prompt": "a dog", "priority": priority}).raise_for_status()
    assert [value(client, "rushes_queue_depth", priority=name) for name in ("interactive", "normal", "bulk")] == [3] * 3
    first = client.get("/v1/videos", params={"order": "asc"}).json()["data"][0]["id"]
    driver.start(first)
    assert value(client, "rushes_queue_depth", priority="interactive") == 2
    assert value(client, "rushes_jobs_in_progress", priority="interactive") == 1
    early = int(datetime.now(UTC).timestamp()) + 3_600
    client.post("/v1/videos", json={"prompt": "a dog", "priority": "bulk", "not_before": early}).raise_for_status()
    assert value(client, "rushes_queue_early", priority="bulk") == 1
    assert value(client, "rushes_queue_oldest_seconds", priority="normal") > 0


def test_every_queued_job_is_ready_or_counted_by_what_holds_it(client: TestClient, driver: JobDriver) -> None:
    hour = timedelta(hours=1)
    early = int((datetime.now(UTC) + hour).timestamp())
    ids = [
        client.post("/v1/videos", json={"prompt": "a dog", **changes}).json()["id"]
        for changes in ({}, {}, {}, {"not_before": early}, {"not_before": early})
    ]
    with driver.engine.begin() as connection:
        held = update(Job).where(Job.id.in_([ids[2], ids[4]]))
        connection.execute(held.values(hold="concurrency", run_at=Job.run_at - 2 * hour))

    def counted() -> dict[str, float]:
        names = ("ready", "paused", "early", "held", "in_campaigns", "depth")
        return {name: value(client, f"rushes_queue_{name}", priority="normal") for name in names}

    waiting = {"early": 1, "held": 2, "in_campaigns": 0, "depth": 5}
    assert counted() == {"ready": 2, "paused": 0} | waiting
    assert value(client, "rushes_queue_oldest_seconds", priority="normal") < hour.total_seconds()
    for paused in ({}, {"project": "*"}):
        client.post("/v1/queue/pause", params=paused).raise_for_status()
        assert counted() == {"ready": 0, "paused": 2} | waiting
        assert value(client, "rushes_queue_oldest_seconds", priority="normal") == 0
        client.post("/v1/queue/resume", params=paused).raise_for_status()
    assert counted() == {"ready": 2, "paused": 0} | waiting


def test_requests_are_counted_by_route_and_status(client: TestClient) -> None:
    counted = {"method": "GET", "route": "/v1/videos/{video_id}", "status": "404"}
    before = value(client, "rushes_http_requests_total", **counted)
    for video_id in ("video_x", "video_y"):
        client.get(f"/v1/videos/{video_id}")
    assert value(client, "rushes_http_requests_total", **counted) == before + 2
    unknown = {"route": "other", "status": "404", "method": "GET"}
    before = value(client, "rushes_http_requests_total", **unknown)
    for path in ("/nothing", "/else"):
        client.get(path)
    assert value(client, "rushes_http_requests_total", **unknown) == before + 2
    assert value(client, "rushes_http_request_seconds_count", route="/v1/videos/{video_id}") >= 2


def test_replicas_and_pauses_are_counted(client: TestClient, driver: JobDriver) -> None:
    driver.report_replica(model="tiny", state="busy")
    client.post("/v1/queue/pause").raise_for_status()
    assert value(client, "rushes_replicas", model="tiny", status="busy") == 1
    assert value(client, "rushes_queues_paused") == 1


def test_ends_of_jobs_are_counted_whatever_becomes_of_them(client: TestClient, driver: JobDriver) -> None:
    failed = {"state": "failed", "code": "generation_failed"}
    cancelled = {"state": "cancelled", "code": "cancelled_by_user"}
    assert ({"state": "failed", "code": "worker_crash"}, 0.0) in scraped(client)["rushes_jobs_ended_total"]
    before = [value(client, "rushes_jobs_ended_total", **one) for one in (failed, cancelled)]
    ids = [client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"] for _ in range(2)]
    driver.fail(ids[0], code="generation_failed", message="no")
    client.post(f"/v1/videos/{ids[1]}/cancel").raise_for_status()
    after = [number + 1 for number in before]
    assert [value(client, "rushes_jobs_ended_total", **one) for one in (failed, cancelled)] == after
    with driver.engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    assert [value(client, "rushes_jobs_ended_total", **one) for one in (failed, cancelled)] == after


def test_how_long_a_process_has_been_silent_is_told(client: TestClient, driver: JobDriver) -> None:
    name = "rushes_process_silent_seconds"
    assert {process: value(client, name, process=process) for process in beats.PROCESSES} == dict.fromkeys(
        beats.PROCESSES, math.inf
    )
    with driver.engine.begin() as connection:
        connection.execute(beats.beat(beats.DISPATCHER))
        connection.execute(text("UPDATE beats SET at = at - interval '1 hour'"))
    assert value(client, name, process="dispatcher") > 3_600
    with driver.engine.begin() as connection:
        connection.execute(beats.beat(beats.DISPATCHER))
    assert value(client, name, process="dispatcher") < 3_600
    assert value(client, name, process="loader") == math.inf


def test_webhooks_that_wait_are_counted(client: TestClient) -> None:
    assert value(client, "rushes_webhooks_waiting") == 0
    assert value(client, "rushes_webhook_lag_seconds") == 0
    assert value(client, "rushes_webhook_endpoints", state="enabled") == 0


def test_times_of_the_last_completed_jobs_are_told_by_size(
    client: TestClient, driver: JobDriver, tmp_path: Path
) -> None:
    video_id = client.post("/v1/videos", json={"prompt": "a dog", "size": "480x480"}).json()["id"]
    done = driver.complete(video_id, b"clip", tmp_path)
    assert done.finished_at is not None
    with Session(driver.engine) as session, session.begin():
        started_at = done.finished_at - timedelta(seconds=12)
        times = {"started_at": started_at, "created_at": started_at - timedelta(seconds=30)}
        session.execute(update(Job).where(Job.id == video_id).values(**times))
    shape = {"size": "480x480", "num_frames": str(done.num_frames)}
    assert value(client, "rushes_recent_run_seconds", quantile="0.8", **shape) == 12
    assert value(client, "rushes_recent_wait_seconds", quantile="0.8", **shape) == 30
    assert value(client, "rushes_recent_jobs", **shape) == 1


def complete(client: TestClient, driver: JobDriver, tmp_path: Path, *, ran: float, ago: float, attempt: int = 1) -> str:
    """A job that waited for 30 seconds, ran for `ran` and was completed `ago` seconds before now."""
    video_id: str = client.post("/v1/videos", json={"prompt": "a dog", "size": "480x480"}).json()["id"]
    driver.complete(video_id, b"clip", tmp_path)
    finished_at = datetime.now(UTC) - timedelta(seconds=ago)
    started_at = finished_at - timedelta(seconds=ran)
    times = {"finished_at": finished_at, "started_at": started_at, "created_at": started_at - timedelta(seconds=30)}
    with Session(driver.engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == video_id).values(attempt=attempt, **times))
    return video_id


def seconds_of_the_day() -> float:
    now = datetime.now(UTC)
    return (now - now.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()


def test_jobs_of_the_day_are_counted_by_how_long_they_took(
    client: TestClient, driver: JobDriver, tmp_path: Path, api_settings: Settings
) -> None:
    wait_until(lambda: 20 < seconds_of_the_day() < 86_300, timeout_seconds=130)
    complete(client, driver, tmp_path, ran=1, ago=seconds_of_the_day() + 60)
    first = complete(client, driver, tmp_path, ran=10, ago=8)
    complete(client, driver, tmp_path, ran=10.5, ago=7, attempt=3)
    name, shape = "rushes_job_run_seconds", {"size": "480x480", "num_frames": "107"}

    def buckets(of: TestClient) -> list[float]:
        return [value(of, f"{name}_bucket", le=le, **shape) for le in ("5", "10", "15", "+Inf")]

    def process() -> TestClient:
        return TestClient(create_app(api_settings), headers=AUTHORIZED)

    with process() as one:
        assert buckets(one) == [0, 1, 2, 2]
        assert (value(one, f"{name}_sum", **shape), value(one, f"{name}_count", **shape)) == (20.5, 2)
        assert value(one, "rushes_job_wait_seconds_bucket", le="30", **shape) == 2
        assert value(one, "rushes_job_wait_seconds_bucket", le="20", **shape) == 0
        assert [value(one, "rushes_job_attempts_bucket", le=le, **shape) for le in ("1", "2", "3")] == [1, 1, 2]
        # others may complete in the last seconds without being seen: these are counted later, and nothing twice
        complete(client, driver, tmp_path, ran=2, ago=-3_600)
        assert buckets(one) == [0, 1, 2, 2]
        complete(client, driver, tmp_path, ran=2, ago=0)
        client.delete(f"/v1/videos/{first}").raise_for_status()
        wait_until(lambda: buckets(one) == [1, 2, 3, 3])
        with process() as later:
            assert buckets(later) == [1, 1, 2, 2]


def test_devices_are_counted_by_what_their_replica_does(client: TestClient, driver: JobDriver) -> None:
    driver.report_replica(model="tiny", state="busy")
    with driver.engine.begin() as connection:
        connection.execute(text("UPDATE replicas SET layout = 'r2s4'"))
    assert value(client, "rushes_gpus", model="tiny", status="busy") == 4


def test_it_takes_a_key_of_an_operator_unless_it_is_open(client: TestClient, api_settings: Settings) -> None:
    without = {"Authorization": ""}
    assert client.get("/metrics", headers=without).status_code == 401
    client.post("/v1/projects", json={"name": "another"}).raise_for_status()
    body = {"project": "another", "name": "test", "scopes": ["videos:read"]}
    secret = client.post("/v1/api_keys", json=body).json()["secret"]
    assert client.get("/metrics", headers={"Authorization": f"Bearer {secret}"}).status_code == 403
    with TestClient(create_app(api_settings.model_copy(update={"metrics_open": True}))) as open_to_all:
        assert open_to_all.get("/metrics").status_code == 200


def test_what_the_database_would_say_is_missing_while_it_is_away(tmp_path: Path) -> None:
    with TestClient(create_app(offline_settings(tiny_checkpoint(tmp_path))), headers=AUTHORIZED) as client:
        found = scraped(client)
    assert found["rushes_database_up"] == [({}, 0.0)]
    assert "rushes_queue_depth" not in found
    assert "rushes_http_waiting" in found
