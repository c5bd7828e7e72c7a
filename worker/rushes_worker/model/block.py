"""One block of the diffusion transformer on one rank's rows and heads.

Shapes: S packed rows, s this rank's; C hidden channels, h heads of this rank, D head dimension.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from rushes_kernels.norm import HeadNorm, Update, norm_rows_
from rushes_kernels.providers import Provider
from rushes_kernels.video_sparse_attention import video_sparse_attention
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.layers import Attention, feed_forward_of
from rushes_worker.model.modulation import BlockVectors
from rushes_worker.model.parameters import Parameters
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.parallel import SequenceParallel, Trade


class Block:
    """Gated sparse attention, then a feed-forward layer, each modulated by the vectors of a row's modality."""

    def __init__(
        self,
        config: TransformerConfig,
        parameters: Parameters,
        heads: slice,
        sparsity: float,
        parallel: SequenceParallel,
        provider: Provider | None,
        feed_forward: torch.dtype,
    ) -> None:
        self._config = config
        self._sparsity = sparsity
        self._provider = provider
        self._parallel = parallel
        self._norm1 = parameters.get("norm1.weight")
        self._norm2 = parameters.get("norm2.weight")
        names = ("to_q", "to_k", "to_v", "to_gate_compress")
        self._attention = Attention(config, parameters.under("attn"), heads, names)
        self._feed_forward = feed_forward_of(parameters.under("ff"), feed_forward)

    def __call__(
        self,
        x_sC: Tensor,
        due: Update | None,
        vectors: BlockVectors,
        tags_s: Tensor,
        sequence: PackedSequence,
        trade: Trade,
    ) -> Update:
        """Update this rank's rows in place, but for the last addition, which the next norm over them makes.

        Args:
            x_sC: (s, C) residual stream in the compute dtype.
            due: what the block before left to be added.
            tags_s: (s,) uint8 modalities of these rows.
            trade: how the ranks exchange what they attended to.

        Returns:
            What is to be added to `x_sC`.
        """
        eps = self._config.norm_eps
        a_sC = norm_rows_(
            x_sC,
            self._norm1,
            eps,
            update=due,
            scale_MC=vectors.attention_scale,
            shift_MC=vectors.attention_shift,
            tags_S=tags_s,
        )
        update_sC = torch.empty_like(x_sC)
        # while the first rows go through the feed-forward layer, the last ones are still on their way
        for rows, attended in self._attend(a_sC, sequence, trade):
            projected = F.linear(attended, self._attention.to_out)
            # the feed-forward layer can use its memory
            del attended
            f_sC = norm_rows_(
                x_sC[rows],
                self._norm2,
                eps,
                update=Update(projected, vectors.attention_gate),
                scale_MC=vectors.feed_forward_scale,
                shift_MC=vectors.feed_forward_shift,
                tags_S=tags_s[rows],
            )
            self._feed_forward(f_sC, update_sC[rows])
        return Update(update_sC, vectors.feed_forward_gate)

    def _attend(self, a_sC: Tensor, sequence: PackedSequence, trade: Trade) -> Iterator[tuple[slice, Tensor]]:
        """(rows, H * D) of all heads and some of this rank's rows, with the rows that they are."""
        pieces = self._parallel.land_rows(a_sC, sequence.num_rows)
        q_ShD, k_ShD, v_ShD, gate_ShD = self._attention.project_pieces(pieces, sequence.num_rows)
        norm = HeadNorm(
            self._attention.norm_q,
            self._attention.norm_k,
            sequence.cos_SR,
            sequence.sin_SR,
            self._config.qk_norm_eps,
        )
        out_NhD = video_sparse_attention(
            q_ShD,
            k_ShD,
            v_ShD,
            gate_ShD,
            sequence.tiles,
            sparsity=self._sparsity,
            norm=norm,
            provider=self._provider,
            out_NHD=a_sC.new_empty(trade.buffer_rows, *q_ShD.shape[1:]),
            places_S=trade.places_S,
        )
        return self._parallel.land_trade(out_NhD, trade)
