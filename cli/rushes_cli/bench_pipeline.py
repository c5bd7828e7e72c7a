"""`rushes bench pipeline`: time whole clips on one GPU, from the prompt to the finished MP4."""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rushes_core.clip import Clip
from rushes_core.contract import InferenceContract
from rushes_core.errors import InvalidOutput, RushesError
from rushes_kernels.plain import OPERATIONS, compute_plainly
from rushes_kernels.video_sparse_attention import num_selected_tiles, tile_map
from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.checkpoint.directory import Checkpoint, open_checkpoint
from rushes_worker.checkpoint.released import synthetic_checkpoint
from rushes_worker.media.process import ClipSpec, MadeClip, MediaProcess
from rushes_worker.media.settings import EncoderSettings, default_encoders
from rushes_worker.media.times import Span, timeline
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pipeline.parts import Parts
from rushes_worker.pixels import PixelFormat

from rushes_cli.bench_case import SYNTHETIC, Case, add_clip_options, cases_of, options_of
from rushes_cli.bench_lengths import check_folder
from rushes_cli.bench_share import seconds_of

MEDIA_SECONDS = 120.0
TOP_KERNELS = 18
MAX_ERROR = 5e-2
"""Relative, of what a block adds: a few roundings to 8 bits, and tiles that are chosen otherwise where scores tie."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_clip_options(parser, warm_up=1, repeat=3)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the last clip")
    parser.add_argument("--timeline", action="store_true", help="also when each unit of a clip came and was encoded")
    parser.add_argument("--parts", action="store_true", help="time one denoise step and one unit, not whole clips")
    parser.add_argument("--plain", nargs="*", default=[], choices=OPERATIONS, help="compute these in plain PyTorch")
    parser.add_argument("--ablation", action="store_true", help="also time step and unit, one kernel after the other")
    parser.add_argument("--profile", action="store_true", help="one more clip, with the kernels of every stage")
    parser.set_defaults(run=_pipeline)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of one clip: stages by CUDA events on the stream that does the work, `total` by the host's clock."""

    encoding: float
    denoising: float
    decoding: float
    finishing: float
    """From the end of the GPU's work to the complete, validated MP4."""
    total: float
    slowest_step: float
    fastest_step: float


@dataclass
class TimedReporter:
    """Marks the stream where stages meet, and hands frames and sound to the media process as a rank would."""

    media: MediaProcess
    folder: Path
    marks: list[tuple[str, torch.cuda.Event]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list[Span])
    """When raw frames were written for the media process."""

    def mark(self, label: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((label, event))

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        self.mark(f"{phase} {completed_steps}")

    def checkpoint(self) -> None:
        self.media.check()

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        path = self.folder / f"unit-{unit:03}.raw"
        began = time.monotonic()
        np.ascontiguousarray(frames).tofile(path)
        self.spans.append(Span(f"writing unit {unit}", began, time.monotonic()))
        self.media.add_unit(unit, path, len(frames), pixels)
        self.mark(f"unit {unit}")

    def audio(self, samples: np.ndarray) -> None:
        path = self.folder / "audio.npy"
        np.save(path, samples, allow_pickle=False)
        self.media.set_audio(path)
        self.mark("audio 0")


class ProfilingReporter(TimedReporter):
    """Records the kernels of each stage: the encoding, one denoise step, one decoded unit, the sound."""

    def __init__(self, media: MediaProcess, folder: Path, last_unit: int) -> None:
        super().__init__(media, folder)
        self.tables: dict[str, list[tuple[str, int, float]]] = {}
        self._windows = {
            "encoding 0": "text encoder and refiner",
            "denoising 2": "one denoise step",
            "decoding 0": "sound and first video unit",
            # the unit after the next one is decoded while this one is handed over
            f"unit {last_unit - 3}": "one video unit",
        }
        self._open: tuple[str, torch.profiler.profile] | None = None

    def mark(self, label: str) -> None:
        torch.cuda.synchronize()
        if self._open is not None:
            title, profiler = self._open
            profiler.stop()
            self.tables[title] = [
                (event.key, event.count, event.self_device_time_total / 1e3)
                for event in profiler.key_averages()
                if event.self_device_time_total > 0
            ]
            self._open = None
        super().mark(label)
        if label in self._windows:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
            self._open = self._windows[label], profiler


def _pipeline(arguments: argparse.Namespace) -> int:
    cases = cases_of(arguments)
    # what is wrong is told before a GPU is looked for
    options_of(arguments)
    check_folder(arguments.keep, "--keep")
    if not torch.cuda.is_available():
        raise RushesError("needs a CUDA device")
    encoder = EncoderSettings(encoders=default_encoders())
    with tempfile.TemporaryDirectory(prefix="rushes-bench-") as name, MediaProcess(encoder) as media:
        _bench(arguments, cases, Path(name), media)
    return 0


def _bench(arguments: argparse.Namespace, cases: list[Case], folder: Path, media: MediaProcess) -> None:
    options = options_of(arguments)
    started = time.perf_counter()
    checkpoint = _open(arguments, folder)
    pipeline = FastH3Pipeline(checkpoint, device="cuda:0", options=options)
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated() / 2**30
    weights = "synthetic weights" if arguments.weights == SYNTHETIC else arguments.weights
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {weights}")
    print(f"loaded in {time.perf_counter() - started:.1f} s, {resident:.1f} GiB resident", flush=True)
    first = cases[0]
    parts = Parts(pipeline, first.request(arguments.seed), first.tokens)
    with parts.plainly():
        check_kernels(parts)
    compute_plainly(arguments.plain)
    for case in cases:
        torch.cuda.reset_peak_memory_stats()
        if arguments.parts:
            figures = _time_parts(checkpoint, pipeline, case, arguments.seed)
        else:
            figures = _time_clips(checkpoint, pipeline, case, folder, media, arguments)
        where = {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        what = {"case": case.title, "weights": weights, "precision": pipeline.precision, "plain": arguments.plain}
        print(json.dumps(what | figures | where), flush=True)
    if arguments.ablation:
        _ablation(Parts(pipeline, first.request(arguments.seed), first.tokens))
        compute_plainly(arguments.plain)
    if arguments.profile:
        _profile(pipeline, first, folder, media, arguments.seed)


def _time_clips(
    checkpoint: Checkpoint,
    pipeline: FastH3Pipeline,
    case: Case,
    folder: Path,
    media: MediaProcess,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Medians over the clips that count."""
    runs = []
    for i in range(-arguments.warm_up, arguments.repeat):
        stages, spans = _render(pipeline, case, folder, media, arguments.seed, arguments.keep)
        print(f"{case.title}: {'warm-up' if i < 0 else f'clip {i}'} {_line(stages)}", flush=True)
        if arguments.timeline and i == arguments.repeat - 1:
            print(timeline(spans), flush=True)
        if i >= 0:
            runs.append(stages)
    middle = {name: median(asdict(run)[name] for run in runs) for name in asdict(runs[0])}
    totals = [run.total for run in runs]
    work = transformer_flop(checkpoint.transformer_config, checkpoint.contract, case)
    return {
        **{name: round(value, 4) for name, value in middle.items()},
        "spread": [round(min(totals), 3), round(max(totals), 3)],
        "denoising_tflops": round(work / middle["denoising"] / 1e12, 1),
    }


def _open(arguments: argparse.Namespace, folder: Path) -> Checkpoint:
    if arguments.weights == SYNTHETIC:
        return synthetic_checkpoint(folder, seed=arguments.seed, device="cuda:0")
    return open_checkpoint(Path(arguments.weights))


@contextmanager
def _clip(case: Case, folder: Path, media: MediaProcess, keep: Path | None = None) -> Iterator[list[MadeClip]]:
    """The clip that the body renders is in the list afterwards."""
    path, made = folder / "clip.mp4", list[MadeClip]()
    media.start_clip(ClipSpec(path, case.width, case.height, Clip.for_seconds(case.seconds).num_frames))
    yield made
    made.append(media.finish(MEDIA_SECONDS))
    if keep is not None:
        shutil.copy(path, keep)
    path.unlink()


def _time_parts(checkpoint: Checkpoint, pipeline: FastH3Pipeline, case: Case, seed: int) -> dict[str, Any]:
    """One denoise step and one decoded unit, and what all of a clip add up to."""
    parts = Parts(pipeline, case.request(seed), case.tokens)
    step, unit = _seconds(parts.step), _seconds(parts.unit)
    num_steps, num_units = checkpoint.contract.num_forwards, Clip.for_seconds(case.seconds).num_units
    work = transformer_flop(checkpoint.transformer_config, checkpoint.contract, case) / num_steps
    return {
        "step": round(step, 4),
        "unit": round(unit, 4),
        "steps_and_units": round(num_steps * step + num_units * unit, 3),
        "step_tflops": round(work / step / 1e12, 1),
    }


def _seconds(part: Callable[[], object]) -> float:
    """Of the second call."""
    part()
    return seconds_of(part, torch.device("cuda"))


def _render(
    pipeline: FastH3Pipeline, case: Case, folder: Path, media: MediaProcess, seed: int, keep: Path | None
) -> tuple[Stages, list[Span]]:
    """How long the stages took, and when what was at work after them."""
    reporter = TimedReporter(media, folder)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with _clip(case, folder, media, keep) as made:
        _render_whole(pipeline, case.request(seed), reporter)
        reporter.mark("end 0")
        torch.cuda.synchronize()
        rendered = time.perf_counter()
    finished = time.perf_counter()
    spans = [*reporter.spans, *made[0].spans]
    at = {label: reporter.marks[0][1].elapsed_time(event) / 1e3 for label, event in reporter.marks}
    steps = sorted((label for label in at if label.startswith("denoising")), key=lambda label: int(label.split()[1]))
    lengths = [at[after] - at[before] for before, after in pairwise(steps)]
    stages = Stages(
        encoding=at["denoising 0"],
        denoising=at["decoding 0"] - at["denoising 0"],
        decoding=at["end 0"] - at["decoding 0"],
        finishing=finished - rendered,
        total=finished - started,
        slowest_step=max(lengths),
        fastest_step=min(lengths),
    )
    return stages, spans


def _render_whole(pipeline: FastH3Pipeline, request: RenderRequest, reporter: TimedReporter) -> None:
    remainder = pipeline.render(request, reporter)
    if remainder is not None:
        remainder.hand_over()


def _line(stages: Stages) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in asdict(stages).items())


def check_kernels(parts: Parts) -> None:
    """Compare what the kernels make of one block's rows and of one unit with what PyTorch makes of them.

    Raises:
        InvalidOutput: they differ by more than rounding does.
    """
    for what, part in (("a block of the transformer", parts.block_update), ("a decoded unit", parts.unit)):
        compute_plainly(OPERATIONS)
        expected = part()
        compute_plainly(())
        actual = part()
        error = float((actual - expected).norm() / expected.norm())
        print(f"check: {what} with kernels against PyTorch, relative error {error:.2e}", flush=True)
        if not error < MAX_ERROR:
            raise InvalidOutput(f"no figures: {what} is off by {error:.2e}, the limit is {MAX_ERROR:g}")


def _ablation(parts: Parts) -> None:
    """Seconds of a denoise step and of a decoded unit, from PyTorch alone to all kernels; attention is the same."""
    for i in range(len(OPERATIONS) + 1):
        compute_plainly(OPERATIONS[i:])
        step, unit = _seconds(parts.step), _seconds(parts.unit)
        added = f"+ {OPERATIONS[i - 1]}" if i else "PyTorch"
        print(f"ablation: {added:20}  step {step:.3f}  unit {unit:.3f}", flush=True)
    compute_plainly(())


def transformer_flop(config: TransformerConfig, contract: InferenceContract, case: Case) -> float:
    """Of all denoise steps: linear layers and the valid pairs of sparse attention, two per multiply-accumulate."""
    clip = Clip.for_seconds(case.seconds)
    grid = (clip.num_latent_frames, case.height // 32, case.width // 32)
    prefix = case.tokens + 2 * clip.num_audio_latents
    tiles = tile_map([case.tokens, 2 * clip.num_audio_latents], grid)
    video = math.prod(grid)
    rows = prefix + video
    C, inner, ffn = config.hidden_size, config.inner_dim, config.ffn_dim
    linear = 2 * rows * (5 * C * inner + 3 * C * ffn)
    selected = num_selected_tiles(contract.vsa_sparsity, tiles.num_video_tiles)
    pairs = prefix * rows + video * (prefix + selected * video / tiles.num_video_tiles)
    attention = 4 * config.attention_head_dim * config.num_attention_heads * pairs
    return contract.num_forwards * config.num_layers * (linear + attention)


def _profile(pipeline: FastH3Pipeline, case: Case, folder: Path, media: MediaProcess, seed: int) -> None:
    reporter = ProfilingReporter(media, folder, Clip.for_seconds(case.seconds).num_units - 1)
    with _clip(case, folder, media):
        _render_whole(pipeline, case.request(seed), reporter)
    for title, rows in reporter.tables.items():
        total = sum(milliseconds for _, _, milliseconds in rows)
        print(f"\n{title}: {total:.2f} ms in {sum(count for _, count, _ in rows)} launches")
        for key, count, milliseconds in sorted(rows, key=lambda row: -row[2])[:TOP_KERNELS]:
            print(f"{milliseconds:10.3f} ms {count:6d} x  {100 * milliseconds / total:5.1f} %  {_short(key)}")


def _short(kernel: str) -> str:
    return kernel.removeprefix("void ").replace("at::native::", "")[:110]
