"""`rushes bench replica`: whole clips on one replica of several devices, from the prompt to the finished MP4.

Every rank is a process with a device of its own. The ranks hand frames and sound to this process as they would to a
supervisor. Beside clips, the ranks can be asked for what `bench_ranks` measures.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rushes_core.clip import Clip
from rushes_core.errors import InvalidOutput, RushesError
from rushes_worker.checkpoint.directory import open_checkpoint
from rushes_worker.checkpoint.released import synthetic_checkpoint
from rushes_worker.layout import SERVED_DEGREES
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import EncoderSettings, default_encoders
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Pipeline
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pixels import PixelFormat
from torch import multiprocessing

from rushes_cli import bench_ranks
from rushes_cli.bench_case import SYNTHETIC, Case, add_clip_options, canvas_of, cases_of, check_degree, options_of
from rushes_cli.bench_share import STAGES, Marks, ShareTimes, gibibytes
from rushes_cli.main import UsageError

MEDIA_SECONDS = 120.0
JOB_SIZES = ("192x192", "320x192", "256x256", "192x320", "384x256")
START_SECONDS = 600.0
SILENT_SECONDS = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    degrees = ", ".join(map(str, SERVED_DEGREES))
    parser.add_argument("--sp", type=int, required=True, help=f"ranks, each with a device of its own: {degrees}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the ranks (default cuda)")
    add_clip_options(parser, warm_up=2, repeat=3)
    parser.add_argument("--check", action="store_true", help="compare the ranks' work with what one rank alone makes")
    parser.add_argument("--tune", action="store_true", help="time a denoise step with transfers of other sizes")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="trace one denoise step of every rank")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="render N small clips and watch the memory")
    parser.add_argument(
        "--job-sizes",
        nargs="+",
        default=JOB_SIZES,
        metavar="WxH",
        help=f"their canvases (default {' '.join(JOB_SIZES)})",
    )
    parser.set_defaults(run=_replica)


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told before it starts."""

    rank: int
    sp: int
    device: str
    weights: str
    seed: int
    options: tuple[str, ...]
    """Of the pipeline."""
    folder: Path
    """Shared by the ranks."""


class SendingReporter(Marks):
    """Writes frames and sound to files and tells this of them."""

    def __init__(self, device: torch.device, folder: Path, connection: Connection) -> None:
        super().__init__(device)
        self._folder = folder
        self._connection = connection

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        super().frames(unit, frames, pixels)
        path = self._folder / f"unit-{unit:03}.raw"
        np.ascontiguousarray(frames).tofile(path)
        self._connection.send(("unit", unit, path, len(frames), pixels))

    def audio(self, samples: np.ndarray) -> None:
        path = self._folder / "audio.npy"
        np.save(path, samples, allow_pickle=False)
        self._connection.send(("audio", path))


class RanksLost(RushesError):
    """A rank failed or ended."""


class Ranks:
    """The processes of one replica."""

    def __init__(self, places: list[Place]) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in places]
        self._connections = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=run_rank, args=(place, theirs), daemon=True)
            for place, (_, theirs) in zip(places, pairs, strict=True)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def ask(
        self,
        what: str,
        *arguments: object,
        hear: Callable[[tuple[Any, ...]], None] | None = None,
        seconds: float = SILENT_SECONDS,
    ) -> list[Any]:
        """Have every rank do `what`; what they return, by rank.

        Args:
            hear: called with what else they tell meanwhile.
            seconds: of silence that are too many.

        Raises:
            RanksLost: a rank raised, ended or was silent for too long.
        """
        for connection in self._connections:
            connection.send((what, *arguments))
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            ready = wait([one for rank, one in enumerate(self._connections) if rank not in answers], timeout=seconds)
            if not ready:
                raise RanksLost(f"ranks said nothing for {seconds:g} s after they were asked to {what}")
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                try:
                    kind, *content = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    raise RanksLost(f"rank {rank} ended while it was to {what}") from None
                if kind == "failed":
                    raise RanksLost(f"rank {rank} failed to {what}: {content[0]}")
                if kind == "done":
                    answers[rank] = content[0]
                elif hear is not None:
                    hear((kind, *content))
        return [answers[rank] for rank in range(len(self._connections))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def run_rank(place: Place, connection: Connection) -> None:
    """A rank: loads, says so, and does what it is told until the connection ends."""
    try:
        loaded = _load(place)
        while True:
            try:
                what, *arguments = connection.recv()
            except EOFError:
                return
            if what == "render":
                answer = _render_here(loaded.pipeline, place, connection, *arguments)
            else:
                answer = getattr(bench_ranks, what)(loaded, *arguments)
            connection.send(("done", answer))
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise


def _device(place: Place) -> torch.device:
    return torch.device(f"cuda:{place.rank}" if place.device == "cuda" else "cpu")


def _load(place: Place) -> bench_ranks.Loaded:
    device = _device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    parallel = SequenceParallel.connect(place.rank, place.sp, device, init_method=f"file://{place.folder}/rendezvous")
    own = place.folder / f"rank-{place.rank}"
    own.mkdir()
    if place.weights == SYNTHETIC:
        checkpoint = synthetic_checkpoint(own, seed=place.seed, device=device)
    else:
        checkpoint = open_checkpoint(Path(place.weights))
    pipeline = FastH3Pipeline(
        checkpoint, rank=place.rank, sp=place.sp, device=str(device), options=place.options, parallel=parallel
    )
    return bench_ranks.Loaded(pipeline, checkpoint)


def _render_here(
    pipeline: Pipeline, place: Place, connection: Connection, case: Case, seed: int
) -> tuple[ShareTimes, float]:
    """Seconds of the stages on this rank, and the most GiB that it took."""
    device = _device(place)
    reporter = SendingReporter(device, place.folder, connection)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    remainder = pipeline.render(case.request(seed), reporter)
    reporter.mark("end")
    if remainder is not None:
        remainder.hand_over()
    return ShareTimes.of(reporter.seconds()), gibibytes(device, peak=True)


@contextmanager
def _ranks(arguments: argparse.Namespace, folder: Path) -> Iterator[Ranks]:
    options = options_of(arguments)
    places = [
        Place(rank, arguments.sp, arguments.device, arguments.weights, arguments.seed, options, folder)
        for rank in range(arguments.sp)
    ]
    ranks = Ranks(places)
    try:
        yield ranks
    finally:
        ranks.end()


def _replica(arguments: argparse.Namespace) -> int:
    cases = cases_of(arguments)
    sizes = [canvas_of(size, "--job-sizes") for size in arguments.job_sizes]
    check_degree(arguments.sp)
    if arguments.jobs < 0:
        raise UsageError(f"--jobs must be at least 0, got {arguments.jobs}")
    options_of(arguments)
    if arguments.timeline is not None:
        arguments.timeline.mkdir(parents=True, exist_ok=True)
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.sp:
        raise UsageError(f"--sp {arguments.sp} needs {arguments.sp} CUDA devices, found {torch.cuda.device_count()}")
    if arguments.weights != SYNTHETIC:
        open_checkpoint(Path(arguments.weights))
    elif arguments.device != "cuda":
        raise UsageError(f"--weights {SYNTHETIC} needs CUDA devices")
    encoder = EncoderSettings(encoders=default_encoders())
    with tempfile.TemporaryDirectory(prefix="rushes-bench-") as name, MediaProcess(encoder) as media:
        folder = Path(name)
        started = time.perf_counter()
        with _ranks(arguments, folder) as ranks:
            loaded = ranks.ask("wait_for_all", seconds=START_SECONDS)
            _show({"load_seconds": round(time.perf_counter() - started, 1), "ranks": loaded})
            first = cases[0]
            if arguments.check:
                found = ranks.ask("compare_with_one", first, arguments.seed)
                _show({"check": found})
                judge(found)
                found = ranks.ask("compare_with_eager", first, arguments.seed)
                _show({"graphs": found})
                if any(one["differ"] for one in found):
                    raise InvalidOutput("no figures: graphs make something else than the same work without them")
            for case in cases:
                _show(_time_clips(ranks, case, folder, media, arguments))
            if arguments.timeline is not None:
                _show({"timeline": ranks.ask("trace_step", first, arguments.seed, arguments.timeline)})
            if arguments.tune:
                _show({"tune": ranks.ask("tune_transfers", first, arguments.seed)[0]})
            if arguments.jobs:
                _show({"jobs": ranks.ask("render_many", sizes, arguments.jobs, arguments.seed)})
    return 0


def _show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def judge(found: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """Look at what `bench_ranks.compare_with_one` found on every rank.

    Raises:
        InvalidOutput: the ranks make something else than one alone.
    """
    for rank, errors in enumerate(found):
        for what, error in errors.items():
            if not error["sp"] <= bench_ranks.ALLOWED_NOISE * error["noise"] + bench_ranks.ALLOWED_ERROR:
                raise InvalidOutput(f"no figures: {what} of rank {rank} is off by {error['sp']:.2e}")


def _time_clips(
    ranks: Ranks, case: Case, folder: Path, media: MediaProcess, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the clips that count; of stages, those of the slowest rank."""
    runs: list[dict[str, float]] = []
    peaks: list[float] = []
    for i in range(-arguments.warm_up, arguments.repeat):
        stages, peaks = _render(ranks, case, arguments.seed, folder, media)
        print(f"{case.title}: {'warm-up' if i < 0 else f'clip {i}'} {json.dumps(stages)}", flush=True)
        if i >= 0:
            runs.append(stages)
    totals = [run["total"] for run in runs]
    return {
        "case": case.title,
        "sp": arguments.sp,
        "weights": arguments.weights,
        **{name: round(median(run[name] for run in runs), 4) for name in runs[0]},
        "spread": [min(totals), max(totals)],
        "clips": len(runs),
        "peak_gib": peaks,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def _render(
    ranks: Ranks, case: Case, seed: int, folder: Path, media: MediaProcess
) -> tuple[dict[str, float], list[float]]:
    """Seconds of one clip's stages, and the most memory of each rank."""
    path = folder / "clip.mp4"

    def hear(told: tuple[Any, ...]) -> None:
        if told[0] == "unit":
            media.add_unit(*told[1:])
        else:
            media.set_audio(told[1])

    started = time.perf_counter()
    media.start_clip(ClipSpec(path, case.width, case.height, Clip.for_seconds(case.seconds).num_frames))
    answers = ranks.ask("render", case, seed, hear=hear)
    media.finish(MEDIA_SECONDS)
    total = time.perf_counter() - started
    path.unlink()
    times = [one for one, _ in answers]
    stages = {name: max(getattr(one, name) for one in times) for name in STAGES}
    # the rest: what passes between the end of the slowest rank's work and the complete MP4, and at the start
    stages |= {"finishing": total - sum(stages.values()), "total": total}
    return {name: round(seconds, 4) for name, seconds in stages.items()}, [peak for _, peak in answers]
