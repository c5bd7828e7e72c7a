"""Weights on their way from files to the device that keeps them: slices are read into a few pinned buffers and copied
from there while the next are read. The host's memory never holds the model.
"""

import mmap
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch
from rushes_core.errors import CheckpointError, RushesError
from rushes_core.read_fault import read_fault
from torch import Tensor

from rushes_worker.checkpoint.shards import Stamp, StoredTensor

BUFFER_BYTES = 32 << 20
_MAX_READERS = 8
"""Threads that read: they fill a PCIe link of the fifth generation from the page cache."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


class Staging:
    """A ring of host buffers, pinned where `device` is CUDA, and the threads that fill them."""

    def __init__(self, device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self.buffer_bytes = buffer_bytes
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        num_readers = max(1, min(_MAX_READERS, torch.get_num_threads()))
        self._threads = ThreadPoolExecutor(num_readers, "weights")
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        # one is copied while another is filled
        for _ in range(2 * num_readers if self._on_cuda else num_readers):
            self._free.put(_Buffer(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers, when what was copied from them has arrived."""
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        while not self._free.empty():
            self._free.get()

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 on the device, that `fill` may write to."""
        # the readers' threads are in no inference mode, whatever this one is in
        with torch.inference_mode(False):
            out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self._stream is not None:
            # what had this memory before may still be read by the kernels of the current stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return out

    def fill(self, out: Tensor, rows: "_Rows") -> None:
        """Read `rows` into `out`, of as many bytes. The current stream waits for it, the host need not.

        Raises:
            CheckpointError, CheckpointUnreadable: as `_File` does.
        """
        step = max(1, self.buffer_bytes // rows.row_bytes)
        parts = [(first, min(first + step, rows.count)) for first in range(0, rows.count, step)]
        waiting: list[Future[None]] = [self._threads.submit(self._fill_part, out, rows, *part) for part in parts]
        for future in waiting:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _fill_part(self, out: Tensor, rows: "_Rows", first: int, last: int) -> None:
        buffer = self._free.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            num_bytes = (last - first) * rows.row_bytes
            if num_bytes > self.buffer_bytes:
                buffer.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)
            staged = buffer.bytes[:num_bytes]
            rows.read(first, last, staged.numpy())
            place = out[first * rows.row_bytes : last * rows.row_bytes]
            if self._stream is None:
                place.copy_(staged)
                return
            with torch.cuda.stream(self._stream):
                place.copy_(staged, non_blocking=True)
            buffer.copied = torch.cuda.Event()
            buffer.copied.record(self._stream)
        finally:
            self._free.put(buffer)


class _Buffer:
    def __init__(self, data: Tensor) -> None:
        self.bytes = data
        self.copied: torch.cuda.Event | None = None
        """When what was copied from it last has arrived."""


class _Rows:
    """Rows of one stored tensor, whole or a range of their bytes."""

    def __init__(self, file: "_File", *, offset: int, stride: int, count: int, row_bytes: int) -> None:
        self.count = count
        self.row_bytes = row_bytes
        self._file = file
        self._offset = offset
        self._stride = stride

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        """Rows `first` to `last` into `out`, uint8.

        Raises:
            CheckpointError, CheckpointUnreadable: as `_File` does.
        """
        offset = self._offset + first * self._stride
        if self.row_bytes == self._stride:
            self._file.read(out.data, offset)
        else:
            self._file.read_pieces(out.reshape(last - first, self.row_bytes), offset, stride=self._stride)


class _File:
    """A file of weights, open while they are loaded.

    Args:
        stamp: of the file whose header says where they are.

    Raises:
        CheckpointError: it cannot be read, is shorter than its header says, or has changed since; from every method.
        CheckpointUnreadable: its file system failed; from every method.
    """

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self._path = path
        self._stamp = stamp
        self._mapped: mmap.mmap | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise read_fault(path, error) from error
        try:
            if self._has_changed():
                raise CheckpointError(f"{path}: changed after its header was read")
        except RushesError:
            os.close(self._descriptor)
            raise

    def read(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on."""
        done = 0
        while done < len(out):
            try:
                num_bytes = os.preadv(self._descriptor, [out[done:]], offset + done)
            except OSError as error:
                raise read_fault(self._path, error) from error
            if num_bytes == 0:
                raise self._cut_short(offset + done)
            done += num_bytes

    def read_pieces(self, out: np.ndarray, offset: int, *, stride: int) -> None:
        """Fill the rows of `out`, uint8, with the bytes from `offset` on, `stride` bytes from row to row."""
        try:
            size = os.fstat(self._descriptor).st_size
            if offset + (len(out) - 1) * stride + out.shape[1] > size:
                # to touch what is not there would end the process
                raise self._cut_short(size)
            if self._mapped is None:
                self._mapped = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise read_fault(self._path, error) from error
        out[:] = np.ndarray(out.shape, np.uint8, self._mapped, offset, (stride, 1))

    def close(self) -> None:
        self._mapped = None
        try:
            has_changed = self._has_changed()
        finally:
            os.close(self._descriptor)
        if has_changed:
            raise CheckpointError(f"{self._path}: changed while it was read")

    def _has_changed(self) -> bool:
        try:
            return Stamp.of(self._descriptor) != self._stamp
        except OSError as error:
            raise read_fault(self._path, error) from error

    def _cut_short(self, at: int) -> CheckpointError:
        return CheckpointError(f"{self._path}: cut short while it was read, at byte {at}")


class StreamedWeights:
    """A `WeightSource` over a component's safetensors files whose tensors lie on a device."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], staging: Staging) -> None:
        self._folder = folder
        self._tensors = tensors
        self._staging = staging
        self._files: dict[Path, _File] = {}

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """
        Raises:
            CheckpointError: the file cannot be read as its header says.
            CheckpointUnreadable: its file system failed.
            KeyError: there is no such tensor.
        """
        if name not in self._tensors:
            raise KeyError(f"{self._folder}: no tensor {name!r}")
        stored = self._tensors[name]
        dtype = _DTYPES[stored.dtype]
        num_rows, width = (stored.shape[0], prod(stored.shape[1:])) if stored.shape else (1, 1)
        top, bottom, _ = (rows or slice(None)).indices(num_rows)
        left, right = 0, width
        shape = [max(0, bottom - top), *stored.shape[1:]] if stored.shape else []
        if columns is not None:
            inner = prod(stored.shape[2:])
            start, stop, _ = columns.indices(stored.shape[1])
            left, right = start * inner, max(start, stop) * inner
            shape[1] = max(0, stop - start)
        out = self._staging.allocate(prod(shape) * dtype.itemsize)
        if len(out):
            size = dtype.itemsize
            part = _Rows(
                self._file(stored),
                offset=stored.offset + (top * width + left) * size,
                stride=width * size,
                count=bottom - top,
                row_bytes=(right - left) * size,
            )
            self._staging.fill(out, part)
        return out.view(dtype).view(shape)

    def close(self) -> None:
        """
        Raises:
            CheckpointError: a file was written to while it was read.
            CheckpointUnreadable: its file system failed.
        """
        while self._files:
            _, file = self._files.popitem()
            file.close()

    def _file(self, stored: StoredTensor) -> _File:
        if stored.path not in self._files:
            self._files[stored.path] = _File(stored.path, stored.stamp)
        return self._files[stored.path]
