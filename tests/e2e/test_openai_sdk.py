"""The whole life of a clip through OpenAI's SDK, both of its lines, unmodified."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rushes_core.database import create_sync_engine
from rushes_core.ids import new_video_id
from sqlalchemy import text
from sqlalchemy.orm import Session
from support import sdk_session
from support.api import API_KEY
from support.commands import clean_environment
from support.new_jobs import insert_job
from support.service import Service
from support.worker import eventually

NUM_LISTED = 250
OLDER_SDK = Path(sys.prefix) / "openai2"


@pytest.fixture(scope="module")
def keys(shared_quick_service: Service) -> Iterator[dict[str, str]]:
    """The keys that a session takes, one of them of a project with many jobs that nobody renders."""
    http = shared_quick_service.http
    for name in ("sdk-many", "sdk-full"):
        assert http.post("/v1/projects", json={"name": name}).is_success
    wanted: dict[str, dict[str, Any]] = {
        "reader": {"scopes": ["videos:read"]},
        "full": {"project": "sdk-full", "max_queued": 0},
        "many": {"project": "sdk-many"},
    }
    made = {name: http.post("/v1/api_keys", json={"name": name, **body}).json() for name, body in wanted.items()}
    engine = create_sync_engine(shared_quick_service.settings)
    with Session(engine) as session, session.begin():
        for _ in range(NUM_LISTED):
            insert_job(
                session,
                id=new_video_id(),
                project="sdk-many",
                model="none",
                prompt="a dog",
                seed=1,
                width=480,
                height=480,
                num_frames=107,
                request={"seconds": "4"},
                max_attempts=1,
            )
    with shared_quick_service.loader():
        yield {"admin": API_KEY, "wrong": "wrong", **{name: key["secret"] for name, key in made.items()}}
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE project = 'sdk-many'"))
    engine.dispose()


@pytest.fixture
def service(quick_service: Service) -> Service:
    return quick_service


@pytest.mark.parametrize("line", [2, 3])
def test_a_session(service: Service, keys: dict[str, str], line: int) -> None:
    env = clean_environment() | ({"PYTHONPATH": str(OLDER_SDK)} if line == 2 else {})
    command = [sys.executable, "-P", sdk_session.__file__, f"{service.api.url}/v1", json.dumps(keys)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]

    used = lines.pop(0)["openai"]
    assert used.split(".")[0] == str(line)
    assert (used == version("openai")) is (line == 3)

    answers = {one["call"]: one["answer"] for one in lines if "answer" in one}
    waiting = {"object": "video", "status": "queued", "progress": 0, "seconds": "4", "size": "480x480", "error": None}
    assert answers["videos.create"] == answers["videos.retrieve"] == waiting
    assert answers["videos.create_and_poll"] == waiting | {"status": "completed", "progress": 100}
    assert answers["videos.delete"] == answers["videos.delete (remix)"] == ["video.deleted", True]
    assert answers["videos.download_content"] > 10_000
    assert answers["videos.remix"] == ["A dog", "4", "480x480", True]
    assert answers["videos.list"] == [True]
    assert answers["videos.list (every page)"] == NUM_LISTED
    assert answers["models.list"] == ["model"]
    assert answers["extra_body"] == [{"take": "1"}, "bulk", True]
    assert answers["files.create"] == ["file", True, "夜 1.jsonl", "batch", "processed", None]
    assert answers["files.create (pathlib)"] == "sdk_session.py"
    assert answers["files.wait_for_processing"] == "processed"
    assert answers["files.list"] == 1
    for call in ("files.retrieve", "files.list (every page)", "files.content"):
        assert answers[call] is True
    assert answers["files.delete (True)"] == answers["files.delete (False)"] == ["file", True]
    assert answers["batches.create"] == ["batch", "validating", "24h", {"client": "acme"}, None, "Night"]
    assert answers["batches.retrieve"] == ["completed", 2, 1, 1]
    assert answers["files.content (output)"] == ["a", 200, None, True]
    assert answers["files.content (errors)"] == ["batch_output", "b", None, "seconds"]
    assert answers["batches.list"] == [True]
    assert answers["batches.cancel"] == "cancelling"
    assert answers["batches.list (every page)"] is True
    assert len(answers) == 27

    errors = {one["call"]: one for one in lines if "error" in one}
    assert {call: (one["error"], one["status"], one["code"]) for call, one in errors.items()} == {
        "videos.download_content (409)": ("ConflictError", 409, "video_not_ready"),
        "videos.retrieve (410)": ("APIStatusError", 410, "video_deleted"),
        "videos.remix (422)": ("UnprocessableEntityError", 422, "idempotency_key_reused"),
        "videos.create (400)": ("BadRequestError", 400, "unknown_parameter"),
        "videos.create (401)": ("AuthenticationError", 401, "invalid_api_key"),
        "videos.create (403)": ("PermissionDeniedError", 403, "insufficient_scope"),
        "videos.retrieve (404)": ("NotFoundError", 404, "video_not_found"),
        "videos.create (404)": ("NotFoundError", 404, "model_not_found"),
        "videos.create (429)": ("RateLimitError", 429, "queue_full"),
        "files.retrieve (410)": ("APIStatusError", 410, "file_deleted"),
        "files.retrieve (404)": ("NotFoundError", 404, "file_not_found"),
        "files.create (400)": ("BadRequestError", 400, "invalid_value"),
        "files.create (403)": ("PermissionDeniedError", 403, "insufficient_scope"),
        "batches.cancel (409)": ("ConflictError", 409, "invalid_state"),
        "batches.create (400)": ("BadRequestError", 400, "invalid_value"),
        "batches.create (403)": ("PermissionDeniedError", 403, "insufficient_scope"),
        "batches.retrieve (404)": ("NotFoundError", 404, "batch_not_found"),
    }
    for one in errors.values():
        assert one["message"]
        assert one["request_id"]
        assert one["retries"] == "0"
    assert (errors["videos.create (400)"]["param"], errors["videos.create (404)"]["param"]) == ("secnds", "model")
    types = {call.partition("(")[2][:3]: one["type"] for call, one in errors.items()}
    assert (types["400"], types["401"], types["429"]) == (
        "invalid_request_error",
        "authentication_error",
        "rate_limit_error",
    )


def test_a_deleted_clip_leaves_the_store(service: Service) -> None:
    video_id = service.render(seed=11).id
    assert service.stored(video_id)
    assert service.http.delete(f"/v1/videos/{video_id}").json()["deleted"] is True
    eventually(lambda: not service.stored(video_id))
