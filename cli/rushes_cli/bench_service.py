"""`rushes bench service`: clips of a running service, for so many clients at once as ask for them.

Each client sends a request, waits for its clip and sends the next one. A clip's latency is from sending the request to
hearing that its file is stored, which the API says within a quarter of a second; what a deployment does is the clips of
one such run by the time from the first request to the last clip.
"""

import argparse
import json
import math
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from rushes_core.clip import Clip
from rushes_core.errors import RushesError
from rushes_core.fields import MAX_SEED
from rushes_core.states import FINAL_STATES

from rushes_cli.bench_lengths import add_length_options, check_lengths, mixed, prompt_text
from rushes_cli.campaigns.client import Client, Refused, Unreachable, from_environment
from rushes_cli.main import UsageError
from rushes_cli.signals import Interrupted, deferred, interruptible

MAX_CONCURRENCY = 256
WAIT_SECONDS = 30
"""How long one question for a clip's state may take to be answered."""
POLL_SECONDS = 1.0
"""Between two questions where the API has no seat for those who wait, or a proxy takes the wish to wait away."""
CLEANING_PATIENCE_SECONDS = 5.0
"""How long an API that does not answer is asked to cancel or to delete."""
MAX_CHARACTERS_A_TOKEN = 12
SCOPES = "videos:write and videos:read"
FINAL = frozenset(state.public_status for state in FINAL_STATES)
ORIGIN = "rushes bench service"
"""What the metadata of every job says of it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Speaks with the API at RUSHES_URL (default http://127.0.0.1:8000), with the key RUSHES_KEY: one with the "
        f"scopes {SCOPES}. Renders real clips, which take GPU time, and deletes them."
    )
    add_length_options(parser)
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], metavar="C", help="clients, one run for each (default 1)"
    )
    parser.add_argument("--requests", type=int, default=32, help="clips of a run that count (default 32)")
    parser.add_argument(
        "--warm-up", type=int, default=6, help="clips before the first run, for most clients (default 6)"
    )
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
    status: str
    code: str | None
    """Of the error, unless it completed."""
    latency: float
    queued: float | None
    ran: float | None
    attempt: int


class Repeats:
    """Counts requests that are sent again, and says why."""

    def __init__(self) -> None:
        self.count = 0

    def tell(self, reason: str) -> None:
        self.count += 1
        print(f"rushes bench: waiting for the API: {reason}", file=sys.stderr)


@dataclass
class Run:
    """Requests of some clients, together."""

    client: Client
    cleaner: Client
    """The same API, asked for less long."""
    shapes: Sequence[Shape]
    """Of the requests, in order."""
    concurrency: int
    first_seed: int
    name: str
    done: list[Done] = field(default_factory=list[Done])
    seconds: float = 0.0
    """From the first request to the last clip, or until it was broken off."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._tag = uuid4().hex
        self._open: set[str] = set()
        self._requests = iter(enumerate(self.shapes))

    @property
    def is_complete(self) -> bool:
        return len(self.done) == len(self.shapes)

    def go(self) -> None:
        """Send every request; whatever ends this early, what is open then is cancelled.

        Raises:
            Refused, Unreachable: the API does not take a request, or does not answer.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="client") as clients:
            try:
                running = [clients.submit(self._be_client) for _ in range(self.concurrency)]
                ended, _ = wait(running, return_when=FIRST_EXCEPTION)
                for one in ended:
                    one.result()
            except BaseException:
                self._stop.set()
                self._cancel(sorted(self._open))
                raise
            finally:
                self.seconds = time.monotonic() - began

    def delete(self) -> None:
        """Every job and clip of this run, also one whose acceptance was never heard of.

        Raises:
            RushesError: some stay.
        """
        left, why = 0, ""
        try:
            ids = [video["id"] for video in self.cleaner.pages("/v1/videos", limit=100, **{"metadata[run]": self._tag})]
        except (Refused, Unreachable) as error:
            raise RushesError(f"the clips with the metadata run={self._tag} are not deleted: {error}") from None
        for video_id in ids:
            try:
                self.cleaner.delete(f"/v1/videos/{video_id}")
            except Refused as error:
                left, why = left + 1, str(error)
            except Unreachable as error:
                left, why = len(ids), str(error)
                break
        if left:
            raise RushesError(
                f"of {len(ids)} clips with the metadata run={self._tag} up to {left} are not deleted: {why}"
            )

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
        seed = (self.first_seed + number) % (MAX_SEED + 1)
        metadata = {"made_by": ORIGIN, "run": self._tag}
        video = self.client.post("/v1/videos", shape.body | {"seed": seed, "metadata": metadata})
        path = f"/v1/videos/{video['id']}"
        with self._lock:
            self._open.add(video["id"])
        while video["status"] not in FINAL:
            if self._stop.is_set():
                self._cancel([video["id"]])
                return
            asked = time.monotonic()
            video = self.client.wait(path, WAIT_SECONDS)
            if video["status"] not in FINAL and time.monotonic() - asked < POLL_SECONDS:
                self._stop.wait(POLL_SECONDS)
        latency = time.monotonic() - began
        timing = video.get("timing") or {}
        error = video.get("error") or {}
        ended = Done(
            shape,
            video["status"],
            error.get("code"),
            latency,
            timing.get("queued_s"),
            timing.get("run_s"),
            video.get("attempt", 1),
        )
        with self._lock:
            self._open.discard(video["id"])
            self.done.append(ended)
            count = len(self.done)
        how = "" if ended.status == "completed" else f", {ended.status} ({ended.code})"
        print(f"{self.name}: {count} of {len(self.shapes)}, {shape.title}: {latency:.2f} s{how}", file=sys.stderr)

    def _cancel(self, ids: Sequence[str]) -> None:
        # the API may be away: then there is nothing more to be done
        with suppress(Unreachable):
            for video_id in ids:
                # it may have ended meanwhile
                with suppress(Refused):
                    self.cleaner.post(f"/v1/videos/{video_id}/cancel")


def run(arguments: argparse.Namespace) -> int:
    """0: every clip completed."""
    _check(arguments)
    try:
        with interruptible(), ExitStack() as clients:
            repeats = Repeats()
            client = clients.enter_context(closing(from_environment(on_wait=repeats.tell, scope=SCOPES)))
            cleaner = clients.enter_context(closing(from_environment(patience=CLEANING_PATIENCE_SECONDS, scope=SCOPES)))
            return _measure(client, cleaner, repeats, arguments)
    except Interrupted as interruption:
        print("rushes bench: interrupted; what it had queued is cancelled", file=sys.stderr)
        return 128 + interruption.signum


def _measure(client: Client, cleaner: Client, repeats: Repeats, arguments: argparse.Namespace) -> int:
    shapes = _shapes(client, arguments)
    order = random.Random(arguments.seed)
    seed = arguments.seed
    done: list[Done] = []
    counts = [(f"C={concurrency}", concurrency, arguments.requests) for concurrency in arguments.concurrency]
    if arguments.warm_up:
        counts.insert(0, ("warm-up", min(max(arguments.concurrency), arguments.warm_up), arguments.warm_up))
    for name, concurrency, count in counts:
        one = Run(client, cleaner, mixed(shapes, count, order), concurrency, seed, name)
        repeats.count = 0
        try:
            one.go()
        finally:
            with deferred():
                if name != "warm-up":
                    print(json.dumps(figures(one, arguments, client.url, repeats.count)), flush=True)
                if not arguments.keep:
                    one.delete()
        seed += count
        done += one.done
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
    check_lengths(arguments)


def _shapes(client: Client, arguments: argparse.Namespace) -> list[Shape]:
    """Every combination of lengths, each tried by the service before anything is queued.

    Raises:
        Refused, Unreachable
        RushesError: the service takes no prompt of such a length.
    """
    # with a key that may not look, clips would be queued and never be heard of
    client.get("/v1/videos", limit=1)
    shapes = []
    common: dict[str, Any] = {"size": arguments.size}
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
    """A prompt in which the service counts `tokens`, or one less where no more text makes just one more.

    Raises:
        Refused: the service refuses something of `body` but the prompt.
        RushesError: it takes no prompt of this length.
    """

    def count(length: int) -> int:
        return _validated(client, body | {"prompt": prompt_text(length)})["num_tokens"]

    low, high = 1, tokens * MAX_CHARACTERS_A_TOKEN
    # the longest that is not too long: but for a word that is cut, what is longer has no fewer tokens
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
        try:
            count(low + 1)
        except Refused as error:
            raise RushesError(f"--tokens {tokens}: {error}") from None
    return prompt_text(low)


def _validated(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    return client.post("/v1/videos/validate", body)


def figures(run: Run, arguments: argparse.Namespace, url: str, repeats: int) -> dict[str, Any]:
    """What one run came to: times in seconds, clips and times of those that completed."""
    completed = [one for one in run.done if one.status == "completed"]
    rendered = sum(Clip.for_seconds(one.shape.seconds).num_frames for one in completed)
    codes = [one.code or one.status for one in run.done if one.status != "completed"]
    titles = {(shape.seconds, shape.tokens): shape.title for shape in run.shapes}
    return {
        "url": url,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "size": arguments.size,
        "seed": run.first_seed,
        "concurrency": run.concurrency,
        "requests": len(run.shapes),
        "complete": run.is_complete,
        "completed": len(completed),
        "failed": {code: codes.count(code) for code in sorted(set(codes))},
        "retried": sum(one.attempt > 1 for one in run.done),
        "sent_again": repeats,
        "seconds": round(run.seconds, 3),
        "videos_per_second": _rate(len(completed), run.seconds),
        "frames_per_second": _rate(rendered, run.seconds),
        "latency_s": _spread([one.latency for one in completed]),
        "queued_s": _spread([one.queued for one in completed if one.queued is not None]),
        "run_s": _spread([one.ran for one in completed if one.ran is not None]),
        "shapes": {
            title: _spread([one.latency for one in completed if one.shape.title == title])
            for _, title in sorted(titles.items())
        },
    }


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
