"""The seam between a rank and what it runs: one request in, frames, sound and progress out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class Cancelled(Exception):
    """The job was cancelled, its lease was lost or its deadline passed; every rank raises it at the same boundary."""


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """One attempt of one job, as every rank of the replica receives it."""

    job_id: str
    attempt: int
    prompt: str
    seed: int
    width: int
    height: int
    num_frames: int
    low_memory: bool = False
    """An attempt ran out of device memory: spend time to need less of it."""


class Reporter(Protocol):
    """What a pipeline tells while it renders. Every rank holds one and hands over what it owns through it."""

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        """Enter `phase` (`encoding`, `denoising`, `decoding`) or report a finished denoise step; said by every rank."""
        ...

    def checkpoint(self) -> None:
        """A boundary between steps or units at which all ranks stop together: raises `Cancelled` on all or on none."""
        ...

    def frames(self, unit: int, frames: np.ndarray) -> None:
        """Hand over the finished frames of temporal unit `unit`: uint8 [f, H, W, 3], RGB. Units come in any order."""
        ...

    def audio(self, samples: np.ndarray) -> None:
        """Hand over the whole soundtrack: float32 [2, N] in [-1, 1], left channel first."""
        ...


class Pipeline(Protocol):
    """A loaded model on one rank of a replica."""

    precision: str
    """What it computes in, for people."""

    def render(self, request: RenderRequest, reporter: Reporter) -> None:
        """Render `request`. Raises `Cancelled`, or `InvalidRequest` for what the request itself caused.

        `OutOfMemory`, or torch's own error for it, has the job tried once more with `low_memory`.
        """
        ...


class PipelineFactory(Protocol):
    """Builds the pipeline of one rank; named `module:callable` in the settings."""

    def __call__(
        self, checkpoint: Path, *, rank: int, sp: int, device: str, options: Sequence[str] = ()
    ) -> Pipeline: ...
