"""Tensors of one component on their way to the device, in the dtype they are computed in."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rushes_worker.checkpoint.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Parameters:
    """A `WeightSource` seen from one module: names are relative to `prefix`."""

    weights: WeightSource
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""

    def under(self, prefix: str) -> "Parameters":
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def get(self, name: str, *, rows: slice | None = None) -> Tensor:
        """The tensor in the compute dtype."""
        return self.weights.get(self.prefix + name, rows=rows).to(self.device, self.dtype)

    def fp32(self, name: str) -> Tensor:
        """The tensor in float32 whatever the compute dtype is."""
        return self.weights.get(self.prefix + name).to(self.device, torch.float32)
