"""One block of the diffusion transformer on one rank's rows and heads.

Shapes: S packed rows, s this rank's; C hidden channels, h heads of this rank, D head dimension.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rushes_kernels.norm import rms_norm_modulate, rms_norm_rotate
from rushes_kernels.providers import Provider
from rushes_kernels.video_sparse_attention import video_sparse_attention
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.layers import Attention, FeedForward
from rushes_worker.model.modulation import BlockVectors
from rushes_worker.model.parameters import Parameters
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.parallel import SequenceParallel


class Block:
    """Gated sparse attention, then a feed-forward layer, each modulated by the vectors of a row's modality."""

    def __init__(
        self,
        config: TransformerConfig,
        parameters: Parameters,
        heads: slice,
        sparsity: float,
        parallel: SequenceParallel,
        provider: Provider | None = None,
    ) -> None:
        self._config = config
        self._sparsity = sparsity
        self._provider = provider
        self._parallel = parallel
        self._norm1 = parameters.get("norm1.weight")
        self._norm2 = parameters.get("norm2.weight")
        names = ("to_q", "to_k", "to_v", "to_gate_compress")
        self._attention = Attention(config, parameters.under("attn"), heads, names)
        self._feed_forward = FeedForward(parameters.under("ff"))

    def __call__(self, x_sC: Tensor, parts: Sequence[tuple[slice, BlockVectors]], sequence: PackedSequence) -> Tensor:
        """Update this rank's rows in place.

        Args:
            x_sC: (s, C) residual stream in the compute dtype.
            parts: which of those rows each set of vectors modulates; together they cover all rows.

        Returns:
            `x_sC`.
        """
        eps = self._config.norm_eps
        a_sC = torch.empty_like(x_sC)
        for rows, m in parts:
            a_sC[rows] = rms_norm_modulate(x_sC[rows], self._norm1, m.attention_scale, m.attention_shift, eps)
        update_sC = F.linear(self._attend(a_sC, sequence), self._attention.to_out)
        for rows, m in parts:
            x_sC[rows].addcmul_(update_sC[rows], m.attention_gate)

        f_sC = torch.empty_like(x_sC)
        for rows, m in parts:
            f_sC[rows] = rms_norm_modulate(x_sC[rows], self._norm2, m.feed_forward_scale, m.feed_forward_shift, eps)
        update_sC = self._feed_forward(f_sC)
        for rows, m in parts:
            x_sC[rows].addcmul_(update_sC[rows], m.feed_forward_gate)
        return x_sC

    def _attend(self, a_sC: Tensor, sequence: PackedSequence) -> Tensor:
        """(s, H * D): all heads of this rank's rows."""
        a_SC = self._parallel.gather_rows(a_sC, sequence.num_rows)
        q_ShD, k_ShD, v_ShD, gate_ShD = self._attention.project(a_SC)
        eps = self._config.qk_norm_eps
        q_ShD = rms_norm_rotate(q_ShD, self._attention.norm_q, sequence.cos_SR, sequence.sin_SR, eps)
        k_ShD = rms_norm_rotate(k_ShD, self._attention.norm_k, sequence.cos_SR, sequence.sin_SR, eps)
        out_ShD = video_sparse_attention(
            q_ShD, k_ShD, v_ShD, gate_ShD, sequence.tiles, sparsity=self._sparsity, provider=self._provider
        )
        return self._parallel.heads_to_rows(out_ShD)
