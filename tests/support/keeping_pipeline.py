"""The real pipeline, which also keeps what it hands over: raw frames and sound, before any encoder has seen them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from rushes_worker.pipeline.base import Remainder, RenderRequest, Reporter
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pixels import PixelFormat

KEEPING = "support.keeping_pipeline:KeepingPipeline"
FOLDER = "KEEPING_FOLDER"
"""Environment variable of the worker: the existing folder to keep things in."""


class KeepingPipeline:
    """Implements `pipeline.base.PipelineFactory` and `Pipeline`."""

    def __init__(self, checkpoint: Path, **given: Any) -> None:
        self._pipeline = FastH3Pipeline(checkpoint, **given)
        self.precision = self._pipeline.precision

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        return self._pipeline.render(request, _KeepingReporter(reporter, Path(os.environ[FOLDER])))


class _KeepingReporter:
    def __init__(self, reporter: Reporter, folder: Path) -> None:
        self._folder = folder
        self._reporter = reporter
        self.progress = reporter.progress
        self.checkpoint = reporter.checkpoint

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        np.save(self._folder / f"unit-{unit:03}.npy", frames)
        self._reporter.frames(unit, frames, pixels)

    def audio(self, samples: np.ndarray) -> None:
        np.save(self._folder / "audio.npy", samples)
        self._reporter.audio(samples)


def kept_clip(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Frames uint8 [F, H, W, 3] and sound float32 [2, N] of the last render."""
    frames = np.concatenate([np.load(path) for path in sorted(folder.glob("unit-*.npy"))])
    return frames, np.load(folder / "audio.npy")
