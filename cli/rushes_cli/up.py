"""`rushes up`: everything on this machine, until Ctrl-C."""

import argparse
import json
import time

import httpx

from rushes_cli.local import LocalRushes, Parts, check_port_is_free
from rushes_cli.main import DEFAULT_PORT
from rushes_cli.signals import Interrupted, end_with_parent, interruptible
from rushes_cli.stack.ports import free_port
from rushes_cli.terminal import say

READY_TIMEOUT_SECONDS = 3_600.0
"""A released checkpoint of many gigabytes may lie on a slow disk."""

_PROMPT = "A paper boat drifts down a rain gutter"

_READY = """\

Rushes is ready. Ctrl-C stops it; what it stored stays in {state}.

  URL       {url}/v1
  API key   {key}
  model     {model}
  bucket    s3://{bucket} at {store}
  database  {database}
  logs      {logs}

With curl:

  curl -s {url}/v1/videos -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
    -d '{body}'
  curl -s {url}/v1/videos/VIDEO_ID -H 'Authorization: Bearer {key}' -H 'Prefer: wait=60'
  curl -fsSLo clip.mp4 {url}/v1/videos/VIDEO_ID/content -H 'Authorization: Bearer {key}'

With `rushes keys` and `rushes projects`:

  export RUSHES_DATABASE_URL='{database}'

With the OpenAI SDK (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  video = client.videos.create_and_poll(model="{model}", prompt="{prompt}", seconds="5")
  client.videos.download_content(video.id).write_to_file("clip.mp4")
"""


def run(arguments: argparse.Namespace) -> int:
    """Run until a signal, which is the normal end, or until a part dies, which raises StackError."""
    try:
        with interruptible():
            if arguments.end_with_parent:
                end_with_parent()
            _serve(arguments)
    except Interrupted:
        say("stopped")
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    port = arguments.port
    if port is not None:
        check_port_is_free(port)
    else:
        port = free_port(DEFAULT_PORT)
        if port != DEFAULT_PORT:
            say(f"port {DEFAULT_PORT} is taken, so the API gets port {port}")
    parts = Parts(port, arguments.layout, arguments.device, arguments.checkpoint)
    parts.check()
    with LocalRushes(arguments.state, parts) as rushes:
        rushes.start(say)
        say(f"starting the API, a dispatcher, a sender, a loader and a worker of layout {parts.layout} ...")
        rushes.wait_until_ready(say, timeout_seconds=READY_TIMEOUT_SECONDS)
        say(_instructions(rushes))
        try:
            while True:
                rushes.stack.check_running()
                time.sleep(0.2)
        except Interrupted:
            say("\nstopping ...")
            raise


def _instructions(rushes: LocalRushes) -> str:
    key = rushes.api_key
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=rushes.base_url, headers=headers, trust_env=False, timeout=10) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    return _READY.format(
        state=rushes.stack.state_dir,
        url=rushes.base_url,
        key=key,
        model=model,
        bucket=rushes.bucket,
        database=rushes.database_url,
        store=rushes.stack.settings_env["RUSHES_S3_ENDPOINT_URL"],
        logs=rushes.stack.logs,
        body=json.dumps({"prompt": _PROMPT, "seconds": "5"}),
        prompt=_PROMPT,
    )
