"""Schemathesis on the served OpenAPI document: `make fuzz`, and a shorter run in the tests.

    python -m support.fuzz --examples 100 --seed 7

What is checked says schemathesis.toml.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import httpx
from rushes_core.settings import Settings
from support import fuzz_hooks
from support.api import API_KEY, AUTHORIZED, ApiProcess, JobDriver
from support.stack import settings_of

WEBHOOK_KEY = urlsafe_b64encode(bytes(32)).decode()
OPTIONS: dict[str, Any] = {"webhook_key": WEBHOOK_KEY, "sync_timeout_seconds": 1}
"""Settings that a run needs; there is no worker that anybody could wait for."""
PHASES = "examples,coverage,fuzzing"


def populate(settings: Settings, url: str, folder: Path) -> dict[str, list[str]]:
    """Jobs in every state, a replica, files and campaigns: `video_id` of all jobs, `ended` of those with an end,
    `file_id`, `batch_id`."""
    driver = JobDriver(settings)
    with httpx.Client(base_url=url, headers=AUTHORIZED, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        driver.report_replica(model=model, state="ready")
        # a run before this one may have paused it
        for project in ("default", "*"):
            http.post("/v1/queue/resume", params={"project": project}).raise_for_status()
        ids = [http.post("/v1/videos", json={"prompt": "a dog"}).json()["id"] for _ in range(6)]
        _, running, completed, failed, cancelled, deleted = ids
        driver.complete(completed, b"clip" * 1_000, folder)
        driver.fail(failed, code="generation_failed", message="The clip was blank.")
        driver.start(running)
        http.post(f"/v1/videos/{cancelled}/cancel")
        http.delete(f"/v1/videos/{deleted}")
        upload = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        lines = [{"prompt": "a dog", "custom_id": str(number)} for number in range(3)]
        batches = [http.post("/v1/campaigns", json={"requests": lines}).json()["id"] for _ in range(6)]
        http.post(f"/v1/campaigns/{batches[0]}/cancel")
        http.delete(f"/v1/campaigns/{batches[1]}")
        http.post(f"/v1/campaigns/{batches[2]}/pause")
        files = [http.post("/v1/files", **upload).json()["id"] for _ in range(8)]
        http.delete(f"/v1/files/{files[0]}")
    driver.close()
    return {"video_id": ids, "file_id": files, "batch_id": batches, "ended": [completed, failed, cancelled, deleted]}


def fuzz(
    url: str, ids: dict[str, list[str]], folder: Path, *, examples: int, seed: int, phases: str = PHASES
) -> subprocess.CompletedProcess[str]:
    """Send what the document at `url` allows and what it does not; the exit status is 0 when nothing was wrong.

    Args:
        folder: where Schemathesis may leave its files.
        phases: of Schemathesis; "coverage" makes some 7,000 requests, whatever `examples` is.
    """
    command: list[str | Path] = [
        *(Path(sys.prefix) / "bin" / "schemathesis", "--config-file", Path(__file__).with_name("schemathesis.toml")),
        *("run", f"{url}/openapi.json"),
        *("--header", f"Authorization: {AUTHORIZED['Authorization']}"),
        *("--mode", "all", "--phases", phases, "--max-examples", str(examples)),
        *("--seed", str(seed), "--workers", "2", "--generation-database", "none"),
        *("--request-timeout", "30", "--suppress-health-check", "all", "--continue-on-failure", "--warnings", "off"),
    ]
    env = os.environ | {"SCHEMATHESIS_HOOKS": fuzz_hooks.__name__, fuzz_hooks.IDS: json.dumps(ids)}
    env |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


def main() -> int:
    from rushes_cli.stack import EmbeddedStack
    from rushes_core.database import migrate
    from support.checkpoints import tiny_checkpoint

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--examples", type=int, default=100, help="of each operation (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rushes-fuzz-") as directory, EmbeddedStack(directory) as stack:
        folder = Path(directory)
        checkpoint = tiny_checkpoint(folder / "checkpoint")
        settings = settings_of(stack.settings_env, checkpoint=checkpoint, api_key=API_KEY, **OPTIONS)
        migrate(settings)
        with ApiProcess(settings, folder / "api.log") as api:
            ids = populate(settings, api.url, folder)
            done = fuzz(api.url, ids, folder, examples=arguments.examples, seed=arguments.seed)
        print(done.stdout, done.stderr, sep="\n")
        crashes = [line for line in (folder / "api.log").read_text().splitlines() if "request_crashed" in line]
        print(*crashes, sep="\n")
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
