"""What all kernel benchmarks share: the tests come first, times by CUDA events, one JSON line a case."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of single launches, each after the L2 cache was overwritten."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    launches: int


def require_passing_tests(*paths: str) -> None:
    """End the program when a test of the kernel fails: the time of a wrong kernel means nothing."""
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", *paths], cwd=ROOT, stdout=sys.stderr).returncode
    if status:
        sys.exit(f"no figures: the tests of this kernel fail (pytest returned {status})")


def measure(run: Callable[[], object], *, launches: int = 20, warm_up: int = 3) -> Timing:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(launches):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    milliseconds = [start.elapsed_time(end) for start, end in times]
    return Timing(median(milliseconds), min(milliseconds), max(milliseconds), launches)


def measure_in_turn(
    runs: Mapping[str, Callable[[], object]], *, seconds: float = 0.5, rounds: int = 3
) -> dict[str, Timing]:
    """Loops of `seconds`, one contender after the other and all of them `rounds` times after a round that does not
    count: milliseconds of one launch at the power and the clock that the device settles at. Median, least and most are
    of the rounds.
    """
    once = {name: measure(run, launches=3, warm_up=1).median_ms for name, run in runs.items()}
    launches = {name: max(1, round(seconds * 1e3 / once[name])) for name in runs}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + rounds):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(launches[name]):
                run()
            end.record()
            torch.cuda.synchronize()
            if number:
                found[name].append(start.elapsed_time(end) / launches[name])
    return {name: Timing(median(ms), min(ms), max(ms), launches[name]) for name, ms in found.items()}


def report(case: str, variant: str, timing: Timing, **figures: object) -> None:
    """Print one case as a JSON line, with where it was measured."""
    line = {"case": case, "variant": variant} | asdict(timing) | figures | environment()
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def environment() -> dict[str, object]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "revision": revision.stdout.strip(),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
