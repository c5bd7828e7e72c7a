"""`rushes bench service`: clips of a running service, for so many clients at once as ask for them.

Each client sends a request, waits for its clip and sends the next one. A clip's latency is from sending the request to
hearing that its file is stored; what a deployment does is the clips of one such run by the time from the first request
to the last clip.
"""

import argparse
import json
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from rushes_core.clip import Clip
from rushes_core.errors import RushesError
from rushes_core.fields import MAX_SEED

from rushes_cli.bench_prompt import prompt_text
from rushes_cli.campaigns.client import Client, Refused, Unreachable, from_environment
from rushes_cli.main import UsageError
from rushes_cli.signals import Interrupted, interruptible

MAX_CONCURRENCY = 256
WAIT_SECONDS = 30
"""How long one question for a clip's state may take to be answered."""
MAX_CHARACTERS_A_TOKEN = 12
FINAL = ("completed", "failed", "cancelled", "expired")
ORIGIN = {"made_by": "rushes bench service"}
"""Metadata of every job."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Speaks with the API at RUSHES_URL (default http://127.0.0.1:8000), with the key RUSHES_KEY: one with the "
        "scopes videos:write and videos:read. Renders real clips, which take GPU time, and deletes them."
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0], help="clip lengths (default 5)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000], help="prompt lengths (default 1000)")
    parser.add_argument("--size", default="1344x768", help="canvas (default 1344x768)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], metavar="C", help="clients, one run for each (default 1)"
    )
    parser.add_argument("--requests", type=int, default=32, help="clips of a run that count (default 32)")
    parser.add_argument("--warm-up", type=int, default=6, help="clips before the first run (default 6)")
    parser.add_argument("--priority", help="of the jobs (default: the API's)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of lengths and of the noise (default 0)")
    parser.add_argument("--keep", action="store_true", help="leave the clips in the service")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request asks for."""

    seconds: float
    tokens: int
    """That the service counts in the prompt."""
    body: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.seconds:g} s, {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Done:
    """How a request ended. `latency` is in seconds, and so are both parts of it that the service tells."""

    shape: Shape
    id: str
    status: str
    code: str | None
    """Of the error, unless it completed."""
    latency: float
    queued: float | None
    ran: float | None


@dataclass
class Run:
    """Requests of some clients, together."""

    client: Client
    shapes: Sequence[Shape]
    """Of the requests, in order."""
    concurrency: int
    first_seed: int
    name: str
    done: list[Done] = field(default_factory=list[Done])
    seconds: float = 0.0
    """From the first request to the last clip."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ids: list[str] = []
        self._open: set[str] = set()
        self._requests = iter(enumerate(self.shapes))

    def go(self) -> None:
        """Send every request; whatever ends this early, what is open then is cancelled.

        Raises:
            Refused, Unreachable: the API does not take a request, or does not answer.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="client") as clients:
            running = [clients.submit(self._be_client) for _ in range(self.concurrency)]
            try:
                ended, _ = wait(running, return_when=FIRST_EXCEPTION)
                for one in ended:
                    one.result()
            except BaseException:
                self._stop.set()
                self._cancel(sorted(self._open))
                raise
        self.seconds = time.monotonic() - began

    def delete(self) -> None:
        """Every job and clip of this run.

        Raises:
            Refused, Unreachable
        """
        for video_id in self._ids:
            self.client.delete(f"/v1/videos/{video_id}")

    def _be_client(self) -> None:
        try:
            while not self._stop.is_set() and (request := self._take()) is not None:
                self._have_rendered(*request)
        except BaseException:
            # whatever this one met, the others would
            self._stop.set()
            raise

    def _take(self) -> tuple[int, Shape] | None:
        with self._lock:
            return next(self._requests, None)

    def _have_rendered(self, number: int, shape: Shape) -> None:
        began = time.monotonic()
        video = self.client.post("/v1/videos", shape.body | {"seed": (self.first_seed + number) % (MAX_SEED + 1)})
        path = f"/v1/videos/{video['id']}"
        with self._lock:
            self._ids.append(video["id"])
            self._open.add(video["id"])
        while video["status"] not in FINAL:
            if self._stop.is_set():
                self._cancel([video["id"]])
                return
            video = self.client.wait(path, WAIT_SECONDS)
        latency = time.monotonic() - began
        timing = video.get("timing") or {}
        error = video.get("error") or {}
        ended = Done(
            shape, video["id"], video["status"], error.get("code"), latency, timing.get("queued_s"), timing.get("run_s")
        )
        with self._lock:
            self._open.discard(video["id"])
            self.done.append(ended)
            count = len(self.done)
        how = "" if ended.status == "completed" else f", {ended.status} ({ended.code})"
        print(f"{self.name}: {count} of {len(self.shapes)}, {shape.title}: {latency:.2f} s{how}", file=sys.stderr)

    def _cancel(self, ids: Sequence[str]) -> None:
        for video_id in ids:
            # it may have ended meanwhile, or the API may be away: then there is nothing more to be done
            with suppress(Refused, Unreachable):
                self.client.post(f"/v1/videos/{video_id}/cancel")


def run(arguments: argparse.Namespace) -> int:
    """0: every clip completed."""
    _check(arguments)
    try:
        with interruptible(), closing(from_environment(on_wait=_tell, scope="videos:write")) as client:
            return _measure(client, arguments)
    except Interrupted as interruption:
        print("rushes bench: interrupted; what it had queued is cancelled", file=sys.stderr)
        return 128 + interruption.signum


def _measure(client: Client, arguments: argparse.Namespace) -> int:
    shapes = _shapes(client, arguments)
    order = random.Random(arguments.seed)
    seed = arguments.seed
    done: list[Done] = []
    counts = [(f"C={concurrency}", concurrency, arguments.requests) for concurrency in arguments.concurrency]
    if arguments.warm_up:
        counts.insert(0, ("warm-up", min(arguments.concurrency[0], arguments.warm_up), arguments.warm_up))
    for name, concurrency, count in counts:
        one = Run(client, mixed(shapes, count, order), concurrency, seed, name)
        try:
            one.go()
        finally:
            if not arguments.keep:
                with suppress(Refused, Unreachable):
                    one.delete()
        seed += count
        done += one.done
        if name != "warm-up":
            print(json.dumps(figures(one)), flush=True)
    if num_failed := sum(one.status != "completed" for one in done):
        raise RushesError(f"{num_failed} of {len(done)} clips did not complete")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for concurrency in arguments.concurrency:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise UsageError(f"--concurrency must be in 1..{MAX_CONCURRENCY}, got {concurrency}")
    if arguments.requests < max(arguments.concurrency):
        raise UsageError(
            f"--requests must be at least the largest --concurrency, {max(arguments.concurrency)}, got "
            f"{arguments.requests}"
        )
    if arguments.warm_up < 0:
        raise UsageError(f"--warm-up must be at least 0, got {arguments.warm_up}")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise UsageError(f"--seed must be in 0..{MAX_SEED}, got {arguments.seed}")
    for tokens in arguments.tokens:
        if tokens < 1:
            raise UsageError(f"--tokens must be at least 1, got {tokens}")
    for seconds in arguments.seconds:
        try:
            Clip.for_seconds(seconds)
        except ValueError as error:
            raise UsageError(f"--{error}") from None


def _shapes(client: Client, arguments: argparse.Namespace) -> list[Shape]:
    """Every combination of lengths, each tried by the service before anything is queued."""
    shapes = []
    common = {"size": arguments.size, "metadata": ORIGIN}
    if arguments.priority is not None:
        common["priority"] = arguments.priority
    for tokens in arguments.tokens:
        prompt = None
        for seconds in arguments.seconds:
            body = common | {"seconds": f"{seconds:g}"}
            prompt = prompt or prompt_of(client, body, tokens)
            body |= {"prompt": prompt}
            shapes.append(Shape(seconds, _validated(client, body)["num_tokens"], body))
    return shapes


def prompt_of(client: Client, body: dict[str, Any], tokens: int) -> str:
    """A prompt in which the service counts `tokens`, or as many of them as words allow.

    Raises:
        Refused: the service takes no prompt of this length, or refuses something else of `body`.
    """

    def count(length: int) -> int:
        return _validated(client, body | {"prompt": prompt_text(length)})["num_tokens"]

    low, high = 1, tokens * MAX_CHARACTERS_A_TOKEN
    # the longest that is not too long: what is longer has as many tokens, or more
    while low < high:
        middle = (low + high + 1) // 2
        try:
            fits = count(middle) <= tokens
        except Refused as error:
            if error.param != "prompt":
                raise
            fits = False
        low, high = (middle, high) if fits else (low, middle - 1)
    if count(low) < tokens:
        # the next longer one says why it is refused, if it is
        count(low + 1)
    return prompt_text(low)


def _validated(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    return client.post("/v1/videos/validate", body)


def mixed(shapes: Sequence[Shape], count: int, order: random.Random) -> list[Shape]:
    """`count` of them in random order, each as often as the others."""
    chosen = [shapes[index % len(shapes)] for index in range(count)]
    order.shuffle(chosen)
    return chosen


def figures(run: Run) -> dict[str, Any]:
    """What one run came to; seconds, and clips of those that completed."""
    completed = [one for one in run.done if one.status == "completed"]
    rendered = sum(Clip.for_seconds(one.shape.seconds).num_frames for one in completed)
    codes = [one.code or one.status for one in run.done if one.status != "completed"]
    return {
        "concurrency": run.concurrency,
        "requests": len(run.shapes),
        "completed": len(completed),
        "failed": {code: codes.count(code) for code in sorted(set(codes))},
        "seconds": round(run.seconds, 3),
        "videos_per_second": _rate(len(completed), run.seconds),
        "frames_per_second": _rate(rendered, run.seconds),
        "latency_s": _spread([one.latency for one in completed]),
        "queued_s": _spread([one.queued for one in completed if one.queued is not None]),
        "run_s": _spread([one.ran for one in completed if one.ran is not None]),
        "shapes": {title: _spread([one.latency for one in ones]) for title, ones in _by_shape(completed)},
    }


def _by_shape(done: Sequence[Done]) -> Iterator[tuple[str, list[Done]]]:
    for title in sorted({one.shape.title for one in done}):
        yield title, [one for one in done if one.shape.title == title]


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4) if seconds else 0.0


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles by the nearest rank: each is a value that was measured."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {
        name: max(0, math.ceil(share * len(ordered)) - 1) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {name: round(ordered[rank], 3) for name, rank in ranks.items()} | {"max": round(ordered[-1], 3)}


def _tell(reason: str) -> None:
    print(f"rushes bench: waiting for the API: {reason}", file=sys.stderr)
