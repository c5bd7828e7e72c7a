"""The two layers that refiner and transformer blocks have in common.

Shapes: S rows, C hidden channels, h heads of this rank, D head dimension.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from rushes_kernels.linear import gated_linear
from rushes_kernels.scaled_linear import E4M3, quantise_rows, scaled_gated_linear, scaled_linear
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.parameters import Parameters

_FEED_FORWARD_ROWS = 65_536
"""Rows that the feed-forward layer takes at a time: its inner activations are eight times as wide as the residual."""
_ROW_MULTIPLE = 256
"""Rows that a tile of a matrix product has at most: parts end where tiles do."""


class FeedForward:
    def __init__(self, parameters: Parameters) -> None:
        self._up = parameters.get("net.0.proj.weight")
        self._down = parameters.get("net.2.weight")

    def __call__(self, x_sC: Tensor, out_sC: Tensor | None = None) -> Tensor:
        """(s, C), in `out_sC` if that is given."""
        if out_sC is None:
            out_sC = x_sC.new_empty(len(x_sC), len(self._down))
        for x, out in _parts(x_sC, out_sC):
            torch.mm(gated_linear(x, self._up), self._down.T, out=out)
        return out_sC


class ScaledFeedForward:
    """`FeedForward` with weights in e4m3 and a scale for each output channel; rows get theirs as they come."""

    def __init__(self, parameters: Parameters) -> None:
        self._up = quantise_rows(parameters.get("net.0.proj.weight"))
        self._down = quantise_rows(parameters.get("net.2.weight"))

    def __call__(self, x_sC: Tensor, out_sC: Tensor) -> Tensor:
        """(s, C), in `out_sC`."""
        for x, out in _parts(x_sC, out_sC):
            hidden = scaled_gated_linear(quantise_rows(x), self._up, x.dtype)
            scaled_linear(quantise_rows(hidden), self._down, x.dtype, out)
        return out_sC


def feed_forward_of(parameters: Parameters, dtype: torch.dtype) -> FeedForward | ScaledFeedForward:
    """The layer with weights of `dtype`: e4m3 or that of `parameters`."""
    return ScaledFeedForward(parameters) if dtype == E4M3 else FeedForward(parameters)


def _parts(x_sC: Tensor, out_sC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    num_parts = max(1, -(-len(x_sC) // _FEED_FORWARD_ROWS))
    rows = max(1, -(-len(x_sC) // (num_parts * _ROW_MULTIPLE))) * _ROW_MULTIPLE
    return zip(x_sC.split(rows), out_sC.split(rows), strict=True)


class Attention:
    """Projections of some of the heads, with the norms of q and k; `to_out` takes all heads."""

    def __init__(self, config: TransformerConfig, parameters: Parameters, heads: slice, names: tuple[str, ...]) -> None:
        D = config.attention_head_dim
        rows = slice(heads.start * D, heads.stop * D)
        self._projections = torch.cat([parameters.get(f"{name}.weight", rows=rows) for name in names])
        self._num_projections = len(names)
        self._head_dim = D
        self.norm_q = parameters.get("norm_q.weight")
        self.norm_k = parameters.get("norm_k.weight")
        self.to_out = parameters.get("to_out.0.weight")

    def project(self, x_SC: Tensor) -> tuple[Tensor, ...]:
        """One (S, h, D) per projection, in the order of their names."""
        return self._split(F.linear(x_SC, self._projections))

    def project_pieces(self, pieces: Iterable[tuple[slice, Tensor]], num_rows: int) -> tuple[Tensor, ...]:
        """As `project`, of S = `num_rows` rows that come piece by piece, each with the rows that it is."""
        out = self._projections.new_empty(num_rows, len(self._projections))
        for rows, x in pieces:
            torch.mm(x, self._projections.T, out=out[rows])
        return self._split(out)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        return rearrange(projected, "s (p h d) -> p s h d", p=self._num_projections, d=self._head_dim).unbind(0)
