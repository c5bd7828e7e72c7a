"""`rushes demo`: one prompt through the whole system, from HTTP to a checked MP4, on this machine."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rushes_core.errors import InvalidRequest, RushesError
from rushes_core.prompt import check_prompt
from rushes_core.request import parse

from rushes_cli.local import LocalRushes, Parts
from rushes_cli.main import UsageError
from rushes_cli.signals import Interrupted, end_with_parent, interruptible
from rushes_cli.stack.ports import free_port
from rushes_cli.terminal import ProgressLine, say

READY_TIMEOUT_SECONDS = 180.0
JOB_TIMEOUT_SECONDS = 900.0
MAX_FAILURES_OF_A_JOB = 5
"""More than the attempts after which a job that ends its workers is given up and says so itself."""
_UNFINISHED = ("queued", "in_progress")


class DemoError(RushesError):
    """The demo did not end with a clip; says why."""


def run(arguments: argparse.Namespace) -> int:
    """Render one clip; returns 0 when it passed every check.

    Raises:
        UsageError: the arguments ask for what is not served; nothing was started.
        RushesError: the clip was not made, not found in the bucket, or not as it must be.
    """
    parts = Parts(free_port(), arguments.layout, arguments.device)
    parts.check()
    try:
        parse(_request(arguments))
        check_prompt(arguments.prompt)
    except InvalidRequest as error:
        raise UsageError(str(error)) from None
    try:
        with interruptible(), LocalRushes(arguments.state, parts) as rushes:
            if arguments.end_with_parent:
                end_with_parent()
            _demonstrate(rushes, arguments)
    except Interrupted as interruption:
        say("interrupted; everything is stopped")
        return 128 + interruption.signum
    say("everything is stopped")
    return 0


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("prompt", "seconds", "size", "seed")}


def _demonstrate(rushes: LocalRushes, arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    rushes.start(say)
    say(f"starting the API, a dispatcher, a sender, a loader and a worker of layout {arguments.layout} ...")
    rushes.wait_until_ready(say, timeout_seconds=READY_TIMEOUT_SECONDS)
    headers = {"Authorization": f"Bearer {rushes.api_key}"}
    with httpx.Client(
        base_url=rushes.base_url, headers=headers, trust_env=False, timeout=30, follow_redirects=True
    ) as client:
        request = _request(arguments)
        say(f"POST {rushes.base_url}/v1/videos {request}")
        began = time.monotonic()
        video = _json(client.post("/v1/videos", json=request))
        video = _wait(client, video["id"], rushes)
        took = time.monotonic() - began
        clip = arguments.out / f"{video['id']}.mp4"
        _download(client, video["id"], clip)
    _report(rushes, video, clip, took)


def _wait(client: httpx.Client, video_id: str, rushes: LocalRushes) -> dict[str, Any]:
    """The finished job, shown as it runs."""
    deadline = time.monotonic() + JOB_TIMEOUT_SECONDS
    with ProgressLine(sys.stdout) as line:
        while True:
            video = _json(client.get(f"/v1/videos/{video_id}"))
            line.show(video)
            if video["status"] not in _UNFINISHED:
                break
            rushes.check_running(max_failures=MAX_FAILURES_OF_A_JOB)
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{video_id} is still {video['status']} after {JOB_TIMEOUT_SECONDS:g} s; {rushes.last_words()}"
                )
            time.sleep(0.2)
    if video["status"] != "completed":
        error = video["error"] or {}
        raise DemoError(f"{video_id} {video['status']}: {error.get('message')}\n{rushes.last_words()}")
    return video


def _download(client: httpx.Client, video_id: str, target: Path) -> None:
    partial = target.with_suffix(".mp4.partial")
    with client.stream("GET", f"/v1/videos/{video_id}/content") as answer:
        if answer.is_error:
            answer.read()
            _json(answer)
        with partial.open("wb") as file:
            for piece in answer.iter_bytes():
                file.write(piece)
    partial.replace(target)


def _report(rushes: LocalRushes, video: dict[str, Any], clip: Path, took: float) -> None:
    from rushes_worker.media.validate import validate_clip

    width, height = map(int, video["size"].split("x"))
    facts = validate_clip(clip, width=width, height=height, num_frames=video["output"]["num_frames"])
    key, stored_bytes = _find_in_bucket(rushes, video["id"])
    if stored_bytes != facts.bytes or video["output"]["sha256"] != facts.sha256:
        raise DemoError(f"{clip} differs from what is stored: {facts.bytes} bytes here, {stored_bytes} in the bucket")
    say(
        f"\n  file      {clip} ({facts.bytes:,} bytes)\n"
        f"  picture   {facts.num_frames} frames of {facts.width}x{facts.height} at {facts.fps} fps, "
        f"{facts.duration_seconds:.3f} s, {facts.video_codec} {facts.profile} level {facts.level}\n"
        f"  sound     {facts.audio_codec}, {facts.audio_channels} channels, {facts.audio_sample_rate} Hz, "
        f"{facts.audio_duration_seconds:.3f} s, RMS {facts.audio_rms:.3f}\n"
        f"  bucket    s3://{rushes.bucket}/{key} ({stored_bytes:,} bytes, found in the bucket's listing)\n"
        f"  time      {took:.1f} s from submission to completion\n\n"
        "The checkpoint of this demo has random weights, so the picture is noise; the way it took is the real one.\n"
    )


def _find_in_bucket(rushes: LocalRushes, video_id: str) -> tuple[str, int]:
    """Key and size of the job's clip, from the bucket's own listing."""
    found = [item for item in rushes.stack.list_bucket() if video_id in item[0] and item[0].endswith(".mp4")]
    if len(found) != 1:
        raise DemoError(f"bucket {rushes.bucket} holds {len(found)} clips of {video_id}, expected one")
    return found[0]


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if answer.is_error:
        message = body.get("error", {}).get("message") or answer.text[:200]
        raise DemoError(f"{answer.request.method} {answer.request.url.path} answered {answer.status_code}: {message}")
    return body
