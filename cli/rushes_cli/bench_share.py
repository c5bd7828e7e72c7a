"""`rushes bench share`: what one rank of a replica holds and computes, on one device, without the other ranks.

The rank has its heads, its rows, its slice of the text encoder and its units of the picture; what the others would send
is copied from what it sends, byte for byte as much. The times are those of its own work: on several GPUs, transfers
that nothing hides come on top of them. What it renders is no picture.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from rushes_worker.checkpoint.directory import Checkpoint, open_checkpoint
from rushes_worker.checkpoint.released import synthetic_checkpoint
from rushes_worker.layout import SERVED_DEGREES
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Pipeline
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pixels import PixelFormat
from rushes_worker.transport import LocalCopies

from rushes_cli.bench_case import SYNTHETIC, Case, add_clip_options, cases_of, check_degree, options_of
from rushes_cli.main import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    degrees = ", ".join(map(str, SERVED_DEGREES))
    parser.add_argument("--sp", type=int, required=True, help=f"ranks of the replica: {degrees}")
    parser.add_argument("--rank", type=int, default=0, help="which of them (default 0, which has the most units)")
    parser.add_argument("--device", default="cuda:0", help="(default cuda:0)")
    add_clip_options(parser, warm_up=1, repeat=1)
    parser.set_defaults(run=_share)


STAGES = ("encoding", "denoising", "decoding")


@dataclass
class Marks:
    """A `Reporter` that notes when stages meet, on the stream that does the work, and drops what is rendered."""

    device: torch.device
    labels: list[str] = field(default_factory=list)
    units: int = 0
    _events: list[torch.cuda.Event] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def mark(self, label: str) -> None:
        self.labels.append(label)
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        self.mark(f"{phase} {completed_steps}")

    def checkpoint(self) -> None:
        pass

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        self.units += 1

    def audio(self, samples: np.ndarray) -> None:
        pass

    def seconds(self) -> dict[str, float]:
        """From the first mark to each of them, by their labels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            values = [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        else:
            values = [moment - self._times[0] for moment in self._times]
        return dict(zip(self.labels, values, strict=True))


@dataclass(frozen=True, slots=True)
class ShareTimes:
    """Seconds of one clip's stages on one rank."""

    encoding: float
    denoising: float
    decoding: float
    """Of its own units, and the sound on the last rank."""

    @classmethod
    def of(cls, at: Mapping[str, float]) -> Self:
        return cls(at["denoising 0"], at["decoding 0"] - at["denoising 0"], at["end"] - at["decoding 0"])


def load_share(
    checkpoint: Checkpoint, *, rank: int, sp: int, device: str, options: Sequence[str] = ()
) -> FastH3Pipeline:
    """Exactly what rank `rank` of `sp` holds, on a device of its own, with copies in place of the other ranks."""
    parallel = SequenceParallel(rank, sp, device, LocalCopies())
    return FastH3Pipeline(checkpoint, rank=rank, sp=sp, device=device, options=options, parallel=parallel)


def time_share(pipeline: Pipeline, case: Case, seed: int, device: torch.device) -> tuple[ShareTimes, int]:
    """The stages of one clip, and how many units of it this rank decodes."""
    marks = Marks(device)
    remainder = pipeline.render(case.request(seed), marks)
    marks.mark("end")
    if remainder is not None:
        remainder.hand_over()
    return ShareTimes.of(marks.seconds()), marks.units


def _share(arguments: argparse.Namespace) -> int:
    cases = cases_of(arguments)
    options = options_of(arguments)
    check_degree(arguments.sp)
    device = _device_named(arguments.device)
    if not 0 <= arguments.rank < arguments.sp:
        raise UsageError(f"--rank must be in 0..{arguments.sp - 1}, got {arguments.rank}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {arguments.device}: found no CUDA device; --device cpu needs none")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {arguments.device}: found {torch.cuda.device_count()} CUDA devices")
    if arguments.weights == SYNTHETIC and device.type != "cuda":
        raise UsageError(f"--weights {SYNTHETIC} needs a CUDA device")
    with tempfile.TemporaryDirectory(prefix="rushes-bench-") as folder:
        started = time.perf_counter()
        if arguments.weights == SYNTHETIC:
            checkpoint = synthetic_checkpoint(Path(folder), seed=arguments.seed, device=device)
        else:
            checkpoint = open_checkpoint(Path(arguments.weights))
        pipeline = load_share(
            checkpoint, rank=arguments.rank, sp=arguments.sp, device=arguments.device, options=options
        )
        shown = {
            "sp": arguments.sp,
            "rank": arguments.rank,
            "weights": arguments.weights,
            "options": options,
            "load_seconds": round(time.perf_counter() - started, 1),
            "resident_gib": gibibytes(device, peak=False),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        for case in cases:
            print(json.dumps(shown | _time_case(pipeline, case, arguments, device)), flush=True)
    return 0


def _device_named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}")
    return device


def _time_case(
    pipeline: FastH3Pipeline, case: Case, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Medians over the clips that count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs, units = [], 0
    for i in range(-arguments.warm_up, arguments.repeat):
        times, units = time_share(pipeline, case, arguments.seed, device)
        if i >= 0:
            runs.append(times)
    middle = {name: round(median(getattr(run, name) for run in runs), 4) for name in STAGES}
    return {
        "case": case.title,
        **middle,
        "sum": round(sum(middle.values()), 3),
        "units": units,
        "clips": len(runs),
        "peak_gib": gibibytes(device, peak=True),
    }


def seconds_of(part: Callable[[], object], device: torch.device) -> float:
    """Of one call, when what the device had to do before is done."""
    if device.type == "cpu":
        started = time.perf_counter()
        part()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    part()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def gibibytes(device: torch.device, *, peak: bool) -> float:
    """That tensors take on the GPU, now or at their most; on the CPU the most that this process ever took."""
    if device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    else:
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return round(taken / 2**30, 2)
