"""What `rushes bench service` tells: figures of a run, and a line of JSON for every request when it ends."""

import argparse
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import IO, Any

from rushes_core.clip import Clip

from rushes_cli.bench_service_loops import Done, Loop, OpenLoop


def figures(run: Loop, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one run came to: times in seconds, clips and times of those that completed."""
    completed = [one for one in run.done if one.status == "completed"]
    rendered = sum(Clip.for_seconds(one.sending.shape.seconds).num_frames for one in completed)
    codes = [one.code or one.status for one in run.done if one.status != "completed"]
    titles = {(shape.seconds, shape.tokens): shape.title for shape in run.shapes}
    late = {"late_s": _spread([one.sending.late for one in run.done])} if isinstance(run, OpenLoop) else {}
    return {
        "url": run.client.url,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": arguments.size,
        "seed": arguments.seed,
        **run.about(),
        "requests": len(run.shapes),
        "complete": run.is_complete,
        "completed": len(completed),
        "failed": {code: codes.count(code) for code in sorted(set(codes))},
        "retried": sum(one.attempt > 1 for one in run.done),
        "sent_again": run.sent_again,
        "seconds": round(run.seconds, 3),
        "videos_per_second": _rate(len(completed), run.seconds),
        "frames_per_second": _rate(rendered, run.seconds),
        **late,
        "latency_s": _spread([one.latency for one in completed]),
        "queued_s": _spread([one.queued for one in completed if one.queued is not None]),
        "run_s": _spread([one.ran for one in completed if one.ran is not None]),
        "shapes": {
            title: _spread([one.latency for one in completed if one.sending.shape.title == title])
            for _, title in sorted(titles.items())
        },
    }


def write_line(file: IO[str], run: str, done: Done) -> None:
    """A line of JSON for a request that ended, which is in the file when this returns."""
    sending = done.sending
    line = {
        "run": run,
        "number": sending.number,
        "id": done.video_id,
        "seconds": sending.shape.seconds,
        "tokens": sending.shape.tokens,
        "size": sending.shape.body["size"],
        "submitted_at": sending.sent_at.isoformat(timespec="milliseconds"),
        "late_s": round(sending.late, 4),
        "status": done.status,
        "code": done.code,
        "latency_s": round(done.latency, 4),
        "queued_s": done.queued,
        "run_s": done.ran,
        "attempt": done.attempt,
    }
    file.write(f"{json.dumps(line)}\n")
    file.flush()


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds else 0.0


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles by the nearest rank: each is a value that was measured."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[name] = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return {name: round(value, 3) for name, value in (found | {"max": ordered[-1]}).items()}
