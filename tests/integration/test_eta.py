"""What the API foresees of jobs that a real worker renders, from the times that a dispatcher measured."""

import time
from collections.abc import Iterator

import pytest
from rushes_api import eta
from rushes_api.app import create_app
from rushes_core.dispatcher import Dispatcher
from rushes_core.settings import Settings
from rushes_core.states import JobState
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, Worker, eventually

SLOW = "a dog [step 0.4]"


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("eta")
    return stack.settings(
        checkpoint=tiny_checkpoint(folder),
        api_key=API_KEY,
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
    )


@pytest.fixture(scope="module")
def rows(api_settings: Settings) -> Iterator[Jobs]:
    rows = Jobs(api_settings)
    yield rows
    rows.close()


def posted(client: TestClient, **fields: object) -> str:
    video_id: str = client.post("/v1/videos", json={"prompt": SLOW, "size": "480x480", **fields}).json()["id"]
    return video_id


def test_times_are_foreseen_once_a_clip_was_measured(
    api_settings: Settings, rows: Jobs, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eta, "REFRESH_SECONDS", 0.2)
    log = tmp_path_factory.mktemp("log") / "worker.log"
    dispatcher = Dispatcher(api_settings)
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client, Worker(api_settings, log) as worker:

        def eta_of(video_id: str) -> dict[str, float] | None:
            found: dict[str, float] | None = client.get(f"/v1/videos/{video_id}").json()["eta"]
            return found

        rows.wait_ready()
        first = posted(client)
        rows.wait_for(first, JobState.RUNNING)
        assert eta_of(first) is None
        rows.wait_completed(first)
        dispatcher.measure()

        # the second is claimed ahead and the third waits
        jobs = [posted(client) for _ in range(3)]
        rows.wait_for(jobs[0], JobState.RUNNING)
        began = time.time()
        last = eventually(lambda: eta_of(jobs[2]))
        assert last["confidence"] == "p80"
        assert began < last["starts_at"] < last["completes_at"] < began + 120
        hint = client.get(f"/v1/videos/{jobs[2]}").headers["openai-poll-after-ms"]
        assert 1_000 <= int(hint) <= 10_000
        running = eta_of(jobs[0])
        assert running is not None
        assert running["starts_at"] is None
        assert began < running["completes_at"] <= last["completes_at"]
        queue = client.get("/v1/queue").json()
        assert began < queue["empty_at"] <= last["completes_at"]

        estimate = client.post("/v1/videos/validate", json={"prompt": SLOW, "size": "480x480"}).json()["estimate"]
        assert last["starts_at"] <= estimate["starts_at"] < estimate["completes_at"] < began + 120
        assert estimate["gpu_seconds"] == estimate["run_seconds"] > 3

        # whoever sends it is told at once
        answer = client.post("/v1/videos", json={"prompt": SLOW, "size": "480x480"}).json()
        client.post(f"/v1/videos/{answer['id']}/cancel").raise_for_status()
        assert answer["queue"]["position"] == answer["queue"]["ahead"] + 1 > 0
        assert last["starts_at"] <= answer["eta"]["starts_at"] < answer["eta"]["completes_at"] < began + 120

        # nothing is foreseen of what nobody measured, of what is paused, and of what is over
        assert (eta_of(posted(client, seconds=8)) or {"completes_at": None})["completes_at"] is None
        client.post("/v1/queue/pause").raise_for_status()
        eventually(lambda: eta_of(jobs[2]) is None)
        assert client.get("/v1/queue").json()["empty_at"] is None
        rows.wait_completed(jobs[0])
        assert eta_of(jobs[0]) is None
        client.post("/v1/queue/resume").raise_for_status()
        eventually(lambda: eta_of(jobs[2]) is not None)

        worker.terminate()
        worker.wait()
        waits = posted(client)
        eventually(lambda: eta_of(waits) is None)
    dispatcher.close()
