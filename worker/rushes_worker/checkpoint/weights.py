"""Where a component's tensors come from: one protocol for files, memory and generated weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor

from rushes_worker.checkpoint.shards import StoredTensor
from rushes_worker.checkpoint.streaming import Staging, StreamedWeights


class WeightSource(Protocol):
    """Stored tensors of one component, by their published names."""

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor `name` in its stored dtype; only `rows` (dim 0) and `columns` (dim 1) are read."""
        ...


class InMemoryWeights:
    """A `WeightSource` over tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = self._tensors[name]
        if rows is not None:
            tensor = tensor[rows]
        return tensor if columns is None else tensor[:, columns]


class FileWeights:
    """A `WeightSource` over a component's safetensors files, opened as they are needed; its tensors lie on the host."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._files: dict[Path, safe_open] = {}

    def on(self, staging: Staging) -> StreamedWeights:
        """The same tensors, on the device of `staging`."""
        return StreamedWeights(self._folder, self._tensors, staging)

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"{self._folder}: no tensor {name!r}")
        path = self._tensors[name].path
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        if rows is None and columns is None:
            return self._files[path].get_tensor(name)
        part = self._files[path].get_slice(name)
        return part[rows or slice(None)] if columns is None else part[rows or slice(None), columns]
