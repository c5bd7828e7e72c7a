"""Rendering with the real pipeline: a reporter that keeps what it is told, and ranks that render."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Cancelled, Pipeline, RenderRequest
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pixels import PixelFormat
from rushes_worker.transport import GroupTransport
from support.transport import Recording
from torch import Tensor


@dataclass
class RecordingReporter:
    """Remembers what a pipeline reports; stops it at boundary `cancel_at`, counted from 0."""

    cancel_at: int | None = None
    phases: list[tuple[str, int]] = field(default_factory=list)
    boundaries: int = 0
    units: dict[int, np.ndarray] = field(default_factory=dict)
    samples: np.ndarray | None = None
    pixels: PixelFormat | None = None

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        self.phases.append((phase, completed_steps))

    def checkpoint(self) -> None:
        if self.boundaries == self.cancel_at:
            raise Cancelled
        self.boundaries += 1

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        assert unit not in self.units
        self.units[unit] = frames.copy()
        self.pixels = pixels

    def audio(self, samples: np.ndarray) -> None:
        assert self.samples is None
        self.samples = samples.copy()

    @property
    def clip(self) -> np.ndarray:
        """All frames in order, uint8 [F, H, W, 3] or, of 4:2:0, [F, 3 H / 2, W]."""
        return np.concatenate([self.units[unit] for unit in sorted(self.units)])


def request(
    *,
    prompt: str = "a robot dancing in the rain",
    seed: int = 42,
    width: int = 64,
    height: int = 96,
    num_frames: int = 107,
    low_memory: bool = False,
) -> RenderRequest:
    return RenderRequest("job", 1, prompt, seed, width, height, num_frames, low_memory)


def render_on_rank(
    parallel: SequenceParallel, checkpoint: Path, requests: Sequence[RenderRequest], options: Sequence[str] = ()
) -> list[RecordingReporter]:
    """What one rank of a group reports of each request."""
    device = str(parallel.device)
    pipeline = FastH3Pipeline(checkpoint, rank=parallel.rank, sp=parallel.size, device=device, options=options)
    reporters = []
    for one in requests:
        reporter = RecordingReporter()
        render_whole(pipeline, one, reporter)
        reporters.append(reporter)
    return reporters


def fail_on_rank(parallel: SequenceParallel, checkpoint: Path, broken_rank: int) -> list[str]:
    """Spoil the video VAE of one rank, then its audio VAE; returns the errors that this rank saw."""
    pipeline = FastH3Pipeline(checkpoint, rank=parallel.rank, sp=parallel.size, device=str(parallel.device))
    errors = []
    for name in ("_video_vae", "_audio_vae"):
        decoder = getattr(pipeline, name)
        mean = None if decoder is None else decoder._mean.clone()
        if decoder is not None and parallel.rank == broken_rank:
            decoder._mean.fill_(float("nan"))
        reporter = RecordingReporter()
        try:
            render_whole(pipeline, request(width=32, height=32), reporter)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        if decoder is not None:
            decoder._mean.copy_(mean)
    return errors


def render_recording(
    parallel: SequenceParallel, checkpoint: Path, one: RenderRequest
) -> tuple[RecordingReporter, list[Tensor]]:
    """What one rank of a group reports of a request, and all that reached it from the others."""
    transport = Recording(GroupTransport())
    here = SequenceParallel(parallel.rank, parallel.size, parallel.device, transport)
    return render_as(here, checkpoint, one), transport.arrived


def render_whole(pipeline: Pipeline, one: RenderRequest, reporter: RecordingReporter) -> None:
    """Render and hand everything over."""
    remainder = pipeline.render(one, reporter)
    if remainder is not None:
        remainder.hand_over()


def render_as(here: SequenceParallel, checkpoint: Path, one: RenderRequest) -> RecordingReporter:
    """What a pipeline reports that is given its place among the ranks."""
    pipeline = FastH3Pipeline(checkpoint, rank=here.rank, sp=here.size, device=str(here.device), parallel=here)
    reporter = RecordingReporter()
    render_whole(pipeline, one, reporter)
    return reporter
