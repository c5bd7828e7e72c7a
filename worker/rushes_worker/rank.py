"""One rank of a replica: holds a share of the model and renders what its supervisor says.

Started by `child.spawn`. It knows no database, no broker and no object store; it ends with
its supervisor, and its supervisor ends it when another rank of the group is lost.
"""

import faulthandler
import gc
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import url2pathname

import structlog
from rushes_core.contract import load_contract
from rushes_core.errors import CheckpointError, GenerationError, InvalidRequest, OutOfMemory, RushesError
from rushes_core.log import configure_logging, get_logger
from rushes_core.starting import importing

from rushes_worker.child import end_with_parent, leave_signals_to_parent
from rushes_worker.commands import (
    Boot,
    Done,
    Failed,
    Idled,
    MemoryUsed,
    Outcome,
    Ready,
    Refused,
    Render,
    Stopped,
)
from rushes_worker.devices import runs_on
from rushes_worker.idle import IdleClock
from rushes_worker.load_fault import report_of
from rushes_worker.loading import LoadWatcher
from rushes_worker.pipeline.base import Cancelled, Pipeline, Remainder
from rushes_worker.rank_line import RankLine
from rushes_worker.reporter import Agreement, RankReporter, alone

log = get_logger("rushes_worker.rank")

_EXHAUSTED = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What libraries below torch's allocator say of a device without memory."""
_NEXT_POLL_SECONDS = 0.001
"""How often the next render is looked for while the device finishes this one."""


class OutOfStep(Exception):
    """This rank cannot go on; its outcome was told."""


class Rank:
    """A loaded pipeline that serves one command after another."""

    def __init__(self, boot: Boot, line: RankLine) -> None:
        self._boot = boot
        self._line = line
        self._watch = LoadWatcher(line.send)
        _check_contract(boot)
        with self._watch.stage("opening the device"):
            self._device = _open_device(boot)
        with self._watch.stage("joining the other ranks"):
            self._agree = _join(boot)
        self._pipeline = _build(boot, self._watch)
        self._idle = IdleClock(boot.device)

    def serve(self) -> None:
        """Render until the supervisor closes the connection or a render leaves this rank out of step."""
        used, total = _memory(self._boot)
        self._line.send(Ready(self._device, used, total, self._pipeline.precision, self._watch.seconds))
        before: Callable[[], None] | None = None
        try:
            while True:
                before = self._render(self._line.next_render(), before)
        except OutOfStep:
            return

    def _render(self, command: Render, before: Callable[[], None] | None) -> Callable[[], None] | None:
        """Render `command`, in whose course `before` is called.

        Returns:
            What is left to do when the first step of the next render is queued; None if nothing is.

        Raises:
            OutOfStep: this render, or what was left of the one before, cannot be brought to an end.
        """
        reporter = RankReporter(
            command, rank=self._boot.rank, line=self._line, agree=self._agree, idle=self._idle, before=before
        )
        try:
            remainder = self._pipeline.render(command.request, reporter)
        except OutOfStep:
            raise
        except Exception as error:
            self._idle.forget()
            reporter.settle_before()
            outcome = self._outcome_of(command, error, reporter.phase)
            if not isinstance(outcome, Stopped):
                self._line.void_behind(command.serial)
            self._tell(outcome)
            return None
        idle_seconds = self._idle.take()
        self._idle.work_is_queued()
        reporter.settle_before()
        if remainder is None:
            self._tell_done(command, idle_seconds)
            return None

        def finish() -> None:
            self._finish(command, remainder, idle_seconds)

        if self._agree(self._next_serial(remainder) if self._boot.rank == 0 else 0):
            return finish
        finish()
        return None

    def _next_serial(self, remainder: Remainder) -> int:
        """The render whose work can be queued before `remainder` is handed over; 0 if none was said in time."""
        if remainder.is_done and not self._boot.device.startswith("cuda"):
            # what is computed next would only hold it up
            return 0
        while not (serial := self._line.next_serial(_NEXT_POLL_SECONDS)) and not remainder.is_done:
            pass
        return serial

    def _finish(self, command: Render, remainder: Remainder, idle_seconds: float | None) -> None:
        try:
            remainder.hand_over()
        except Exception as error:
            outcome = self._outcome_of(command, error, "decoding")
            self._tell(replace(outcome, is_late=True) if isinstance(outcome, Failed) else outcome)
        else:
            self._tell_done(command, idle_seconds)

    def _tell_done(self, command: Render, idle_seconds: float | None) -> None:
        if idle_seconds is not None:
            self._line.send(Idled(command.serial, idle_seconds))
        self._tell(Done(command.serial))

    def _tell(self, outcome: Outcome) -> None:
        """
        Raises:
            OutOfStep: the rank cannot go on.
        """
        used, _ = _memory(self._boot)
        self._line.send(MemoryUsed(used))
        self._line.send(outcome)
        if isinstance(outcome, Failed) and not outcome.intact:
            raise OutOfStep

    def _outcome_of(self, command: Render, error: Exception, phase: str | None) -> Outcome:
        if isinstance(error, Cancelled):
            return Stopped(command.serial)
        if isinstance(error, InvalidRequest):
            return Refused(command.serial, str(error))
        return self._failure(command, error, phase)

    def _failure(self, command: Render, error: Exception, phase: str | None) -> Failed:
        """What went wrong, and whether the rank can go on.

        Errors that are raised on purpose come from every rank at the same place, so the group is still in step after
        them; its supervisor makes sure that all ranks reported one. Memory may run out on one rank alone, or on
        several in different places: then a collective waits for good, on the host or on the device, and not every
        rank reports.
        """
        exhausted = is_out_of_memory(error)
        on_purpose = isinstance(error, RushesError | ValueError) or exhausted
        kind = type(error).__name__
        failed = Failed(
            command.serial,
            kind=kind,
            code=_code(error, exhausted),
            message=str(error) if isinstance(error, RushesError) else f"The pipeline failed ({kind}).",
            stage=(error.stage if isinstance(error, GenerationError) else None) or phase,
            traceback="".join(traceback.format_exception(error)),
            intact=on_purpose and self._device_works(),
        )
        if exhausted and failed.intact:
            self._free_memory(error)
        return failed

    def _free_memory(self, error: BaseException) -> None:
        """Give back what the failed render held, `error`'s stack frames included."""
        linked: BaseException | None = error
        while linked is not None:
            traceback.clear_frames(linked.__traceback__)
            linked = linked.__cause__ or linked.__context__
        gc.collect()
        if self._boot.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def _device_works(self) -> bool:
        if not self._boot.device.startswith("cuda"):
            return True
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True


def _code(error: Exception, exhausted: bool) -> str:
    if exhausted:
        return OutOfMemory.code
    return error.code if isinstance(error, RushesError) else GenerationError.code


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had no memory left."""
    torch = sys.modules.get("torch")
    if isinstance(error, OutOfMemory) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _EXHAUSTED)


def _check_contract(boot: Boot) -> None:
    """
    Raises:
        CheckpointError: jobs are claimed, counted and labelled by another checkpoint than would be loaded now.
        CheckpointUnreadable: its file system failed.
    """
    if boot.contract is not None and load_contract(boot.checkpoint) != boot.contract:
        raise CheckpointError(
            f"{boot.checkpoint}: the contract is another one than when the worker started; start the worker again"
        )


def _open_device(boot: Boot) -> str:
    """Make the rank's device the current one and describe it.

    Raises:
        ValueError: torch cannot use it.
    """
    if not boot.device.startswith("cuda"):
        return f"cpu, {os.environ.get('OMP_NUM_THREADS', '?')} threads"
    import torch

    ordinal = int(boot.device.partition(":")[2])
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        raise ValueError(f"{boot.device}: {build} finds no usable device; the driver may be older than that CUDA")
    if ordinal >= torch.cuda.device_count():
        raise ValueError(f"{boot.device}: {build} finds {torch.cuda.device_count()} devices, needed are {boot.sp}")
    torch.cuda.set_device(ordinal)
    capability = torch.cuda.get_device_capability(ordinal)
    if not runs_on(torch.cuda.get_arch_list(), capability):
        raise ValueError(
            f"{boot.device} ({torch.cuda.get_device_name(ordinal)}) has compute capability "
            f"{capability[0]}.{capability[1]}, {build} has code for {' '.join(torch.cuda.get_arch_list())}"
        )
    return f"{torch.cuda.get_device_name(ordinal)}, {build}"


def _memory(boot: Boot) -> tuple[int, int]:
    """Bytes in use and in all, as `Ready` says them."""
    if boot.device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free, total
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * page, os.sysconf("SC_PHYS_PAGES") * page


def _join(boot: Boot) -> Agreement:
    """Join the process group of this epoch; returns how its ranks agree on a number."""
    if boot.sp == 1:
        return alone
    with importing():
        import torch
        import torch.distributed as dist

    timeout = timedelta(seconds=boot.collective_timeout_seconds)
    on_cuda = boot.device.startswith("cuda")
    dist.init_process_group(
        # gloo beside NCCL: a number from the host must not wait for the GPU's queue
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=_store(boot, timeout),
        rank=boot.rank,
        world_size=boot.sp,
        timeout=timeout,
        device_id=torch.device(boot.device) if on_cuda else None,
    )

    def agree(number: int) -> int:
        word = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(word, src=0)
        return int(word.item())

    return agree


def _store(boot: Boot, timeout: timedelta) -> Any:
    """Where the ranks of this epoch, and no others, find each other."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    url = urlsplit(boot.rendezvous)
    if url.scheme == "file":
        return PrefixStore(boot.token, FileStore(url2pathname(url.path), boot.sp))
    store = TCPStore(
        str(url.hostname),
        int(url.port or 0),
        boot.sp,
        boot.rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=boot.listener,
    )
    return PrefixStore(boot.token, store)


def _build(boot: Boot, watch: LoadWatcher) -> Pipeline:
    module, _, name = boot.pipeline.partition(":")
    try:
        with watch.stage("importing the pipeline"), importing():
            factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"RUSHES_PIPELINE={boot.pipeline} cannot be imported: {error}") from error
    given = {
        # what was compared is what is loaded
        "contract": boot.contract,
        "rank": boot.rank,
        "sp": boot.sp,
        "device": boot.device,
        "options": boot.options,
        "watch": watch,
    }
    try:
        inspect.signature(factory).bind(boot.checkpoint, **given)
    except TypeError as error:
        raise ValueError(f"RUSHES_PIPELINE={boot.pipeline} cannot be called as a pipeline is: {error}") from error
    pipeline: Pipeline = factory(boot.checkpoint, **given)
    return pipeline


def main(arguments: list[str]) -> NoReturn:
    """Be a rank: the arguments are the supervisor's process and the descriptor that it speaks over."""
    status = _run(arguments)
    sys.stderr.flush()
    # a communicator whose peers are gone may hang in its destructor
    os._exit(status)


def _run(arguments: list[str]) -> int:
    parent_pid, descriptor = map(int, arguments)
    end_with_parent(parent_pid)
    leave_signals_to_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # what this process starts must not keep the connection open after its death
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        boot: Boot = connection.recv()
        configure_logging(boot.log_level if boot.rank == 0 else "WARNING", json=boot.log_json)
        structlog.contextvars.bind_contextvars(rank=boot.rank, epoch=boot.epoch)
        try:
            rank = Rank(boot, RankLine(connection))
        except Exception as error:
            if not isinstance(error, RushesError):
                log.exception("load_failed")
            with suppress(OSError):
                connection.send(report_of(error))
            return 1
        try:
            rank.serve()
        except (EOFError, ConnectionError):
            return 0  # the supervisor is gone, or done with this group
    return 1
