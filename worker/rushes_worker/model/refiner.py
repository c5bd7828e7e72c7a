"""The refiner that turns the text encoder's states into text rows, once per clip.

Shapes: L text tokens, C hidden channels, H heads, D head dimension.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from rushes_kernels.norm import rms_norm
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.layers import Attention, FeedForward
from rushes_worker.model.parameters import Parameters


class Refiner:
    """Embedding and two plain pre-norm blocks over the text rows: no rotation, no modulation, no gate."""

    def __init__(self, config: TransformerConfig, parameters: Parameters) -> None:
        self._config = config
        self._dtype = parameters.dtype
        embedder = parameters.under("context_embedder")
        self._embedder = embedder.get("weight"), embedder.get("bias")
        refiner = parameters.under("token_refiner")
        self._blocks = [
            RefinerBlock(config, refiner.under(f"refiner_blocks.{i}")) for i in range(config.num_refiner_layers)
        ]
        self._final_norm = refiner.get("final_norm.weight")

    def __call__(self, text_embeds: Tensor, length: Tensor | None = None) -> Tensor:
        x_LC = F.linear(text_embeds.to(self._dtype), *self._embedder)
        mask_1L = None if length is None else (torch.arange(len(x_LC), device=x_LC.device) < length)[None]
        for block in self._blocks:
            x_LC = block(x_LC, mask_1L)
        return rms_norm(x_LC, self._final_norm, self._config.final_norm_eps)


class RefinerBlock:
    def __init__(self, config: TransformerConfig, parameters: Parameters) -> None:
        self._config = config
        self._norm1 = parameters.get("norm1.weight")
        self._norm2 = parameters.get("norm2.weight")
        all_heads = slice(0, config.num_attention_heads)
        self._attention = Attention(config, parameters.under("attn"), all_heads, ("to_q", "to_k", "to_v"))
        self._feed_forward = FeedForward(parameters.under("ff"))

    def __call__(self, x_LC: Tensor, mask_1L: Tensor | None) -> Tensor:
        q_LHD, k_LHD, v_LHD = self._attention.project(rms_norm(x_LC, self._norm1, self._config.norm_eps))
        q_LHD = rms_norm(q_LHD, self._attention.norm_q, self._config.qk_norm_eps)
        k_LHD = rms_norm(k_LHD, self._attention.norm_k, self._config.qk_norm_eps)
        q_1HLD, k_1HLD, v_1HLD = (x.transpose(0, 1)[None] for x in (q_LHD, k_LHD, v_LHD))
        attended_1HLD = F.scaled_dot_product_attention(q_1HLD, k_1HLD, v_1HLD, attn_mask=mask_1L)
        x_LC = x_LC + F.linear(rearrange(attended_1HLD, "1 h l d -> l (h d)"), self._attention.to_out)
        return x_LC + self._feed_forward(rms_norm(x_LC, self._norm2, self._config.norm_eps))
