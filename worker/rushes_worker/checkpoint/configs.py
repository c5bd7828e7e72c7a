"""Component configurations, field for field as the checkpoint's config.json files name them."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """transformer/config.json: the diffusion transformer."""

    num_attention_heads: int
    attention_head_dim: int
    hidden_size: int
    num_layers: int
    num_refiner_layers: int
    ffn_dim: int
    in_channels: int
    audio_in_channels: int
    patch_size: tuple[int, int, int]
    text_dim: int
    freq_dim: int
    time_embed_hidden_dim: int
    time_embed_dim: int
    rope_freq_dim: int
    rope_theta: float
    norm_eps: float
    qk_norm_eps: float
    final_norm_eps: float

    @property
    def inner_dim(self) -> int:
        """Width of all heads together; larger than `hidden_size` in the released model."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_features(self) -> int:
        return self.in_channels * prod(self.patch_size)


@dataclass(frozen=True, slots=True)
class VideoVaeConfig:
    """vae/config.json: the video VAE."""

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    spatial_downsample_factors: tuple[int, ...]
    temporal_downsample_factors: tuple[int, ...]
    norm_num_groups: int
    norm_eps: float
    spatial_padding_mode: str
    decoder_num_layers: int
    decoder_num_attention_heads: int
    decoder_attention_head_dim: int
    decoder_num_register_tokens: int
    decoder_ffn_mult: int
    decoder_rope_theta: float
    decoder_rope_dim_ratio: float
    decoder_norm_eps: float
    clip_length: int
    token_drop: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def spatial_compression(self) -> int:
        return prod(self.spatial_downsample_factors)

    @property
    def temporal_compression(self) -> int:
        return prod(self.temporal_downsample_factors)

    @property
    def decoder_dim(self) -> int:
        return self.decoder_num_attention_heads * self.decoder_attention_head_dim


@dataclass(frozen=True, slots=True)
class AudioVaeConfig:
    """audio_vae/config.json: the audio VAE."""

    encoder_dim: int
    encoder_rates: tuple[int, ...]
    latent_dim: int
    latent_channels: int
    num_attention_heads: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    decoder_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    sampling_rate: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def hop(self) -> int:
        """Samples per latent."""
        return prod(self.decoder_rates)


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    """The `text_config` of text_encoder/config.json: the language model of Qwen3-VL."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The `vision_config` of text_encoder/config.json; text-to-video only checks that the tower is what it says."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
