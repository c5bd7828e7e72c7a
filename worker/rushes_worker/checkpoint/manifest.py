"""Every tensor that a component's checkpoint holds: name, shape and stored dtype, computed from its configuration.

Dtypes carry safetensors' names. Tensors that text-to-video never reads (`used=False`: VAE encoders, vision tower, text
layers behind the one whose output is taken) are listed as well, so that a surplus or damaged tensor is told from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)

TEXT_LAYERS_USED = 50
"""The prompt is conditioned on the residual stream after this many layers of the text encoder (FastH3 reference)."""
RESAMPLING_TAPS = 12
"""Length of the audio VAE's anti-aliasing filters."""

# The input and output projections and the time embedding stay float32 in a bfloat16 checkpoint.
_FLOAT32_GROUPS = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")
_ADALN_VECTORS = 6
"""Shift, scale and gate, for attention and for the feed-forward."""
_MODALITIES = 3


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is expected of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    used: bool = True

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * (4 if self.dtype == "F32" else 2)


Manifest = dict[str, TensorSpec]
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def transformer_tensors(config: TransformerConfig) -> Manifest:
    """The diffusion transformer, with the sparse-attention gates that a FastH3 student has."""
    return {
        name: TensorSpec(shape, "F32" if name.startswith(_FLOAT32_GROUPS) else "BF16")
        for name, shape in _transformer_shapes(config)
    }


def _transformer_shapes(config: TransformerConfig) -> _Shapes:
    hidden, time_hidden, time = config.hidden_size, config.time_embed_hidden_dim, config.time_embed_dim
    yield from _linear("proj_in", hidden, config.patch_features)
    yield from _linear("audio_proj_in", hidden, config.audio_in_channels)
    yield from _linear("context_embedder", hidden, config.text_dim)
    yield from _linear("time_embedder.linear_1", time_hidden, config.freq_dim)
    yield from _linear("time_embedder.linear_2", time, time_hidden)
    for layer in range(config.num_refiner_layers):
        yield from _transformer_block(f"token_refiner.refiner_blocks.{layer}", config)
    yield "token_refiner.final_norm.weight", (hidden,)
    for layer in range(config.num_layers):
        block = f"transformer_blocks.{layer}"
        yield from _transformer_block(block, config)
        yield f"{block}.attn.to_gate_compress.weight", (config.inner_dim, hidden)
        yield from _linear(f"{block}.adaln_proj.linear", _ADALN_VECTORS * _MODALITIES * hidden, time)
    yield "norm_out.norm.weight", (hidden,)
    yield from _linear("norm_out.linear", 2 * hidden, time)
    yield from _linear("proj_out", config.patch_features, hidden)
    yield from _linear("audio_proj_out", config.audio_in_channels, hidden)


def _transformer_block(block: str, config: TransformerConfig) -> _Shapes:
    hidden, inner = config.hidden_size, config.inner_dim
    yield f"{block}.norm1.weight", (hidden,)
    yield f"{block}.norm2.weight", (hidden,)
    for projection in ("to_q", "to_k", "to_v"):
        yield f"{block}.attn.{projection}.weight", (inner, hidden)
    for norm in ("norm_q", "norm_k"):
        yield f"{block}.attn.{norm}.weight", (config.attention_head_dim,)
    yield f"{block}.attn.to_out.0.weight", (hidden, inner)
    yield f"{block}.ff.net.0.proj.weight", (2 * config.ffn_dim, hidden)
    yield f"{block}.ff.net.2.weight", (hidden, config.ffn_dim)


def text_encoder_tensors(config: TextEncoderConfig, vision: VisionConfig) -> Manifest:
    """Qwen3-VL: language model, vision tower and head."""
    manifest: Manifest = {}
    for name, shape in _language_model_shapes(config):
        _, _, layer = name.partition("model.language_model.layers.")
        used = int(layer.split(".")[0]) < TEXT_LAYERS_USED if layer else "embed_tokens" in name
        manifest[name] = TensorSpec(shape, "BF16", used)
    manifest.update({name: TensorSpec(shape, "BF16", used=False) for name, shape in _vision_shapes(vision)})
    return manifest


def _language_model_shapes(config: TextEncoderConfig) -> _Shapes:
    hidden = config.hidden_size
    heads, key_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield "model.language_model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        block = f"model.language_model.layers.{layer}"
        yield f"{block}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{block}.self_attn.k_proj.weight", (key_heads, hidden)
        yield f"{block}.self_attn.v_proj.weight", (key_heads, hidden)
        yield f"{block}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{block}.self_attn.q_norm.weight", (config.head_dim,)
        yield f"{block}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{block}.mlp.gate_proj.weight", (config.intermediate_size, hidden)
        yield f"{block}.mlp.up_proj.weight", (config.intermediate_size, hidden)
        yield f"{block}.mlp.down_proj.weight", (hidden, config.intermediate_size)
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
    yield "model.language_model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def _vision_shapes(config: VisionConfig) -> _Shapes:
    tower, hidden = "model.visual", config.hidden_size
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield f"{tower}.patch_embed.proj.weight", (hidden, *patch)
    yield f"{tower}.patch_embed.proj.bias", (hidden,)
    yield f"{tower}.pos_embed.weight", (config.num_position_embeddings, hidden)
    for layer in range(config.depth):
        block = f"{tower}.blocks.{layer}"
        yield from _norm(f"{block}.norm1", hidden)
        yield from _norm(f"{block}.norm2", hidden)
        yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{block}.attn.proj", hidden, hidden)
        yield from _linear(f"{block}.mlp.linear_fc1", config.intermediate_size, hidden)
        yield from _linear(f"{block}.mlp.linear_fc2", hidden, config.intermediate_size)
    merged = hidden * config.spatial_merge_size**2
    mergers = [("merger", hidden)]
    mergers += [(f"deepstack_merger_list.{i}", merged) for i in range(len(config.deepstack_visual_indexes))]
    for merger, norm_width in mergers:
        yield from _norm(f"{tower}.{merger}.norm", norm_width)
        yield from _linear(f"{tower}.{merger}.linear_fc1", merged, merged)
        yield from _linear(f"{tower}.{merger}.linear_fc2", config.out_hidden_size, merged)


def video_vae_tensors(config: VideoVaeConfig) -> Manifest:
    """The video VAE: causal convolutional encoder, transformer decoder."""
    used = ("decoder.", "post_quant_conv.")
    return {name: TensorSpec(shape, "F32", name.startswith(used)) for name, shape in _video_vae_shapes(config)}


def _video_vae_shapes(config: VideoVaeConfig) -> _Shapes:
    channels = config.latent_channels
    yield from _video_encoder(config)
    yield from _conv("quant_conv", 2 * channels, 2 * channels, (1, 1, 1))
    yield from _conv("post_quant_conv", channels, channels, (1, 1, 1))
    dim = config.decoder_dim
    yield "decoder.register_tokens", (1, config.decoder_num_register_tokens, dim)
    yield from _linear("decoder.proj_in", dim, channels)
    for layer in range(config.decoder_num_layers):
        block = f"decoder.transformer_blocks.{layer}"
        yield from ((f"{block}.{name}", (dim,)) for name in ("norm1.weight", "norm2.weight", "scale1", "scale2"))
        for projection in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from _linear(f"{block}.attn.{projection}", dim, dim)
        yield from _linear(f"{block}.ff.net.0.proj", 2 * config.decoder_ffn_mult * dim, dim)
        yield from _linear(f"{block}.ff.net.2", dim, config.decoder_ffn_mult * dim)
    yield from _norm("decoder.norm_out", dim)
    patch = config.temporal_compression * config.spatial_compression**2
    yield from _linear("decoder.proj_out", config.out_channels * patch, dim)


def _video_encoder(config: VideoVaeConfig) -> _Shapes:
    kernel = (3, 3, 3)
    channels = config.block_out_channels[0]
    yield from _conv("encoder.conv_in", channels, config.in_channels, kernel)
    factors = zip(config.spatial_downsample_factors, config.temporal_downsample_factors, strict=True)
    for index, (width, (spatial, temporal)) in enumerate(zip(config.block_out_channels, factors, strict=True)):
        for layer in range(config.layers_per_block):
            block = f"encoder.down_blocks.{index}.resnets.{layer}"
            yield from _norm(f"{block}.norm1", channels)
            yield from _conv(f"{block}.conv1", width, channels, kernel)
            yield from _norm(f"{block}.norm2", width)
            yield from _conv(f"{block}.conv2", width, width, kernel)
            if channels != width:
                yield from _conv(f"{block}.conv_shortcut", width, channels, (1, 1, 1))
            channels = width
        if spatial * temporal > 1:
            yield from _conv(f"encoder.down_blocks.{index}.downsamplers.0.conv", width, width, kernel)
    yield from _norm("encoder.norm_out", channels)
    yield from _conv("encoder.conv_out", 2 * config.latent_channels, channels, kernel)


def audio_vae_tensors(config: AudioVaeConfig) -> Manifest:
    """The audio VAE: DAC encoder, projection to the latents, BigVGAN decoder; weight-norm pairs as stored."""
    used = ("decoder.", "dec_in_proj.")
    return {name: TensorSpec(shape, "F32", name.startswith(used)) for name, shape in _audio_vae_shapes(config)}


def _audio_vae_shapes(config: AudioVaeConfig) -> _Shapes:
    yield from _audio_encoder(config)
    yield from _audio_projection(config)
    width = config.decoder_dim
    yield from _conv("dec_in_proj", config.latent_dim, config.latent_channels, (1,))
    yield from _normed_conv("decoder.conv_pre", width, config.latent_dim, 7)
    for stage, kernel in enumerate(config.decoder_kernel_sizes):
        # a transposed convolution stores its input channels first and its norms over them
        yield f"decoder.ups.{stage}.0.bias", (width // 2,)
        yield f"decoder.ups.{stage}.0.weight_g", (width, 1, 1)
        yield f"decoder.ups.{stage}.0.weight_v", (width, width // 2, kernel)
        width //= 2
        blocks = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        for offset, (taps, dilations) in enumerate(blocks):
            block = f"decoder.resblocks.{stage * len(config.resblock_kernel_sizes) + offset}"
            for index in range(len(dilations)):
                yield from _normed_conv(f"{block}.convs1.{index}", width, width, taps)
                yield from _normed_conv(f"{block}.convs2.{index}", width, width, taps)
            for index in range(2 * len(dilations)):
                yield from _activation(f"{block}.activations.{index}", width)
    yield from _activation("decoder.activation_post", width)
    yield from _normed_conv("decoder.conv_post", 1, width, 7, bias=False)


def _audio_encoder(config: AudioVaeConfig) -> _Shapes:
    width = config.encoder_dim
    yield from _normed_conv("encoder.block.0", width, 1, 7)
    for stage, rate in enumerate(config.encoder_rates, start=1):
        block = f"encoder.block.{stage}.block"
        for unit in range(3):
            yield f"{block}.{unit}.block.0.alpha", (1, width, 1)
            yield from _normed_conv(f"{block}.{unit}.block.1", width, width, 7)
            yield f"{block}.{unit}.block.2.alpha", (1, width, 1)
            yield from _normed_conv(f"{block}.{unit}.block.3", width, width, 1)
        yield f"{block}.3.alpha", (1, width, 1)
        yield from _normed_conv(f"{block}.4", 2 * width, width, 2 * rate)
        width *= 2
    last = len(config.encoder_rates) + 1
    yield f"encoder.block.{last}.alpha", (1, width, 1)
    yield from _normed_conv(f"encoder.block.{last + 1}", config.latent_dim, width, 3)


def _audio_projection(config: AudioVaeConfig) -> _Shapes:
    wide, narrow = config.latent_dim, config.latent_channels
    yield from _norm("pre_block.norm1", wide)
    for name in ("q_bias", "v_bias", "zero_k_bias"):
        yield f"pre_block.attn.{name}", (wide,)
    yield "pre_block.attn.qkv.weight", (3 * wide, wide)
    yield from _linear("pre_block.attn.proj", narrow, narrow)
    yield from _linear("pre_block.proj", narrow, wide)
    yield from _norm("pre_block.norm3", wide)
    yield from _norm("pre_block.norm2", narrow)
    yield from _norm("pre_block.mlp.norm", narrow)
    yield from _linear("pre_block.mlp.w0", 2 * narrow, narrow)
    yield from _linear("pre_block.mlp.w1", 2 * narrow, narrow)
    yield from _linear("pre_block.mlp.w2", narrow, 2 * narrow)
    yield from _conv("mean_proj", narrow, narrow, (1,))
    yield from _conv("logs_proj", narrow, narrow, (1,))


def _activation(name: str, width: int) -> _Shapes:
    yield f"{name}.act.alpha", (width,)
    yield f"{name}.act.beta", (width,)
    yield f"{name}.upsample.filter", (1, 1, RESAMPLING_TAPS)
    yield f"{name}.downsample.lowpass.filter", (1, 1, RESAMPLING_TAPS)


def _linear(name: str, out_features: int, in_features: int) -> _Shapes:
    yield f"{name}.weight", (out_features, in_features)
    yield f"{name}.bias", (out_features,)


def _norm(name: str, width: int) -> _Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _conv(name: str, out_channels: int, in_channels: int, kernel: tuple[int, ...]) -> _Shapes:
    yield f"{name}.weight", (out_channels, in_channels, *kernel)
    yield f"{name}.bias", (out_channels,)


def _normed_conv(name: str, out_channels: int, in_channels: int, kernel: int, *, bias: bool = True) -> _Shapes:
    if bias:
        yield f"{name}.bias", (out_channels,)
    yield f"{name}.weight_g", (out_channels, 1, 1)
    yield f"{name}.weight_v", (out_channels, in_channels, kernel)
