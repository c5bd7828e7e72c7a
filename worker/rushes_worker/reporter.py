"""The rank's side of a render: progress, boundaries, raw frames and sound on their way to the supervisor."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from rushes_core.errors import GenerationError, InvalidOutput, NotFinite

from rushes_worker.commands import Advanced, AudioReady, Render, Stop, UnitReady
from rushes_worker.pipeline.base import Cancelled

Agreement = Callable[[bool], bool]
"""Gives every rank the flag that rank 0 passes; all ranks of a group call it at the same boundary."""


def alone(flag: bool) -> bool:
    """The agreement of a group of one."""
    return flag


class RankReporter:
    """Implements `pipeline.base.Reporter` over the rank's connection to its supervisor."""

    def __init__(self, command: Render, *, rank: int, connection: Connection, agree: Agreement) -> None:
        self._command = command
        self._rank = rank
        self._connection = connection
        self._agree = agree
        self._stop = False
        self.phase: str | None = None
        """What this rank entered last."""

    def progress(self, phase: str, completed_steps: int = 0) -> None:
        self.phase = phase
        if self._rank == 0:
            self._connection.send(Advanced(self._command.serial, phase, completed_steps))

    def checkpoint(self) -> None:
        if self._rank == 0:
            self._connection.send(Advanced(self._command.serial))
            self._hear()
        if self._agree(self._stop):
            raise Cancelled

    def frames(self, unit: int, frames: np.ndarray) -> None:
        request = self._command.request
        shape = (request.height, request.width, 3)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != shape:
            raise InvalidOutput(
                f"unit {unit}: frames are {frames.dtype} {frames.shape}, expected uint8 (f, {request.height}, "
                f"{request.width}, 3)",
                stage="decoding",
            )
        path = self._command.directory / f"unit-{unit:03}.rgb"
        try:
            np.ascontiguousarray(frames).tofile(path)
        except OSError as error:
            raise GenerationError(f"unit {unit} could not be written: {error.strerror}", stage="decoding") from error
        self._connection.send(UnitReady(self._command.serial, unit, path, len(frames)))

    def audio(self, samples: np.ndarray) -> None:
        if samples.dtype != np.float32 or samples.ndim != 2 or samples.shape[0] != 2:
            raise InvalidOutput(f"sound is {samples.dtype} {samples.shape}, expected float32 (2, N)", stage="decoding")
        if not np.isfinite(samples).all():
            raise NotFinite("the sound has samples that are not finite", stage="decoding")
        path = self._command.directory / "audio.npy"
        try:
            np.save(path, samples, allow_pickle=False)
        except OSError as error:
            raise GenerationError(f"the sound could not be written: {error.strerror}", stage="decoding") from error
        self._connection.send(AudioReady(self._command.serial, path))

    def _hear(self) -> None:
        while self._connection.poll():
            command = self._connection.recv()
            if isinstance(command, Stop) and command.serial == self._command.serial:
                self._stop = True
