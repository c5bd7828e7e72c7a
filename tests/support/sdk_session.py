"""A session with OpenAI's SDK as a user would write it, told call by call: one line of JSON each.

    python sdk_session.py BASE_URL KEYS

Runs with whatever `openai` is found, of the line 2.x or 3.x, and imports nothing else. KEYS is a JSON object: `admin`,
`reader` (may not write), `full` (its queue has no place), `many` (of a project with many jobs) and `wrong`.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI

# the SDK marks its own videos resource so
warnings.filterwarnings("ignore", "The Sora API", DeprecationWarning)


def told(call: str, ask: Callable[[], Any], show: Callable[[Any], Any]) -> Any:
    """Do `ask`, print what came of it, and return it; None where it was an error."""
    try:
        answer = ask()
    except openai.APIStatusError as error:
        print(json.dumps({"call": call, "error": type(error).__name__, **_members(error)}), flush=True)
        return None
    print(json.dumps({"call": call, "answer": show(answer)}), flush=True)
    return answer


def _members(error: openai.APIStatusError) -> dict[str, Any]:
    return {
        "status": error.status_code,
        "message": error.message,
        "code": error.code,
        "param": error.param,
        "type": error.type,
        "request_id": bool(error.request_id),
        "retries": error.response.request.headers["x-stainless-retry-count"],
    }


def video(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("object", "status", "progress", "seconds", "size", "error")}


def main(base_url: str, keys: dict[str, str]) -> None:
    print(json.dumps({"openai": openai.__version__}), flush=True)
    clients = {name: OpenAI(base_url=base_url, api_key=key, timeout=120) for name, key in keys.items()}
    client = clients["admin"]
    prompt = "Waves roll against a lighthouse at dusk while a gull calls"
    wanted: dict[str, Any] = {"prompt": prompt, "seconds": "4", "size": "480x480"}

    later = told(
        "videos.create",
        lambda: client.videos.create(
            **wanted,
            extra_body={
                "metadata": {"take": "1"},
                "not_before": time.time() + 86_400,
                "target": {"short_edge": 480, "aspect_ratio": "1:1", "duration_seconds": 4.0},
                "conditions": [],
                "output": {"thumbnail": False, "key_prefix": "a/b"},
                "retention": {"anchor": "created_at", "seconds": 7_200},
                "priority": 10,
            },
        ),
        video,
    )
    told(
        "extra_body",
        lambda: client.videos.retrieve(later.id),
        lambda one: [one.metadata, one.priority, 7_199 < one.expires_at - one.created_at < 7_202],
    )
    told("videos.retrieve", lambda: client.videos.retrieve(later.id), video)
    told("videos.download_content (409)", lambda: client.videos.download_content(later.id), repr)
    told("videos.delete", lambda: client.videos.delete(later.id), lambda one: [one.object, one.deleted])
    told("videos.retrieve (410)", lambda: client.videos.retrieve(later.id), video)

    made = told("videos.create_and_poll", lambda: client.videos.create_and_poll(**wanted), video)
    clip = told("videos.download_content", lambda: client.videos.download_content(made.id).read(), len)
    assert clip[4:8] == b"ftyp"
    remix = told(
        "videos.remix",
        lambda: client.videos.remix(made.id, prompt="A dog", extra_headers={"Idempotency-Key": made.id}),
        lambda one: [one.prompt, one.seconds, one.size, one.remixed_from_video_id == made.id],
    )
    told(
        "videos.remix (422)",
        lambda: client.videos.remix(made.id, prompt="A cat", extra_headers={"Idempotency-Key": made.id}),
        video,
    )
    told("videos.delete (remix)", lambda: client.videos.delete(remix.id), lambda one: [one.object, one.deleted])
    told("videos.list", lambda: client.videos.list(limit=1), lambda page: [one.id == made.id for one in page.data])
    listed = told("videos.list (every page)", lambda: [one.id for one in clients["many"].videos.list(limit=100)], len)
    assert listed == sorted(set(listed), reverse=True)

    told("videos.create (400)", lambda: client.videos.create(prompt="x", extra_body={"secnds": 4}), video)
    told("videos.create (401)", lambda: clients["wrong"].videos.create(prompt="x"), video)
    told("videos.create (403)", lambda: clients["reader"].videos.create(prompt="x"), video)
    told("videos.retrieve (404)", lambda: client.videos.retrieve("video_00000000000000000000000000"), video)
    told("videos.create (404)", lambda: client.videos.create(prompt="x", model="sora-2"), video)
    full = clients["full"].with_options(max_retries=0)
    told("videos.create (429)", lambda: full.videos.create(prompt="x"), video)
    told("models.list", lambda: client.models.list(), lambda page: [one.object for one in page.data])
    _files(client, clients["reader"])
    _batches(client, clients["reader"])


def _files(client: OpenAI, reader: OpenAI) -> None:
    data = b'{"custom_id": "a", "body": {"prompt": "a dog"}}\n' * 200_000
    expiry: Any = {"anchor": "created_at", "seconds": 7_200}
    made = told(
        "files.create",
        lambda: client.files.create(file=("夜 1.jsonl", data), purpose="batch", expires_after=expiry),
        lambda one: [one.object, one.bytes == len(data), one.filename, one.purpose, one.status, one.status_details],
    )
    assert made.expires_at - made.created_at == 7_200
    small = told(
        "files.create (pathlib)",
        lambda: client.files.create(file=Path(__file__), purpose="batch"),
        lambda one: one.filename,
    )
    told("files.wait_for_processing", lambda: client.files.wait_for_processing(small.id), lambda one: one.status)
    told("files.retrieve", lambda: client.files.retrieve(made.id), lambda one: one == made)
    told("files.list", lambda: client.files.list(limit=1, purpose="batch"), lambda page: len(page.data))
    told(
        "files.list (every page)",
        lambda: {one.id for one in client.files.list(limit=1)},
        lambda ids: {made.id, small.id} <= ids,
    )
    told("files.content", lambda: client.files.content(made.id).read(), lambda content: content == data)
    for one in (made, small):
        told(
            f"files.delete ({one.bytes > 1_000_000})",
            lambda one=one: client.files.delete(one.id),
            lambda gone: [gone.object, gone.deleted],
        )
    told("files.retrieve (410)", lambda: client.files.retrieve(made.id), repr)
    told("files.retrieve (404)", lambda: client.files.retrieve("file_00000000000000000000000000"), repr)
    told("files.create (400)", lambda: client.files.create(file=b"x", purpose="vision"), repr)
    told("files.create (403)", lambda: reader.files.create(file=b"x", purpose="batch"), repr)


def _batches(client: OpenAI, reader: OpenAI) -> None:
    endpoint: Any = "/v1/videos"
    body = {"prompt": "A gull", "seconds": "4", "size": "480x480"}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    lines = [json.dumps(one) for one in (line, line | {"custom_id": "b", "body": body | {"seconds": "99"}})]
    file = client.files.create(file=("shots.jsonl", "\n".join(lines).encode()), purpose="batch")
    wanted: dict[str, Any] = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    made = told(
        "batches.create",
        lambda: client.batches.create(
            **wanted, metadata={"client": "acme"}, extra_body={"name": "Night", "proof": {"count": 9}}
        ),
        lambda one: [one.object, one.status, one.completion_window, one.metadata, one.errors, one.name],
    )
    deadline = time.monotonic() + 200
    while client.batches.retrieve(made.id).status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.5)
    done = told(
        "batches.retrieve",
        lambda: client.batches.retrieve(made.id),
        lambda one: [one.status, one.request_counts.total, one.request_counts.completed, one.request_counts.failed],
    )
    output, error = (
        json.loads(client.files.content(file_id).read()) for file_id in (done.output_file_id, done.error_file_id)
    )
    told(
        "files.content (output)",
        lambda: client.videos.download_content(output["response"]["body"]["id"]).read(),
        lambda clip: [output["custom_id"], output["response"]["status_code"], output["error"], clip[4:8] == b"ftyp"],
    )
    told(
        "files.content (errors)",
        lambda: client.files.retrieve(done.error_file_id),
        lambda one: [one.purpose, error["custom_id"], error["response"], error["error"]["param"]],
    )
    told("batches.list", lambda: client.batches.list(limit=1), lambda page: [page.data[0].id == made.id])
    told("batches.cancel (409)", lambda: client.batches.cancel(made.id), repr)
    waiting = client.batches.create(**wanted, extra_body={"start_paused": True})
    told("batches.cancel", lambda: client.batches.cancel(waiting.id), lambda one: one.status)
    told(
        "batches.list (every page)",
        lambda: {one.id for one in client.batches.list(limit=1)},
        lambda ids: {made.id, waiting.id} <= ids,
    )
    told("batches.create (400)", lambda: client.batches.create(**wanted | {"completion_window": "1s"}), repr)
    told("batches.create (403)", lambda: reader.batches.create(**wanted), repr)
    told("batches.retrieve (404)", lambda: client.batches.retrieve("batch_00000000000000000000000000"), repr)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
