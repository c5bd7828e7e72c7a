"""Text encoder: the language model of Qwen3-VL, read after its fiftieth layer.

The ranks of a replica share every layer: each has whole groups of heads (a key head and the query heads that read it)
and a part of the inner width of the feed-forward layer, and adds its partial sums to the others'. Parts need not be
even: 8 groups over 7 ranks give one rank two of them.

Shapes: L tokens, M width, H query heads, K key and value heads of this rank, D head dimension. Without an image the
three rotary axes of the model agree, so positions are plain 0..L-1.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from rushes_worker.checkpoint.configs import TextEncoderConfig
from rushes_worker.checkpoint.weights import WeightSource
from rushes_worker.parallel import SequenceParallel

NUM_LAYERS_USED = 50
"""The diffusion model was trained on the residual stream after this many layers."""


class TextEncoder:
    """Turns the tokens of a prompt into the rows the diffusion model is conditioned on."""

    def __init__(
        self,
        config: TextEncoderConfig,
        weights: WeightSource,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        parallel: SequenceParallel | None = None,
    ) -> None:
        """Load this rank's share of the embedding and of the first `NUM_LAYERS_USED` layers; nothing else is read.

        Args:
            parallel: the ranks that share the model; None is this one alone.

        Raises:
            ValueError: the model has fewer layers than that.
        """
        if config.num_hidden_layers < NUM_LAYERS_USED:
            raise ValueError(
                f"num_hidden_layers is {config.num_hidden_layers}, but the prompt is read after layer {NUM_LAYERS_USED}"
            )
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._frequencies = (config.rope_theta**-exponents).float().to(self.device)
        self._parallel = parallel or SequenceParallel.single(device)
        self._vocabulary = self._parallel.own_share(config.vocab_size)
        self._embedding = weights.get("model.language_model.embed_tokens.weight", rows=self._vocabulary).to(
            self.device, dtype
        )
        self._layers = [
            _Layer(config, weights, f"model.language_model.layers.{i}", self.device, dtype, self._parallel)
            for i in range(NUM_LAYERS_USED)
        ]

    def encode(self, token_ids: Tensor) -> Tensor:
        """The residual stream after the last layer used, without a final norm; called by all ranks, whole on each.

        Args:
            token_ids: (L,) int64, L >= 1, on any device.

        Returns:
            (L, M), the compute dtype.

        Raises:
            ValueError: `token_ids` is empty or no vector, or an id is outside the vocabulary.
        """
        if token_ids.ndim != 1 or not len(token_ids):
            raise ValueError(f"token ids of shape {tuple(token_ids.shape)}, expected one prompt of at least one token")
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise ValueError(f"token ids reach {int(token_ids.max())}, the vocabulary has {self.config.vocab_size}")
        return self.forward(token_ids.to(self.device))

    def forward(self, token_ids: Tensor) -> Tensor:
        """`encode` of (L,) int64 ids on the device, which are not looked at. A row depends on ids up to its own."""
        angles = torch.arange(len(token_ids), device=self.device).unsqueeze(-1) * self._frequencies  # (L, D/2) fp32
        cos, sin = angles.cos(), angles.sin()
        x_LM = self._embed(token_ids)
        for layer in self._layers:
            x_LM = layer(x_LM, cos, sin)
        return x_LM

    def _embed(self, token_ids: Tensor) -> Tensor:
        """(L, M): every rank looks up the tokens of its part of the vocabulary, the others' rows are zero."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self._embedding)
        x_LM = self._embedding.new_zeros(len(token_ids), self.config.hidden_size)
        if len(self._embedding):
            places = token_ids - self._vocabulary.start
            is_own = (places >= 0) & (places < len(self._embedding))
            looked_up = F.embedding(places.clamp(0, len(self._embedding) - 1), self._embedding)
            x_LM = torch.where(is_own[:, None], looked_up, x_LM)
        return self._parallel.add_up(x_LM)


class _Layer:
    """Pre-norm causal attention with grouped heads and per-head q/k norms, then SwiGLU; no biases."""

    def __init__(
        self,
        config: TextEncoderConfig,
        weights: WeightSource,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        parallel: SequenceParallel,
    ) -> None:
        def load(*suffixes: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
            parts = [
                weights.get(f"{name}.{suffix}.weight", rows=rows, columns=columns).to(device, dtype)
                for suffix in suffixes
            ]
            return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

        def channels(heads: slice) -> slice:
            return slice(heads.start * config.head_dim, heads.stop * config.head_dim)

        per_group = config.num_attention_heads // config.num_key_value_heads
        groups = parallel.own_share(config.num_key_value_heads)
        query_heads = slice(groups.start * per_group, groups.stop * per_group)
        inner = parallel.own_share(config.intermediate_size)
        num_groups = groups.stop - groups.start
        self._parallel = parallel
        self._heads = (num_groups * per_group, num_groups, num_groups)
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._input_norm = load("input_layernorm")
        self._qkv_proj = torch.cat(
            [
                load("self_attn.q_proj", rows=channels(query_heads)),
                load("self_attn.k_proj", "self_attn.v_proj", rows=channels(groups)),
            ]
        )
        self._q_norm = load("self_attn.q_norm")
        self._k_norm = load("self_attn.k_norm")
        self._o_proj = load("self_attn.o_proj", columns=channels(query_heads))
        self._post_norm = load("post_attention_layernorm")
        self._gate_up_proj = load("mlp.gate_proj", "mlp.up_proj", rows=inner)
        self._down_proj = load("mlp.down_proj", columns=inner)

    def __call__(self, x_LM: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = _rms_norm(x_LM, self._input_norm, self._eps)
        x_LM = x_LM + self._parallel.add_up(F.linear(self._attend(y, cos, sin), self._o_proj))

        gate, up = F.linear(_rms_norm(x_LM, self._post_norm, self._eps), self._gate_up_proj).chunk(2, dim=-1)
        return x_LM + self._parallel.add_up(F.linear(F.silu(gate) * up, self._down_proj))

    def _attend(self, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(L, H * D): what this rank's heads read."""
        if not self._heads[0]:
            return y.new_empty(len(y), 0)
        heads = F.linear(y, self._qkv_proj).unflatten(-1, (-1, self._head_dim)).transpose(0, 1)  # (H + 2K, L, D)
        q_HLD, k_KLD, v_KLD = heads.split(self._heads)
        q_HLD = _rotate(_rms_norm(q_HLD, self._q_norm, self._eps), cos, sin)
        k_KLD = _rotate(_rms_norm(k_KLD, self._k_norm, self._eps), cos, sin)
        out_HLD = F.scaled_dot_product_attention(
            q_HLD.unsqueeze(0), k_KLD.unsqueeze(0), v_KLD.unsqueeze(0), is_causal=True, enable_gqa=True
        ).squeeze(0)
        return rearrange(out_HLD, "H L D -> L (H D)")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with fp32 statistics, rounded before the weight as Qwen3-VL does."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def _rotate(x_HLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel j with j + D/2, in fp32 with one rounding."""
    first, second = x_HLD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_HLD.dtype)
