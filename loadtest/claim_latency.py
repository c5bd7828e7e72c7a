"""How long a claim takes, its commit included, while many jobs of many projects wait.

    python loadtest/claim_latency.py --jobs 1000000 --projects 200

One line of JSON for one connection without pauses, one for several that claim at a steady rate.
"""

import argparse
import time
from multiprocessing import get_context
from pathlib import Path

import bench
from command_line import amount, at_least, run
from rushes_core.settings import Settings
from rushes_worker.ledger import Ledger

WARM_UP = 20
"""Claims before the figures begin: a connection plans its first statements anew."""


def claims(settings: Settings, owner: str, count: int, rate: float) -> list[float]:
    """Milliseconds of each of `count` claims of a worker's ledger, `rate` a second; 0: one after another."""
    ledger = Ledger(settings, replica_id=owner, model=bench.MODEL)
    taken: list[float] = []
    due = time.perf_counter()
    for _ in range(count + WARM_UP):
        if rate:
            due += 1 / rate
            time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        assert ledger.claim(()) is not None
        taken.append((time.perf_counter() - began) * 1_000)
    ledger.close()
    return taken[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--jobs", type=at_least(1), default=1_000_000)
    parser.add_argument("--projects", type=at_least(1), default=200)
    parser.add_argument("--claims", type=at_least(1), default=4_000)
    parser.add_argument("--connections", type=at_least(1), default=4)
    parser.add_argument("--rate", type=amount, default=200.0, help="claims a second of several connections together")
    parser.add_argument("--keep", action="store_true", help="the queue is filled already")
    arguments = parser.parse_args()
    if arguments.claims < arguments.connections:
        parser.error(f"--claims must be at least --connections, {arguments.connections}, got {arguments.claims}")
    with bench.servers() as settings:
        engine = bench.patient_engine(settings)
        if not arguments.keep:
            bench.clear(engine)
            began = time.monotonic()
            bench.fill(engine, jobs=arguments.jobs, projects=arguments.projects)
            bench.report("fill", jobs=arguments.jobs, jobs_per_s=arguments.jobs / (time.monotonic() - began))
        for connections, rate in ((1, 0.0), (arguments.connections, arguments.rate / arguments.connections)):
            each = arguments.claims // connections
            tasks = [(settings, f"load-r{number}#bench", each, rate) for number in range(connections)]
            began = time.monotonic()
            with get_context("spawn").Pool(connections) as pool:
                taken = [milliseconds for found in pool.starmap(claims, tasks) for milliseconds in found]
            bench.report(
                "claim",
                queued=arguments.jobs,
                projects=arguments.projects,
                connections=connections,
                claims_per_s=rate * connections or None,
                claims=len(taken),
                p50_ms=bench.percentile(taken, 50),
                p99_ms=bench.percentile(taken, 99),
                max_ms=max(taken),
                load_average=Path("/proc/loadavg").read_text().split()[0],
                seconds=time.monotonic() - began,
            )
        engine.dispose()


if __name__ == "__main__":
    run(main)
