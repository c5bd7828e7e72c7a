"""The seam between a rank and what it runs: one request in, frames, sound and progress out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from rushes_core.contract import InferenceContract

from rushes_worker.pixels import PixelFormat


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
        """Enter `phase` (`encoding`, `denoising`, `decoding`) or report a finished denoise step; said by every rank.

        A phase is entered right before its first work is queued on the device.
        """
        ...

    def checkpoint(self) -> None:
        """A boundary between steps or units at which all ranks stop together: raises `Cancelled` on all or on none.

        The first comes when the text is encoded, the second after the first step, each when that work is queued.
        """
        ...

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        """Hand over the finished frames of temporal unit `unit`, in any order of units: uint8 [f, H, W, 3] of RGB, or
        [f, 3 H / 2, W] where `pixels` says that they are converted already.

        The array is the pipeline's own and changes after the call, as that of `audio` does.
        """
        ...

    def audio(self, samples: np.ndarray) -> None:
        """Hand over the whole soundtrack: float32 [2, N] in [-1, 1], left channel first."""
        ...


class Remainder(Protocol):
    """What is left of a render when all its work is queued on the device: to hand over the last results."""

    @property
    def is_done(self) -> bool:
        """Whether the device has finished, so that `hand_over` does not wait for it."""
        ...

    def hand_over(self) -> None:
        """Wait for the results and hand them over through the render's reporter. No other rank is waited for."""
        ...


class Pipeline(Protocol):
    """A loaded model on one rank of a replica."""

    precision: str
    """What it computes in, for people."""

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        """Render `request`. Raises `Cancelled`, or `InvalidRequest` for what the request itself caused.

        `OutOfMemory`, or torch's own error for it, has the job tried once more with `low_memory`.

        Returns:
            What is left to do while the next request's work is queued behind this one's, on every rank or on none.
            None: everything was handed over.
        """
        ...


class LoadWatch(Protocol):
    """Whom a pipeline tells how far it is while it is built."""

    def expect(self, total_bytes: int) -> None:
        """All weights together are so large."""
        ...

    def stage(self, name: str) -> AbstractContextManager[None]:
        """What is done within is stage `name`."""
        ...

    def add(self, done_bytes: int, read_bytes: int) -> None:
        """So much more of the weights is dealt with, of which this rank read so much."""
        ...


class PipelineFactory(Protocol):
    """Builds the pipeline of one rank; named `module:callable` in the settings.

    `contract` was just read from `checkpoint`; what is read again might be another one. None where nobody knows it.
    """

    def __call__(
        self,
        checkpoint: Path,
        *,
        contract: InferenceContract | None,
        rank: int,
        sp: int,
        device: str,
        options: Sequence[str],
        watch: LoadWatch,
    ) -> Pipeline: ...
