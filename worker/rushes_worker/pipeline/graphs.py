"""CUDA graphs of a rank's work, and the memory that this work passes through.

Work is a function without arguments or result that reads and writes tensors with fixed addresses. The first time it is
run as it is; the second time it is captured, which runs nothing and waits for nothing, and from then on replayed. What
it allocates in between comes from one pool, captured or not: pieces of work come one after the other, so that all pass
through the same memory, and the largest decides how much there is. Nothing that is allocated in work may therefore be
kept; what is kept all the same is noticed, and the graphs that would write over it are made anew.
"""

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rushes_core.log import get_logger

log = get_logger(__name__)

Work = Callable[[], None]

_KEEPER = "the keeper of the pool"
"""What the log calls the graph of no work that the pool always has."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What torch's allocator has done so far, and what it holds."""

    allocations: int
    """Tensors that got memory of their own; those inside a replayed graph get none."""
    segments: int
    """Times that the device was asked for memory."""
    reserved_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> "MemoryUse":
        """All zeros on the CPU."""
        if device.type != "cuda":
            return cls(0, 0, 0)
        stats = torch.cuda.memory_stats(device)
        return cls(
            stats.get("allocation.all.allocated", 0),
            stats.get("segment.all.allocated", 0),
            stats.get("reserved_bytes.all.current", 0),
        )


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    work: Work
    """Holds the tensors whose addresses the graph has."""
    num_bytes: int
    """Of device memory that the graph itself takes."""


class Graphs:
    """Runs work, on CUDA as graphs. Used by one thread, on one stream that is not the default one.

    Args:
        max_bytes: device memory that graphs may take together, beside what they pass through; the graphs least recently
            used are dropped. 0: nothing is captured.
    """

    def __init__(self, device: torch.device, *, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._word = torch.zeros(1, device=device)
        self._reserved_bytes = 0
        self._is_reserved = True
        self._plain = False
        self._broken_off: torch.cuda.CUDAGraph | None = None

    @property
    def captures(self) -> bool:
        """Whether work is captured."""
        return self._pool is not None and self._max_bytes > 0 and self._broken_off is None

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    @property
    def num_bytes(self) -> int:
        """Of device memory that the graphs themselves take."""
        return sum(captured.num_bytes for captured in self._captured.values())

    def run(self, key: Hashable | None, work: Work) -> None:
        """Run `work`, or replay it.

        Args:
            key: of this work on these tensors: equal keys are for equal work. None: it is not worth a graph.
        """
        if key in self._seen and key not in self._captured and self._may_capture(key):
            self._capture(key, work)
        captured = self._captured.get(key)
        if captured is not None:
            self._captured.move_to_end(key)
            captured.graph.replay()
        else:
            self._run_plainly(work)
            # plain work may be made otherwise
            if key is not None and not self._plain:
                self._seen.add(key)

    def prepare(self, key: Hashable, work: Work, rehearsal: Work) -> None:
        """Capture `work` before it is first run, after `rehearsal`, which calls the same kernels for less."""
        if key not in self._captured and self._may_capture(key):
            self._run_plainly(rehearsal)
            self._capture(key, work)

    def measure(self, work: Work) -> int:
        """Run `work` and return the bytes that it passes through, which are given back.

        0 on the CPU.

        Raises:
            torch.OutOfMemoryError: there is less memory than that.
        """
        if self._pool is None:
            work()
            return 0
        pool = torch.cuda.MemPool()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            with torch.cuda.use_mem_pool(pool):
                work()
            return torch.cuda.max_memory_allocated(self._device) - before
        finally:
            torch.cuda.synchronize(self._device)
            del pool
            torch.cuda.empty_cache()

    def reserve(self, num_bytes: int) -> None:
        """Take the memory that work passes through from the device, in one piece; less, where there is less."""
        self._reserved_bytes = num_bytes
        self._take_reserved()

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget graphs whose tensors are about to go."""
        for key in keys:
            self._seen.discard(key)
            if key in self._captured:
                # it may still be running
                torch.cuda.synchronize(self._device)
                del self._captured[key]

    def clear(self) -> None:
        """Drop all graphs and give the memory that work passes through back to the device.

        What was reserved is taken again by the next work that is not plain.
        """
        if self._pool is None:
            return
        torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._seen.clear()
        self._refused.clear()
        self._keeper = None
        self._pool = torch.cuda.MemPool()
        self._is_reserved = False
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Within, nothing is captured or replayed, and memory is whatever the device has left: all graphs are gone."""
        self.clear()
        self._plain = True
        try:
            yield
        finally:
            self._plain = False

    def _take_reserved(self) -> None:
        self._is_reserved = True
        if self._pool is None or not self._reserved_bytes:
            return
        # what other work has left in smaller pieces is in its way
        torch.cuda.empty_cache()
        try:
            with torch.cuda.use_mem_pool(self._pool):
                torch.empty(self._reserved_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            log.warning("workspace_not_reserved", wanted_bytes=self._reserved_bytes)
        else:
            log.info("workspace_reserved", bytes=self._reserved_bytes)

    def _may_capture(self, key: Hashable) -> bool:
        return self.captures and not self._plain and key not in self._refused

    def _run_plainly(self, work: Work) -> None:
        if self._pool is None or self._plain:
            work()
            return
        if not self._is_reserved:
            self._take_reserved()
        before = torch.cuda.memory_allocated(self._device)
        with _without_collection(), torch.cuda.use_mem_pool(self._pool):
            work()
        kept = torch.cuda.memory_allocated(self._device) - before
        if kept > 0:
            # graphs of before would write over it; those to come do without its memory
            log.info("workspace_kept", bytes=kept, graphs=len(self._captured))
            torch.cuda.synchronize(self._device)
            self._captured.clear()

    def _capture(self, key: Hashable, work: Work) -> None:
        """Capture `work`. What cannot be captured is not tried again, and nothing else is once a capture broke off."""
        assert self._pool is not None
        started = time.perf_counter()
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        name = _KEEPER
        try:
            if self._keeper is None:
                # torch's allocator for the host counts a pool's graphs, and takes no more once there are none
                self._keeper = self._record(self._do_nothing, self._pool)
            name = str(key)
            graph = self._record(work, self._pool)
        except RuntimeError as error:
            self._refused.add(key)
            is_last = self._broken_off is not None
            log.warning("graph_not_captured", graph=name, needed_for=str(key), error=str(error), is_last=is_last)
            return
        seconds = time.perf_counter() - started
        pool_bytes = torch.cuda.memory_reserved(self._device) - reserved
        num_bytes = max(0, free - torch.cuda.mem_get_info(self._device)[0] - pool_bytes)
        self._captured[key] = _Captured(graph, work, num_bytes)
        log.info("graph_captured", graph=str(key), seconds=round(seconds, 3), bytes=num_bytes, pool_bytes=pool_bytes)
        self._drop_least_used()

    def _do_nothing(self) -> None:
        """What is captured first, so that the pool always has a graph."""
        self._word.zero_()

    def _record(self, work: Work, pool: "torch.cuda.MemPool") -> "torch.cuda.CUDAGraph":
        graph = torch.cuda.CUDAGraph()
        # a collection might free what must not be freed within a capture
        with _without_collection():
            # other threads of the process may go on using the device
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")  # pyright: ignore[reportArgumentType]
            try:
                work()
            finally:
                self._end(graph, pool)
        return graph

    def _end(self, graph: "torch.cuda.CUDAGraph", pool: "torch.cuda.MemPool") -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # torch's allocators still take this graph for one that is being captured. The device's can be told; the
            # host's cannot, and goes on asking it
            torch._C._cuda_endAllocateToPool(self._device.index, pool.id)
            torch._C._cuda_releasePool(self._device.index, pool.id)
            self._broken_off = graph
            raise

    def _drop_least_used(self) -> None:
        while self.num_bytes > self._max_bytes:
            # it may still be running
            torch.cuda.synchronize(self._device)
            key, dropped = self._captured.popitem(last=False)
            log.info("graph_dropped", graph=str(key), bytes=dropped.num_bytes)
            if not self._captured:
                self._refused.add(key)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Within, memory is freed by those alone who hold it: no cycle of others is found."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
