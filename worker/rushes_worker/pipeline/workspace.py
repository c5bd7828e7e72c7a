"""One buffer for the tensors that clips of all shapes use in turn.

It is as large as the largest shape needs; smaller ones use its front. Graphs keep the addresses of what is carved.
"""

import math

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes: where allocators let tensors start."""


class Workspace:
    """
    Args:
        num_bytes: what the largest shape that is expected takes.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def carve(self, num_bytes: int) -> "Carving":
        """Begin at the front, over whatever was carved before; in a buffer of its own, where this one is too small."""
        fits = num_bytes <= len(self._bytes)
        return Carving(self._bytes if fits else self._bytes.new_empty(num_bytes))


class Carving:
    """Tensors side by side in a buffer; without one, only how large it would have to be."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = buffer
        self.num_bytes = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The next tensor, of whatever values.

        Raises:
            ValueError: the buffer is too small.
        """
        start = self.num_bytes
        stop = start + math.prod(shape) * dtype.itemsize
        self.num_bytes = -(-stop // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if stop > len(self._buffer):
            raise ValueError(f"a workspace of {len(self._buffer)} bytes has no room for byte {stop}")
        return self._buffer[start:stop].view(dtype).view(shape)
