"""Campaigns over HTTP, as clients send and see them."""

from pathlib import Path
from typing import Any

from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import API_KEY
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack

LINES = jsonl(*(openai_line(number) for number in range(1, 4)))


CLIP = bytes(range(256)) * 50


def campaign_settings(stack: SharedStack, checkpoint_in: Path) -> Settings:
    """Of an API whose campaigns may tell of themselves, and whose files may not be large."""
    return stack.settings(
        checkpoint=tiny_checkpoint(checkpoint_in),
        api_key=API_KEY,
        files_max_bytes=1_000_000,
        webhook_key="A" * 43 + "=",
        webhook_loopback=True,
    )


def upload(client: TestClient, data: bytes = LINES, name: str = "lines.jsonl", **more: Any) -> str:
    response = client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "batch"}, **more)
    assert response.status_code == 200, response.text
    file_id: str = response.json()["id"]
    return file_id


def made(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def send(client: TestClient, data: bytes = LINES, **options: Any) -> dict[str, Any]:
    return made(client.post("/v1/campaigns", json={"input_file_id": upload(client, data), **options}))


def refused(response: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    return error


def get(client: TestClient, campaign_id: str) -> dict[str, Any]:
    return made(client.get(f"/v1/campaigns/{campaign_id}"))


def prompts(campaigns: Campaigns, campaign_id: str) -> list[str]:
    return [job.prompt for job in campaigns.items(campaign_id)]


def batch_body(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": "/v1/videos", "completion_window": "24h"}


def measure(campaigns: Campaigns, *, num_jobs: int, seconds: float) -> None:
    """Have clips as those of `openai_line` known to run so long, and one replica up."""
    job = {"w": 480, "h": 480, "n": 107, "model": campaigns.model.name, "jobs": num_jobs, "s": seconds}
    campaigns.execute(
        "INSERT INTO measured_times (model, width, height, num_frames, num_jobs, run_p50, run_p80, run_p90, phases) "
        "VALUES (:model, :w, :h, :n, :jobs, :s, :s, :s, '{}')",
        **job,
    )
    campaigns.execute(
        "INSERT INTO replicas (id, pool, layout, model, device, state, epoch) "
        "VALUES ('eta#1', 'default', 'r1s2', :model, 'cpu', 'ready', 1)",
        model=campaigns.model.name,
    )
