"""The released FastH3 student's configuration with random weights: its full size without its files.

Field values are those of the published config files (FastVideo-FastH3-8-Step-V2, Qwen3-VL-32B).
"""

from pathlib import Path

import torch
from rushes_core.contract import ATTENTION_BACKEND, SCHEMA_VERSION, TILE_SIZE, InferenceContract

from rushes_worker.checkpoint.configs import AudioVaeConfig, TextEncoderConfig, TransformerConfig, VideoVaeConfig
from rushes_worker.checkpoint.directory import Checkpoint
from rushes_worker.checkpoint.random_weights import Sizes, Source
from rushes_worker.checkpoint.student import AUDIO_SHIFT, DENOISING_STEPS, VIDEO_SHIFT
from rushes_worker.checkpoint.tiny import VISION, write_tokenizer

TRANSFORMER = TransformerConfig(
    num_attention_heads=56,
    attention_head_dim=128,
    hidden_size=5376,
    num_layers=50,
    num_refiner_layers=2,
    ffn_dim=14336,
    in_channels=24,
    audio_in_channels=32,
    patch_size=(1, 2, 2),
    text_dim=5120,
    freq_dim=256,
    time_embed_hidden_dim=5376,
    time_embed_dim=2688,
    rope_freq_dim=16,
    rope_theta=10000.0,
    norm_eps=1e-5,
    qk_norm_eps=1e-5,
    final_norm_eps=1e-5,
)

TEXT_ENCODER = TextEncoderConfig(
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5_000_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
)

VIDEO_VAE = VideoVaeConfig(
    in_channels=3,
    out_channels=3,
    latent_channels=24,
    block_out_channels=(128, 256, 256, 512, 512, 1024),
    layers_per_block=2,
    spatial_downsample_factors=(2, 2, 2, 2, 1, 1),
    temporal_downsample_factors=(1, 2, 2, 1, 1, 1),
    norm_num_groups=32,
    norm_eps=1e-6,
    spatial_padding_mode="reflect",
    decoder_num_layers=36,
    decoder_num_attention_heads=32,
    decoder_attention_head_dim=64,
    decoder_num_register_tokens=4,
    decoder_ffn_mult=4,
    decoder_rope_theta=100.0,
    decoder_rope_dim_ratio=0.75,
    decoder_norm_eps=1e-5,
    clip_length=17,
    token_drop=3,
    latents_mean=(0.0,) * 24,
    latents_std=(1.0,) * 24,
)
"""But for the latents' statistics: random weights make latents around 0."""

AUDIO_VAE = AudioVaeConfig(
    encoder_dim=64,
    encoder_rates=(2, 4, 4, 5, 5),
    latent_dim=2048,
    latent_channels=32,
    num_attention_heads=8,
    decoder_dim=1024,
    decoder_rates=(5, 5, 2, 2, 2, 2, 2),
    decoder_kernel_sizes=(9, 9, 4, 4, 4, 4, 4),
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilation_sizes=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    sampling_rate=32000,
    latents_mean=(0.0,) * 32,
    latents_std=(1.0,) * 32,
)

CONTRACT = InferenceContract(
    schema_version=SCHEMA_VERSION,
    model_id="rushes/synthetic-fasth3-8-step",
    task="t2va",
    attention_backend=ATTENTION_BACKEND,
    vsa_sparsity=0.8,
    vsa_tile_size=TILE_SIZE,
    dmd_denoising_steps=DENOISING_STEPS,
    guidance_scale=1.0,
    video_scheduler_shift=VIDEO_SHIFT,
    audio_scheduler_shift=AUDIO_SHIFT,
)


def synthetic_checkpoint(folder: Path, *, seed: int, device: torch.device | str) -> Checkpoint:
    """A checkpoint of the released sizes whose weights are drawn on `device` when they are loaded.

    Args:
        folder: an existing directory; a byte-level tokenizer is written to it, one token per byte of the prompt.
    """
    write_tokenizer(folder / "tokenizer")
    return with_synthetic_weights(folder, CONTRACT, seed=seed, device=device)


def with_synthetic_weights(
    path: Path, contract: InferenceContract, *, seed: int, device: torch.device | str
) -> Checkpoint:
    """A checkpoint of the released sizes whose weights are drawn on `device` when they are loaded.

    Args:
        path: a directory with a tokenizer.
        contract: what the weights are served by.
    """
    # the vision tower is not drawn
    weights = Sizes(TRANSFORMER, TEXT_ENCODER, VISION, VIDEO_VAE, AUDIO_VAE).weights(Source(seed, device))
    return Checkpoint(
        path=path,
        contract=contract,
        transformer_config=TRANSFORMER,
        text_encoder_config=TEXT_ENCODER,
        video_vae_config=VIDEO_VAE,
        audio_vae_config=AUDIO_VAE,
        _manifests={name: component.manifest for name, component in weights.items()},
        _weights=weights,
    )
