"""The rank's side of a render: progress, boundaries, raw frames and sound on their way to the supervisor."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
from rushes_core.errors import GenerationError, InvalidOutput, NotFinite
from rushes_core.states import Phase

from rushes_worker.commands import Advanced, AudioReady, Render, UnitReady
from rushes_worker.idle import IdleClock
from rushes_worker.pipeline.base import Cancelled
from rushes_worker.pixels import PixelFormat
from rushes_worker.rank_line import RankLine

Agreement = Callable[[int], int]
"""Gives every rank the number that rank 0 passes; all ranks of a group call it at the same boundary."""
_PHASES = (Phase.ENCODING.value, Phase.DENOISING.value, Phase.DECODING.value)
_FIRST_STEP_BOUNDARY = 2
"""The boundary at which the first denoise step is queued."""


def alone(number: int) -> int:
    """The agreement of a group of one."""
    return number


class RankReporter:
    """Implements `pipeline.base.Reporter` over the rank's line to its supervisor.

    Args:
        before: what is left of the render before this one; done once this one's first step is queued, or by
            `settle_before`.
    """

    def __init__(
        self,
        command: Render,
        *,
        rank: int,
        line: RankLine,
        agree: Agreement,
        idle: IdleClock,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._command = command
        self._rank = rank
        self._line = line
        self._agree = agree
        self._idle = idle
        self._before = before
        self._boundaries = 0
        self.phase: str | None = None
        """What this rank entered last."""

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        if phase not in _PHASES:
            raise ValueError(f"a pipeline enters {', '.join(_PHASES)}, and no {phase!r}")
        self.phase = phase
        self._idle.work_begins()
        if self._rank == 0:
            self._line.send(Advanced(self._command.serial, phase, completed_steps))

    def checkpoint(self) -> None:
        self._boundaries += 1
        if self._boundaries < _FIRST_STEP_BOUNDARY:
            self._idle.work_pauses()
        else:
            self.settle_before()
        stop = False
        if self._rank == 0:
            self._line.send(Advanced(self._command.serial))
            stop = self._line.is_stopped(self._command.serial)
        if self._agree(stop):
            raise Cancelled

    def settle_before(self) -> None:
        """Do what is left of the render before this one, if that was not done yet."""
        before, self._before = self._before, None
        if before is not None:
            before()

    def frames(self, unit: int, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        request = self._command.request
        shape = pixels.shape(request.height, request.width)
        if frames.dtype != np.uint8 or frames.ndim != 1 + len(shape) or frames.shape[1:] != shape:
            raise InvalidOutput(
                f"unit {unit}: frames are {frames.dtype} {frames.shape}, expected uint8 "
                f"(f, {', '.join(map(str, shape))}) of {pixels}",
                stage="decoding",
            )
        path = self._command.directory / f"unit-{unit:03}.raw"
        try:
            # numpy's own writer forgets what the system says, and the last bytes where they alone find no room
            path.write_bytes(np.ascontiguousarray(frames).data)
        except OSError as error:
            raise GenerationError(f"unit {unit} could not be written: {error.strerror}", stage="decoding") from error
        self._line.send(UnitReady(self._command.serial, unit, path, len(frames), pixels))

    def audio(self, samples: np.ndarray) -> None:
        if samples.dtype != np.float32 or samples.ndim != 2 or samples.shape[0] != 2:
            raise InvalidOutput(f"sound is {samples.dtype} {samples.shape}, expected float32 (2, N)", stage="decoding")
        if not np.isfinite(samples).all():
            raise NotFinite("the sound has samples that are not finite", stage="decoding")
        path = self._command.directory / "audio.npy"
        content = BytesIO()
        np.save(content, samples, allow_pickle=False)
        try:
            path.write_bytes(content.getbuffer())
        except OSError as error:
            raise GenerationError(f"the sound could not be written: {error.strerror}", stage="decoding") from error
        self._line.send(AudioReady(self._command.serial, path))
