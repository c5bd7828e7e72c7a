"""The media process: encoding beside the ranks, in a process without torch.

`MediaProcess` is the worker's side. The process itself talks over an inherited socket; `child.py` is what it does.
"""

import socket
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from rushes_core.variants import BY_PRODUCTS

from rushes_worker.child import environment_without_secrets, spawn
from rushes_worker.devices import VISIBLE
from rushes_worker.media.by_products import by_product_path
from rushes_worker.media.encode import check_frame_size, partial_path
from rushes_worker.media.errors import InvalidClip, MediaError, MediaProcessLost
from rushes_worker.media.messages import (
    AbortClip,
    Aborted,
    AddUnit,
    ClipSpec,
    Command,
    Failed,
    FinishClip,
    Finished,
    MadeClip,
    Reply,
    SetAudio,
    StartClip,
)
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.pixels import PixelFormat

__all__ = ["ClipSpec", "MadeClip", "MediaProcess"]

ABORT_SECONDS = 10.0
"""How long an abort may take, one unit's encoding included, before the process is killed instead."""
_REAP_SECONDS = 5.0
_FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""glibc would make up to eight for every core, and `malloc_trim` leaves what is free at the end of any but the first.
Other systems' malloc does not look at this."""


class MediaProcess:
    """A child process that turns the raw files of one clip after another into MP4s.

    Not thread-safe: one thread at a time uses it. Only the main thread may make one, or start a clip, which replaces
    a child that is gone.

    A file handed over belongs to this class. After any `MediaError` the clip is over and its files are gone;
    `start_clip` begins the next one, in a new child if the old one is lost.
    """

    def __init__(self, settings: EncoderSettings | None = None, *, device: str = "") -> None:
        """
        Args:
            device: entry of `CUDA_VISIBLE_DEVICES` for a hardware encoder; empty: as it is in this process.
        """
        self._settings = settings or EncoderSettings()
        # an operator's own bound counts
        self._environment = _FEW_ARENAS | environment_without_secrets() | ({VISIBLE: device} if device else {})
        self._number = 0
        self._spec: ClipSpec | None = None
        self._inputs: list[Path] = []
        self._spawn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout: float) -> bool:
        """Whether the process has something to tell, or is gone, within `timeout` seconds: then call `check`."""
        return self._connection.poll(timeout)

    def start_clip(self, spec: ClipSpec) -> None:
        """Begin a clip; one that was begun and not finished is aborted.

        Raises:
            ValueError: the size or the count cannot be encoded.
        """
        check_frame_size(spec.width, spec.height)
        if spec.num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {spec.num_frames}")
        if self._spec is not None:
            self.abort()
        if not self.is_alive:
            self.restart()
        self._number += 1
        self._spec, self._inputs = spec, []
        self._send(StartClip(self._number, spec, self._settings))

    def add_unit(self, index: int, path: Path, num_frames: int, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        """Hand over the frames of unit `index`, in any order; the process deletes the file once it has used it.

        Args:
            path: raw uint8 frames, one after another without a header.
            pixels: what their bytes are.

        Raises:
            MediaError: the clip has failed, now or at an earlier unit.
        """
        self._hand_over(AddUnit(self._number, index, path, num_frames, pixels))

    def set_audio(self, path: Path) -> None:
        """Hand over the soundtrack, a `.npy` of float32 [2, N]; the process deletes the file once it has used it.

        Raises:
            MediaError: the clip has failed.
        """
        self._hand_over(SetAudio(self._number, path))

    def check(self) -> None:
        """Return if the clip is all right so far.

        Raises:
            MediaError: the clip has failed.
            MediaProcessLost: the process is gone.
        """
        self._started()
        while self._poll(0.0):
            self._receive()

    def finish(self, timeout: float) -> MadeClip:
        """Wait until the clip is encoded and validated under its own name, and its by-products lie beside it.

        Args:
            timeout: seconds; a process that takes longer is killed.

        Raises:
            InvalidClip: what came out is not the clip that was asked for.
            MediaError: units or sound are missing, or encoder or disk failed.
            MediaProcessLost: the process is gone or was killed for taking too long.
        """
        spec = self._started()
        self.check()
        try:
            self._send(FinishClip(self._number))
            while self._poll(timeout):
                if isinstance(reply := self._receive(), Finished):
                    self._spec, self._inputs = None, []
                    return reply.made
            raise self._lost(f"did not finish the clip within {timeout:g} s")
        except MediaError:
            _remove_outputs(spec)
            raise

    def abort(self) -> None:
        """Give the clip up: when this returns, none of its files is left. Without a clip it does nothing."""
        if self._spec is None:
            return
        try:
            self._connection.send(AbortClip(self._number))
            while self._connection.poll(ABORT_SECONDS):
                if self._connection.recv() == Aborted(self._number):
                    break
            else:
                self.kill()
        except (EOFError, OSError):
            self.kill()
        self._forget_clip()

    def kill(self) -> None:
        """End the process at once and wait for it."""
        self._child.kill()
        # a process that a device holds is left to the kernel: its owner goes on with a new one
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_REAP_SECONDS)

    def restart(self) -> None:
        """Replace the process by a new one; a clip in progress is lost."""
        self._end_child()
        self._forget_clip()
        self._spawn()

    def close(self) -> None:
        """Abort what is in progress and end the process."""
        self.abort()
        self._end_child()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = spawn(
                "rushes_worker.media.child",
                [str(theirs.fileno())],
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                leaves_signals=True,
            )
        self._connection = Connection(ours.detach())

    def _end_child(self) -> None:
        # a child that waits for commands leaves when the socket closes
        self._connection.close()
        try:
            self._child.wait(ABORT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _hand_over(self, command: AddUnit | SetAudio) -> None:
        try:
            self.check()
            self._send(command)
        except MediaError:
            command.path.unlink(missing_ok=True)
            raise
        self._inputs.append(command.path)

    def _started(self) -> ClipSpec:
        if self._spec is None:
            raise MediaError("no clip is in progress")
        return self._spec

    def _send(self, command: Command) -> None:
        try:
            self._connection.send(command)
        except OSError as exc:
            raise self._lost() from exc

    def _poll(self, timeout: float) -> bool:
        try:
            return self._connection.poll(timeout)
        except OSError as exc:
            raise self._lost() from exc

    def _receive(self) -> Reply:
        """The next reply about the current clip or an old one; a failure of the current clip is raised."""
        try:
            reply: Reply = self._connection.recv()
        except (EOFError, OSError) as exc:
            raise self._lost() from exc
        if isinstance(reply, Failed) and reply.clip == self._number:
            self._forget_clip()
            if reply.kind == InvalidClip.__name__:
                raise InvalidClip(reply.message)
            raise MediaError(reply.message, kind=reply.kind)
        return reply

    def _lost(self, what: str | None = None) -> MediaProcessLost:
        """Account for a child that is gone, and tidy up what it cannot."""
        self.kill()
        self._forget_clip()
        return MediaProcessLost(f"the media process {what or f'ended with status {self._child.returncode}'}")

    def _forget_clip(self) -> None:
        if self._spec is not None:
            partial_path(self._spec.path).unlink(missing_ok=True)
            _remove_outputs(self._spec)
        for path in self._inputs:
            path.unlink(missing_ok=True)
        self._spec, self._inputs = None, []


def _remove_outputs(spec: ClipSpec) -> None:
    spec.path.unlink(missing_ok=True)
    for variant in BY_PRODUCTS:
        if variant.name in spec.by_products:
            by_product_path(spec.path, variant).unlink(missing_ok=True)
