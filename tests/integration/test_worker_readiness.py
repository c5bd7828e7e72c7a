"""From a worker's start to its first job, as the API tells of it: alive at once, ready when a job can run, and why not
before."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rushes_api.app import create_app
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED
from support.checkpoints import tiny_checkpoint
from support.processes import is_alive
from support.stack import SharedStack
from support.worker import SCRIPTED, Worker, eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("readiness"), profile="split")


@pytest.fixture
def settings(stack: SharedStack, checkpoint: Path, tmp_path: Path) -> Settings:
    return stack.settings(
        checkpoint=checkpoint,
        api_key=API_KEY,
        pipeline=SCRIPTED,
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.2,
    )


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), headers=AUTHORIZED) as client:
        yield client


def workers(client: TestClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/workers").json()["data"]
    return found


def test_worker_is_alive_while_it_loads_and_ready_when_a_job_can_run(
    settings: Settings, client: TestClient, tmp_path: Path
) -> None:
    video = client.post("/v1/videos", json={"prompt": "a wave", "size": "832x480", "seconds": "4"}).json()
    limit = tmp_path / "limit"

    def let_load(percent: int) -> None:
        (tmp_path / "new").write_text(str(percent))
        (tmp_path / "new").rename(limit)

    def loaded() -> int | None:
        return next((one["loading"]["percent"] for one in workers(client) if one["loading"]), None)

    let_load(30)
    with Worker(settings, tmp_path / "worker.log", env={"SCRIPTED_LOAD_LIMIT": str(limit)}) as worker:
        for percent in (30, 70):
            let_load(percent)
            eventually(lambda percent=percent: loaded() == percent)
            assert client.get("/healthz").status_code == 200
            not_ready = client.get("/readyz")
            assert not_ready.status_code == 503
            assert "no replica is ready" in not_ready.json()["checks"]["workers"]
            assert client.get(f"/v1/videos/{video['id']}").json()["status"] == "queued"
            assert [(one["status"], one["stage"]) for one in workers(client)] == [("starting", "loading")]
        let_load(100)
        eventually(lambda: client.get("/readyz").status_code == 200)
        eventually(lambda: client.get(f"/v1/videos/{video['id']}").json()["status"] == "completed")

        (one,) = workers(client)
        assert one["loading"] is None
        assert (one["layout"], one["precision"]) == ("r1s1", "no model")
        assert (one["rank_groups"], one["restarts"], one["failures_in_a_row"]) == (1, 0, 0)
        assert one["checkpoint"]["model_id"] == one["model"]
        assert 0 < one["devices"][0]["memory_used_bytes"] < one["devices"][0]["memory_total_bytes"]

        let_load(30)
        (ranks,) = [record["pids"] for record in worker.events("group_starting")]
        os.kill(ranks[0], signal.SIGKILL)
        eventually(lambda: (workers(client)[0]["rank_groups"], workers(client)[0]["restarts"]) == (2, 1))
        eventually(lambda: workers(client)[0]["loading"])
        assert client.get("/readyz").status_code == 503
        worker.terminate()
        assert worker.wait() == 0


def test_worker_whose_checkpoint_lacks_a_file_is_never_ready_and_names_it(
    settings: Settings, client: TestClient, checkpoint: Path, tmp_path: Path
) -> None:
    video = client.post("/v1/videos", json={"prompt": "a wave", "size": "832x480", "seconds": "4"}).json()
    shard = sorted((checkpoint / "transformer").glob("*.safetensors"))[1]
    shard.rename(tmp_path / shard.name)
    real = settings.model_copy(update={"pipeline": Settings.model_fields["pipeline"].default})
    log = tmp_path / "worker.log"
    try:
        with Worker(real, log) as worker:
            while is_alive(worker.pid):
                assert client.get("/readyz").status_code == 503
            assert worker.wait() == 1
    finally:
        (tmp_path / shard.name).rename(shard)
    assert f"{shard}: missing shard" in log.read_text()
    assert client.get(f"/v1/videos/{video['id']}").json()["status"] == "queued"
