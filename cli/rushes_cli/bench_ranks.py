"""What the ranks of `rushes bench replica` measure together, beside clips. Every function is called on every rank."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rushes_kernels import video_sparse_attention
from rushes_kernels.plain import OPERATIONS, compute_plainly
from rushes_worker.checkpoint.directory import Checkpoint
from rushes_worker.model.transformer import Transformer
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Pipeline, RenderRequest
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pipeline.parts import Parts
from rushes_worker.pixels import PixelFormat
from rushes_worker.transport import GroupTransport, LocalCopies
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

from rushes_cli.bench_case import Case
from rushes_cli.bench_share import Marks, gibibytes, seconds_of

CHECKED_LAYERS = 4
"""Blocks that are compared: one rank has to hold all heads of them beside its own share."""
ALLOWED_NOISE = 2.0
"""Times as far as the plain formulas in the same dtype, which round elsewhere, may the ranks be off."""
ALLOWED_ERROR = 1e-5
"""And so far in any case: sums in fp32 are made in another order."""
TUNED_LAYERS, TUNED_RUNS = 10, 5
"""Blocks of a step that are timed together, and how often; the median counts."""
CHUNK_ROWS = (1_024, 2_048, 4_096, 8_192)
TRADE_PARTS = (1, 2, 3)
NCCL_BLOCKS = (4, 8, 16)
JOB_TOKENS = (12, 70, 130, 7, 300)
"""Prompt lengths of small clips, one after the other; their sizes are as many, or fewer or more."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank and what it was loaded from."""

    pipeline: FastH3Pipeline
    checkpoint: Checkpoint

    @property
    def device(self) -> torch.device:
        return self.pipeline._device

    @property
    def parallel(self) -> SequenceParallel:
        return self.pipeline._parallel


def wait_for_all(rank: Loaded) -> dict[str, float]:
    """Returns when every rank is loaded: what this one holds."""
    rank.parallel.any(False)
    return {"resident_gib": gibibytes(rank.device, peak=False)}


def compare_with_one(rank: Loaded, case: Case, seed: int) -> dict[str, dict[str, float]]:
    """Relative errors of this rank's work against that of one rank, the same tiles chosen by both.

    Of single blocks, what each adds to random rows; of all of them through the whole schedule, the latents. Each with
    its yardstick: how far the plain formulas in the same dtype are from the kernels, on one rank.
    """
    pipeline = rank.pipeline
    config = replace(pipeline._config, num_layers=min(CHECKED_LAYERS, pipeline._config.num_layers))
    alone = Transformer(
        config,
        rank.checkpoint.weights("transformer"),
        schedule=pipeline._schedule,
        sparsity=rank.checkpoint.contract.vsa_sparsity,
        device=rank.device,
        dtype=pipeline.dtype,
        parallel=SequenceParallel.single(rank.device),
        feed_forward=pipeline.feed_forward_dtype,
    )
    parts = _Compared(pipeline, case, seed)
    choices = _Choices(rank.parallel.own_heads(config.num_attention_heads))

    def compare(work: Callable[[Transformer], Tensor], own: slice) -> dict[str, float]:
        with choices.recorded():
            expected = work(alone)[own]
        with choices.forced():
            mine = work(pipeline._transformer)
        with choices.forced(all_heads=True), _plainly():
            plain = work(alone)[own]
        return {"sp": _error(mine, expected), "noise": _error(plain, expected)}

    errors = {}
    for layer in range(config.num_layers):
        errors[f"block {layer}"] = compare(lambda model, layer=layer: parts.update(model, layer), parts.own)
    errors["latents"] = compare(lambda model: parts.latents(model, config.num_layers), slice(None))
    return errors


def compare_with_eager(rank: Loaded, case: Case, seed: int) -> dict[str, int]:
    """Of one clip, results of this rank, and those that graphs make otherwise than the same work without them.

    In the clip with graphs, the first step and the first unit are not replayed, but what all others are captured after.
    """
    pipeline, request = rank.pipeline, case.request(seed)
    with pipeline._graphs.plainly():
        expected = _digests(pipeline, request, rank.device)
    replayed = _digests(pipeline, request, rank.device)
    assert replayed.keys() == expected.keys()
    return {"results": len(expected), "differ": sum(replayed[name] != expected[name] for name in expected)}


def _digests(pipeline: Pipeline, request: RenderRequest, device: torch.device) -> dict[str, int]:
    reporter = _Digests(device)
    remainder = pipeline.render(request, reporter)
    if remainder is not None:
        remainder.hand_over()
    return reporter.digests


class _Digests(Marks):
    """Keeps a checksum of every unit and of the sound."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.digests: dict[str, int] = {}

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        self.digests[f"unit {unit}"] = zlib.crc32(np.ascontiguousarray(frames).data)

    def audio(self, samples: np.ndarray) -> None:
        self.digests["sound"] = zlib.crc32(np.ascontiguousarray(samples).data)


def tune_transfers(rank: Loaded, case: Case, seed: int) -> dict[str, float]:
    """Milliseconds of a block: by the rows of a chunk, by the parts of the way back, and without transfers."""
    parts = _Compared(rank.pipeline, case, seed)
    parallel = rank.parallel
    before = parallel._chunk_rows, parallel._trade_parts
    depth = min(TUNED_LAYERS, rank.pipeline._config.num_layers)
    milliseconds = {}

    def time_step(name: str) -> None:
        parallel.any(False)
        runs = [seconds_of(lambda: parts.step_through(depth), rank.device) for _ in range(TUNED_RUNS)]
        milliseconds[name] = round(median(runs) / depth * 1e3, 3)

    time_step("first")
    for parallel._chunk_rows in CHUNK_ROWS:
        time_step(f"chunks of {parallel._chunk_rows}")
    parallel._chunk_rows = before[0]
    for parallel._trade_parts in TRADE_PARTS:
        time_step(f"{parallel._trade_parts} parts")
    parallel._trade_parts = before[1]
    transport, parallel._transport = parallel._transport, LocalCopies()
    time_step("copies instead of transfers")
    if rank.device.type == "cuda":
        for blocks in NCCL_BLOCKS:
            parallel._transport = _transport_of(blocks)
            time_step(f"NCCL of {blocks} blocks at most")
    parallel._transport = transport
    time_step("as it is")
    return milliseconds


def _transport_of(blocks: int) -> GroupTransport:
    """Of a group whose transfers take no more than `blocks` multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = blocks
    group = dist.new_group(pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return GroupTransport(group)


def trace_step(rank: Loaded, case: Case, seed: int, folder: Path) -> dict[str, float]:
    """Milliseconds of one denoise step on the device, of its transfers, and of those beside which nothing is computed.

    The trace is written to `folder`. The first transfer waits for the rank whose tracing begins last.
    """
    parts = Parts(rank.pipeline, case.request(seed), case.tokens)
    parts.step()
    rank.parallel.any(False)
    on_cuda = rank.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        parts.step()
        if on_cuda:
            torch.cuda.synchronize(rank.device)
    profiler.export_chrome_trace(str(folder / f"step-rank{rank.parallel.rank}.json.gz"))
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    work = [
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in profiler.events() or ()
        if event.device_type == wanted
    ]
    return exposure(work)


def render_many(rank: Loaded, sizes: Sequence[tuple[int, int]], count: int, seed: int) -> dict[str, Any]:
    """Render `count` clips of four seconds, and say what the allocator has done since each shape was seen twice.

    Args:
        sizes: width and height of clip after clip, over and over again.
    """
    pipeline: Pipeline = rank.pipeline
    marks = Marks(rank.device)
    used = []
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        remainder = pipeline.render(Case(width, height, 4.0, JOB_TOKENS[i % len(JOB_TOKENS)]).request(seed + i), marks)
        if remainder is not None:
            remainder.hand_over()
        used.append(_memory_use(rank.device))
    settled = used[min(2 * math.lcm(len(sizes), len(JOB_TOKENS)), count) - 1]
    return {
        "clips": count,
        "units": marks.units,
        "segments_grown": used[-1][0] - settled[0],
        "reserved_bytes_grown": used[-1][1] - settled[1],
        "reserved_gib": round(used[-1][1] / 2**30, 2),
    }


def _memory_use(device: torch.device) -> tuple[int, int]:
    """How often the device was asked for memory, and the bytes that the allocator holds; zeros on the CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return stats["segment.all.allocated"], stats["reserved_bytes.all.current"]


def exposure(work: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Of work (name, start, end) on several streams: how long it lasts, how long something is transferred, and how long
    of that nothing is computed; and how long there is nothing at all."""
    transfers = _union([(start, end) for name, start, end in work if "nccl" in name.lower() or "gloo" in name.lower()])
    computing = _union(
        [(start, end) for name, start, end in work if "nccl" not in name.lower() and "gloo" not in name.lower()]
    )
    everything = _union([*transfers, *computing])
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    busy, computed = _length(everything), _length(computing)
    return {
        "step_ms": round(span, 3),
        "transfers_ms": round(_length(transfers), 3),
        "exposed_ms": round(busy - computed, 3),
        "idle_ms": round(span - busy, 3),
    }


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    united: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


class _Compared(Parts):
    """Parts of a pipeline's rank and of a transformer that has all of it."""

    def __init__(self, pipeline: FastH3Pipeline, case: Case, seed: int) -> None:
        super().__init__(pipeline, case.request(seed), case.tokens)
        self._schedule = pipeline._schedule

    @property
    def own(self) -> slice:
        return self._own_rows

    @torch.inference_mode()
    def update(self, model: Transformer, layer: int) -> Tensor:
        """(s, C) fp32: what one block adds to this rank's of random rows, or (S, C) of a model that has all of them."""
        rows = self._rows_SC[model._parallel.own_rows(self._sequence.num_rows)]
        return model.run_block(layer, 3, rows.clone(), self._sequence).float() - rows.float()

    @torch.inference_mode()
    def step_through(self, depth: int) -> None:
        """One denoise step through the first blocks."""
        self._transformer.forward(3, self._text_rows, self._audio_rows, self._video_rows, self._sequence, depth=depth)

    @torch.inference_mode()
    def latents(self, model: Transformer, depth: int) -> Tensor:
        """(N, patch features) fp32: video rows after all steps through the first blocks."""
        schedule, audio, video = self._schedule, self._audio_rows, self._video_rows
        for step in range(schedule.num_steps):
            velocities = model.forward(step, self._text_rows, audio, video, self._sequence, depth=depth)
            audio = schedule.audio.step(step, audio, velocities[0])
            video = schedule.video.step(step, video, velocities[1])
        return video


@dataclass
class _Choices:
    """Remembers which tiles were chosen, one choice after the other, and has them chosen again."""

    own_heads: slice
    _lists: list[Tensor] = field(default_factory=list)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self._lists.clear()

        def record(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def choose_and_keep(*arguments: Any, **named: Any) -> Tensor:
                self._lists.append(choose(*arguments, **named).clone())
                return self._lists[-1].clone()

            return choose_and_keep

        with _choosing(record):
            yield

    @contextmanager
    def forced(self, *, all_heads: bool = False) -> Iterator[None]:
        lists = iter(self._lists)
        heads = slice(None) if all_heads else self.own_heads

        def force(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def choose_again(*arguments: Any, **named: Any) -> Tensor:
                return next(lists)[heads].contiguous()

            return choose_again

        with _choosing(force):
            yield
        assert next(lists, None) is None


@contextmanager
def _choosing(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Both ways to choose tiles, wrapped."""
    places: list[tuple[Any, str]] = [(video_sparse_attention, "select_tiles")]
    if torch.cuda.is_available():
        from rushes_kernels import tile_kernels

        places.append((tile_kernels, "choose_tiles"))
    before = [(module, name, getattr(module, name)) for module, name in places]
    for module, name, choose in before:
        setattr(module, name, wrap(choose))
    try:
        yield
    finally:
        for module, name, choose in before:
            setattr(module, name, choose)


@contextmanager
def _plainly() -> Iterator[None]:
    compute_plainly(OPERATIONS)
    try:
        yield
    finally:
        compute_plainly(())


def _error(actual: Tensor, expected: Tensor) -> float:
    """Relative; of nothing, nothing."""
    if not expected.numel():
        return 0.0
    return float((actual - expected).norm() / expected.norm())
