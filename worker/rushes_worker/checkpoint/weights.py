"""Where a component's tensors come from: one protocol for files, memory and generated weights."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Stored tensors of one component, by their published names."""

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor `name` on the CPU in its stored dtype; only `rows` (dim 0) and `columns` (dim 1) are read."""
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
