"""Inside the media process: one clip at a time, encoded while its units arrive.

A clip that fails is reported once and forgotten; what still arrives for it is deleted. The process ends with its
parent.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from rushes_worker.child import end_with_parent, leave_signals_to_parent
from rushes_worker.media.by_products import ByProduct, ByProducts, Missing
from rushes_worker.media.encode import ClipEncoder
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
from rushes_worker.wake import Wake

_IDLE_SECONDS = 5.0
"""After which memory goes back to the system: a clip that has to take it anew is finished 20 ms later."""


class ClipInProgress:
    """The encoder of one clip and the unit files that wait for their turn.

    Args:
        on_failure: told once, from a thread, that `check` will raise.
    """

    def __init__(self, command: StartClip, on_failure: Callable[[], None]) -> None:
        spec = command.spec
        self.spec: ClipSpec = spec
        self._encoder = ClipEncoder(
            spec.path,
            width=spec.width,
            height=spec.height,
            num_frames=spec.num_frames,
            settings=command.settings,
            comment=spec.comment,
            on_failure=on_failure,
        )
        self._by_products = ByProducts(
            spec.by_products, spec.path, width=spec.width, height=spec.height, num_frames=spec.num_frames
        )
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="by-products")
        self._waiting: dict[int, AddUnit] = {}
        self._next_unit = 0
        self._latest: np.ndarray | None = None
        """Kept: it takes milliseconds to free the last unit."""

    def check(self) -> None:
        """Raise what the picture failed of, if it did."""
        self._encoder.check()

    def add_unit(self, unit: AddUnit) -> None:
        """Have `unit` encoded and those that waited for it, or let it wait for an earlier one."""
        if unit.index < self._next_unit or unit.index in self._waiting:
            raise ValueError(f"unit {unit.index} was added twice")
        self._encoder.spans.mark(f"unit {unit.index} came")
        self._waiting[unit.index] = unit
        while (ready := self._waiting.get(self._next_unit)) is not None:
            self._latest = frames = self._frames(ready)
            self._encoder.add_frames(frames, ready.pixels)
            self._beside.submit(self._by_products.add_frames, frames)
            del self._waiting[ready.index]
            # its frames stay until nobody needs them any more
            ready.path.unlink()
            self._next_unit += 1

    def set_audio(self, command: SetAudio) -> None:
        self._encoder.add_audio(np.load(command.path, allow_pickle=False))
        command.path.unlink()

    def finish(self) -> MadeClip:
        """The clip and its by-products, once they lie under their names; `close` frees what they took."""
        if self._waiting:
            raise ValueError(f"unit {self._next_unit} is missing; {sorted(self._waiting)} wait for it")
        pictures = self._beside.submit(self._by_products.draw)
        by_products = Future[tuple[tuple[ByProduct, ...], tuple[Missing, ...]]]()

        def write(clip: Path) -> None:
            pictures.result()
            with self._encoder.spans.note("by-products"):
                by_products.set_result(self._by_products.write(clip))

        self._encoder.finish(on_written=write)
        assert self._encoder.facts is not None
        return MadeClip(self._encoder.facts, *by_products.result(), self._encoder.spans.in_order())

    def close(self) -> None:
        """Free what a finished clip took."""
        self._encoder.abort()
        self._beside.shutdown()

    def abort(self) -> None:
        """Delete the unfinished file and every unit that still waits; by-products are the worker's to delete."""
        self._encoder.abort()
        self._beside.shutdown(cancel_futures=True)
        for unit in self._waiting.values():
            unit.path.unlink(missing_ok=True)

    def _frames(self, unit: AddUnit) -> np.ndarray:
        shape = (unit.num_frames, *unit.pixels.shape(self.spec.height, self.spec.width))
        expected, size = int(np.prod(shape)), unit.path.stat().st_size
        if size != expected:
            what = f"{unit.num_frames} frames of {unit.pixels}"
            raise ValueError(f"{unit.path.name}: {what} are {expected} bytes, got {size}")
        return np.memmap(unit.path, np.uint8, "r", shape=shape)


class CommandLoop:
    """Carries out commands in the order they come until the other end closes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._clip: ClipInProgress | None = None
        self._number = -1
        self._wake = Wake()

    def run(self) -> None:
        may_hold_memory = False
        try:
            while True:
                is_idle = may_hold_memory and self._clip is None
                if not wait([self._connection, self._wake.fileno()], _IDLE_SECONDS if is_idle else None):
                    _return_free_memory()
                    may_hold_memory = False
                    continue
                self._wake.clear()
                if self._clip is not None:
                    self._attempt(self._clip.check)
                if self._connection.poll():
                    self._obey(self._connection.recv())
                may_hold_memory = may_hold_memory or self._clip is not None
        except (EOFError, ConnectionError):
            self._drop()

    def _obey(self, command: Command) -> None:
        if isinstance(command, StartClip):
            self._drop()
            self._number = command.clip
            self._attempt(lambda: self._start(command))
        elif isinstance(command, AbortClip):
            self._drop()
            self._reply(Aborted(command.clip))
        elif self._clip is None or command.clip != self._number:
            _delete_input(command)
        elif isinstance(command, FinishClip):
            self._attempt(self._finish)
        else:
            self._attempt(lambda: self._add(command))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run `action`; whatever it raises ends the clip, not the process."""
        try:
            action()
        except Exception as exc:
            self._drop()
            self._reply(Failed(self._number, type(exc).__name__, str(exc)))

    def _start(self, command: StartClip) -> None:
        self._clip = ClipInProgress(command, self._wake.poke)

    def _add(self, command: Command) -> None:
        assert self._clip is not None
        try:
            if isinstance(command, AddUnit):
                self._clip.add_unit(command)
            elif isinstance(command, SetAudio):
                self._clip.set_audio(command)
        except Exception:
            _delete_input(command)
            raise

    def _finish(self) -> None:
        assert self._clip is not None
        made = self._clip.finish()
        finished, self._clip = self._clip, None
        # the worker need not wait until everything is free
        self._reply(Finished(self._number, made))
        finished.close()

    def _drop(self) -> None:
        if self._clip is not None:
            self._clip.abort()
            self._clip = None

    def _reply(self, reply: Reply) -> None:
        self._connection.send(reply)


def main(arguments: list[str]) -> int:
    """Serve a socket until its other end closes: the arguments are the worker's process and the socket's descriptor."""
    parent_pid, descriptor = map(int, arguments)
    end_with_parent(parent_pid)
    leave_signals_to_parent()
    with Connection(descriptor) as connection:
        CommandLoop(connection).run()
    return 0


def _return_free_memory() -> None:
    """Have glibc give the system what clips left free: it would keep hundreds of MiB.

    Other systems' malloc has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _delete_input(command: Command) -> None:
    if isinstance(command, AddUnit | SetAudio):
        Path(command.path).unlink(missing_ok=True)
