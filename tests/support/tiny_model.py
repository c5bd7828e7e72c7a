"""A transformer small enough for the CPU, and clips for it: configuration, contract and random inputs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rushes_core.contract import InferenceContract
from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.checkpoint.manifest import transformer_tensors
from torch import Tensor

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


def random_weights(config: TransformerConfig, seed: int = 0) -> dict[str, Tensor]:
    """A student's tensors in fp32: products keep the size of what they are given, norms are near but not at 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in transformer_tensors(config).items():
        tensor = torch.randn(spec.shape, generator=generator)
        if len(spec.shape) > 1:
            tensors[name] = tensor * spec.shape[1] ** -0.5
        else:
            tensors[name] = 0.3 * tensor + float("norm" in name and not name.startswith("norm_out.linear"))
    return tensors


@dataclass(frozen=True, slots=True)
class Clip:
    """A tiny clip and random inputs of one forward."""

    text_length: int = 7
    audio_latents: int = 9
    latent_frames: int = 6
    latent_height: int = 10
    latent_width: int = 14

    @property
    def shape(self) -> dict[str, int]:
        return asdict(self)

    def text_embeds(self, config: TransformerConfig, seed: int = 1) -> Tensor:
        return _randn(self.text_length, config.text_dim, seed=seed)

    def latent_rows(self, config: TransformerConfig, seed: int = 2) -> tuple[Tensor, Tensor]:
        """Audio rows and video rows."""
        video_rows = self.latent_frames * (self.latent_height // 2) * (self.latent_width // 2)
        audio = _randn(2 * self.audio_latents, config.audio_in_channels, seed=seed)
        return audio, _randn(video_rows, config.patch_features, seed=seed + 100)


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
