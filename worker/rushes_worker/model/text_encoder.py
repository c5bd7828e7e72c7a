"""Text encoder: the language model of Qwen3-VL, read after its fiftieth layer.

Shapes: L tokens, M width, H query heads, K key and value heads, D head dimension. Without an image the three rotary
axes of the model agree, so positions are plain 0..L-1.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from rushes_worker.checkpoint.configs import TextEncoderConfig
from rushes_worker.checkpoint.weights import WeightSource

NUM_LAYERS_USED = 50
"""The diffusion model was trained on the residual stream after this many layers."""


class TextEncoder:
    """Turns the tokens of a prompt into the rows the diffusion model is conditioned on."""

    def __init__(
        self, config: TextEncoderConfig, weights: WeightSource, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Load the embedding and the first `NUM_LAYERS_USED` layers; nothing else is read.

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
        self._embedding = weights.get("model.language_model.embed_tokens.weight").to(self.device, dtype)
        self._layers = [
            _Layer(config, weights, f"model.language_model.layers.{i}", self.device, dtype)
            for i in range(NUM_LAYERS_USED)
        ]

    def encode(self, token_ids: Tensor) -> Tensor:
        """The residual stream after the last layer used, without a final norm.

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
        angles = torch.arange(len(token_ids), device=self.device).unsqueeze(-1) * self._frequencies  # (L, D/2) fp32
        cos, sin = angles.cos(), angles.sin()
        x_LM = F.embedding(token_ids.to(self.device), self._embedding)
        for layer in self._layers:
            x_LM = layer(x_LM, cos, sin)
        return x_LM


class _Layer:
    """Pre-norm causal attention with grouped heads and per-head q/k norms, then SwiGLU; no biases."""

    def __init__(
        self, config: TextEncoderConfig, weights: WeightSource, name: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        def load(*suffixes: str) -> Tensor:
            parts = [weights.get(f"{name}.{suffix}.weight").to(device, dtype) for suffix in suffixes]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self._heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._input_norm = load("input_layernorm")
        self._qkv_proj = load("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._q_norm = load("self_attn.q_norm")
        self._k_norm = load("self_attn.k_norm")
        self._o_proj = load("self_attn.o_proj")
        self._post_norm = load("post_attention_layernorm")
        self._gate_up_proj = load("mlp.gate_proj", "mlp.up_proj")
        self._down_proj = load("mlp.down_proj")

    def __call__(self, x_LM: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = _rms_norm(x_LM, self._input_norm, self._eps)
        heads = F.linear(y, self._qkv_proj).unflatten(-1, (-1, self._head_dim)).transpose(0, 1)  # (H + 2K, L, D)
        q_HLD, k_KLD, v_KLD = heads.split(self._heads)
        q_HLD = _rotate(_rms_norm(q_HLD, self._q_norm, self._eps), cos, sin)
        k_KLD = _rotate(_rms_norm(k_KLD, self._k_norm, self._eps), cos, sin)
        out_HLD = F.scaled_dot_product_attention(
            q_HLD.unsqueeze(0), k_KLD.unsqueeze(0), v_KLD.unsqueeze(0), is_causal=True, enable_gqa=True
        ).squeeze(0)
        x_LM = x_LM + F.linear(rearrange(out_HLD, "H L D -> L (H D)"), self._o_proj)

        gate, up = F.linear(_rms_norm(x_LM, self._post_norm, self._eps), self._gate_up_proj).chunk(2, dim=-1)
        return x_LM + F.linear(F.silu(gate) * up, self._down_proj)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with fp32 statistics, rounded before the weight as Qwen3-VL does."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def _rotate(x_HLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel j with j + D/2, in fp32 with one rounding."""
    first, second = x_HLD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_HLD.dtype)
