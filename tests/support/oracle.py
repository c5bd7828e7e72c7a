"""Diffusers' MiniMax-H3 transformer with tiny random weights: the independent truth of the model tests."""

from dataclasses import replace
from typing import Any

from rushes_core.contract import InferenceContract
from rushes_worker.checkpoint.configs import TransformerConfig

RUNGS = (999, 874, 749, 624, 500, 375, 250, 125)

_TINY = TransformerConfig(
    num_attention_heads=4,
    attention_head_dim=32,
    hidden_size=48,
    num_layers=3,
    num_refiner_layers=2,
    ffn_dim=96,
    in_channels=4,
    audio_in_channels=8,
    patch_size=(1, 2, 2),
    text_dim=16,
    freq_dim=32,
    time_embed_hidden_dim=48,
    time_embed_dim=24,
    rope_freq_dim=4,
    rope_theta=10000.0,
    norm_eps=1e-5,
    qk_norm_eps=1e-5,
    final_norm_eps=1e-5,
)

_CONTRACT = InferenceContract(
    schema_version="fasth3-inference-contract-v1",
    model_id="tiny/tiny-fasth3",
    task="t2va",
    attention_backend="VIDEO_SPARSE_ATTN_H3",
    vsa_sparsity=0.8,
    vsa_tile_size=64,
    dmd_denoising_steps=RUNGS,
    guidance_scale=1.0,
    video_scheduler_shift=10.0,
    audio_scheduler_shift=3.0,
)


def tiny_config(**changes: Any) -> TransformerConfig:
    return replace(_TINY, **changes)


def tiny_contract(*, video_shift: float = 10.0, audio_shift: float = 3.0, **changes: Any) -> InferenceContract:
    return replace(_CONTRACT, video_scheduler_shift=video_shift, audio_scheduler_shift=audio_shift, **changes)
