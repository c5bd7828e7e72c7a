"""Diffusers' MiniMax-H3 transformer with tiny random weights: the independent truth of the model tests."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from rushes_core.contract import InferenceContract
from rushes_worker.checkpoint.configs import TransformerConfig
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

_SHARPENED = {".norm_q.": 2.0, ".norm_k.": 2.0, ".to_v.": 4.0, ".to_out.": 4.0, ".ff.": 2.0}
"""Fresh layers attend almost evenly and hardly move the residual: a wrong mask or angle would hide in the tolerance."""


def tiny_config(**changes: Any) -> TransformerConfig:
    return replace(_TINY, **changes)


def tiny_contract(*, video_shift: float = 10.0, audio_shift: float = 3.0, **changes: Any) -> InferenceContract:
    return replace(_CONTRACT, video_scheduler_shift=video_shift, audio_scheduler_shift=audio_shift, **changes)


def diffusers_transformer(config: TransformerConfig, seed: int = 0) -> MiniMaxH3Transformer3DModel:
    """Diffusers' model in fp32 whose norms and biases are no longer ones and zeros, so that a dropped one shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MiniMaxH3Transformer3DModel(**asdict(config)).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.mul_(next((factor for part, factor in _SHARPENED.items() if part in name), 1.0))
    return model


def student_weights(
    model: MiniMaxH3Transformer3DModel, *, gate_scale: float = 0.0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The model's tensors in a student's stored precision, with random gate projections of the given scale."""
    generator = torch.Generator().manual_seed(99)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.startswith("transformer_blocks") and name.endswith("to_q.weight")]:
        gate = torch.randn(tensors[name].shape, generator=generator) * gate_scale
        tensors[name.replace("to_q", "to_gate_compress")] = gate
    kept = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")
    return {name: tensor if name.startswith(kept) else tensor.to(dtype) for name, tensor in tensors.items()}


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

    def diffusers_inputs(self, config: TransformerConfig, video_time: Tensor, audio_time: Tensor) -> dict[str, Tensor]:
        """Keyword arguments of one Diffusers forward at a video and an audio time."""
        audio_tag, video_tag = 2, 0
        layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(self.text_length, dtype=torch.long),
            self.latent_frames,
            self.latent_height,
            self.latent_width,
            self.audio_latents,
            config.patch_size,
            2,
            audio_tag,
            video_tag,
        )
        positions, tags, video_indices, audio_indices, text_indices, _, _ = layout
        audio_rows, video_rows = self.latent_rows(config)
        return {
            "hidden_states": video_rows[None],
            "audio_hidden_states": audio_rows[None],
            "encoder_hidden_states": self.text_embeds(config)[None],
            "timestep": torch.stack([video_time, audio_time]),
            "timestep_indices": (tags == audio_tag).long(),
            "token_tags": tags,
            "position_ids": positions,
            "video_indices": video_indices,
            "audio_indices": audio_indices,
            "text_indices": text_indices,
        }


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
