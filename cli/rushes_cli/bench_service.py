"""`rushes bench service`: clips of a running service, for clients that wait for them or at a rate of requests.

With `--concurrency` each client sends a request, waits for its clip and sends the next one: what the service does at
most. With `--request-rate` requests are sent when they are due, whether those before have ended or not: how long people
wait who come by themselves. A clip's latency is from when its request was due to hearing that its file is stored, which
the API says within a quarter of a second; what a deployment does is the clips of one such run by the time from the
first request to the last clip.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import IO, Any

from rushes_core.errors import RushesError

from rushes_cli.bench_lengths import add_length_options, check_folder, check_lengths, mixed
from rushes_cli.bench_service_figures import figures, write_line
from rushes_cli.bench_service_loops import ClosedLoop, Done, Loop, OpenLoop, arrivals
from rushes_cli.bench_service_shapes import Shape, shapes_of
from rushes_cli.campaigns.client import Client, from_environment
from rushes_cli.main import UsageError
from rushes_cli.signals import Interrupted, deferred, interruptible

MAX_CONCURRENCY = 256
MAX_OPEN = 900
"""Requests of an open loop at once: each has a connection, and most processes may have 1,024 files open."""
DEFAULT_OPEN = 512
MAX_RATE = 1_000.0
MIN_BURSTINESS, MAX_BURSTINESS = 0.01, 1e6
CLEANING_PATIENCE_SECONDS = 5.0
"""How long an API that does not answer is asked to cancel or to delete."""
TOLD_EVERY_SECONDS = 10.0
"""Between two lines about an API that is away."""
SCOPES = "videos:write and videos:read"
WARM_UP = "warm-up"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Speaks with the API at RUSHES_URL (default http://127.0.0.1:8000), with the key RUSHES_KEY: one with the "
        f"scopes {SCOPES}. Renders real clips, which take GPU time, and deletes them."
    )
    add_length_options(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1],
        metavar="C",
        help="closed loop: clients that each wait for a clip before they send the next request (default 1); one run "
        "for each",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="R",
        help="open loop: requests a second, sent when they are due, whatever became of those before; one run for each",
    )
    parser.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="with --request-rate: 1 is a Poisson process (the default), less comes in bursts, more is more even",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help=f"with --request-rate: requests that are open at once; what is due beyond them is sent late (default "
        f"{DEFAULT_OPEN}, at most {MAX_OPEN})",
    )
    parser.add_argument("--requests", type=int, default=32, help="clips of a run that count (default 32)")
    parser.add_argument(
        "--warm-up", type=int, default=6, help="clips before the first run, for most clients (default 6)"
    )
    parser.add_argument("--priority", help="of the jobs (default: the API's)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of lengths, of times and of the noise (default 0)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also append a line of JSON for every request that counts, as it ends"
    )
    parser.add_argument("--keep", action="store_true", help="leave the clips in the service")
    parser.set_defaults(run=run)


class Waits:
    """Says why requests wait, once for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told_at = float("-inf")

    def tell(self, reason: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._told_at < TOLD_EVERY_SECONDS:
                return
            self._told_at = now
        print(f"rushes bench: waiting for the API: {reason}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """0: every clip completed."""
    _check(arguments)
    try:
        with interruptible(), ExitStack() as opened:
            client = opened.enter_context(closing(from_environment(on_wait=Waits().tell, needs=f"the scopes {SCOPES}")))
            cleaner = opened.enter_context(
                closing(from_environment(patience=CLEANING_PATIENCE_SECONDS, needs=f"the scopes {SCOPES}"))
            )
            out = None
            if arguments.out is not None:
                out = opened.enter_context(arguments.out.open("a", encoding="utf-8"))
            return _measure(client, cleaner, arguments, out)
    except Interrupted as interruption:
        print("rushes bench: interrupted; what it had queued is cancelled", file=sys.stderr)
        return 128 + interruption.signum


def _measure(client: Client, cleaner: Client, arguments: argparse.Namespace, out: IO[str] | None) -> int:
    shapes = shapes_of(client, arguments)
    done: list[Done] = []
    for one in _runs(client, cleaner, shapes, arguments):
        if out is not None and one.name != WARM_UP:
            one.on_end = partial(write_line, out, one.name)
        try:
            one.go()
        except BaseException:
            with deferred():
                _end(one, arguments)
                _try_delete(one, arguments)
            raise
        with deferred():
            _end(one, arguments)
            if not arguments.keep:
                one.delete()
        done += one.done
    if num_failed := sum(one.status != "completed" for one in done):
        raise RushesError(f"{num_failed} of {len(done)} clips did not complete")
    return 0


def _end(one: Loop, arguments: argparse.Namespace) -> None:
    if one.name != WARM_UP:
        print(json.dumps(figures(one, arguments)), flush=True)


def _try_delete(one: Loop, arguments: argparse.Namespace) -> None:
    """Of what was broken off: why it was is said last."""
    try:
        if not arguments.keep:
            one.delete()
    except RushesError as error:
        print(f"rushes bench: {error}", file=sys.stderr)


def _runs(client: Client, cleaner: Client, shapes: list[Shape], arguments: argparse.Namespace) -> Iterator[Loop]:
    """The warm-up, and a run for every load; each with seeds and an order of its own."""
    order = random.Random(arguments.seed)
    seed: int = arguments.seed

    def made(kind: Callable[..., Loop], name: str, count: int, **load: Any) -> Loop:
        return kind(client, cleaner, mixed(shapes, count, order), seed, name, **load)

    count: int = arguments.requests
    if arguments.warm_up:
        most = MAX_CONCURRENCY if arguments.request_rate else max(arguments.concurrency)
        yield made(ClosedLoop, WARM_UP, arguments.warm_up, concurrency=min(most, arguments.warm_up))
        seed += arguments.warm_up
    if arguments.request_rate is None:
        for concurrency in arguments.concurrency:
            yield made(ClosedLoop, f"C={concurrency}", count, concurrency=concurrency)
            seed += count
        return
    burstiness = 1.0 if arguments.burstiness is None else arguments.burstiness
    for rate in arguments.request_rate:
        yield made(
            OpenLoop,
            f"R={rate:g}",
            count,
            arrivals=arrivals(count, rate=rate, burstiness=burstiness, order=order),
            rate=rate,
            burstiness=burstiness,
            max_concurrency=arguments.max_concurrency or DEFAULT_OPEN,
        )
        seed += count


def _check(arguments: argparse.Namespace) -> None:
    for concurrency in arguments.concurrency:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise UsageError(f"--concurrency must be in 1..{MAX_CONCURRENCY}, got {concurrency}")
    if arguments.request_rate is None:
        _check_closed(arguments)
    else:
        _check_open(arguments)
    if arguments.warm_up < 0:
        raise UsageError(f"--warm-up must be at least 0, got {arguments.warm_up}")
    check_lengths(arguments)
    check_folder(arguments.out, "--out")
    if arguments.out is not None and arguments.out.is_dir():
        raise UsageError(f"--out {arguments.out} is a directory")


def _check_closed(arguments: argparse.Namespace) -> None:
    for name in ("burstiness", "max_concurrency"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} belongs to --request-rate")
    if arguments.requests < max(arguments.concurrency):
        raise UsageError(
            f"--requests must be at least the largest --concurrency, {max(arguments.concurrency)}, got "
            f"{arguments.requests}"
        )


def _check_open(arguments: argparse.Namespace) -> None:
    for rate in arguments.request_rate:
        if not 0 < rate <= MAX_RATE:
            raise UsageError(f"--request-rate must be above 0 and at most {MAX_RATE:g}, got {rate:g}")
    if arguments.requests < 1:
        raise UsageError(f"--requests must be at least 1, got {arguments.requests}")
    if arguments.burstiness is not None and not MIN_BURSTINESS <= arguments.burstiness <= MAX_BURSTINESS:
        raise UsageError(
            f"--burstiness must be in {MIN_BURSTINESS:g}..{MAX_BURSTINESS:,.0f}, got {arguments.burstiness:g}"
        )
    if arguments.max_concurrency is not None and not 1 <= arguments.max_concurrency <= MAX_OPEN:
        raise UsageError(f"--max-concurrency must be in 1..{MAX_OPEN}, got {arguments.max_concurrency}")
