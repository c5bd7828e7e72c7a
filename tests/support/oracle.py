"""Diffusers' MiniMax-H3 transformer with tiny random weights: the independent truth of the model tests."""

from dataclasses import asdict

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from rushes_worker.checkpoint.configs import TransformerConfig
from support.tiny_model import Clip
from torch import Tensor

_SHARPENED = {".norm_q.": 2.0, ".norm_k.": 2.0, ".to_v.": 4.0, ".to_out.": 4.0, ".ff.": 2.0}
"""Fresh layers attend almost evenly and hardly move the residual: a wrong mask or angle would hide in the tolerance."""


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


def diffusers_inputs(
    clip: Clip, config: TransformerConfig, video_time: Tensor, audio_time: Tensor
) -> dict[str, Tensor]:
    """Keyword arguments of one Diffusers forward at a video and an audio time."""
    audio_tag, video_tag = 2, 0
    layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(clip.text_length, dtype=torch.long),
        clip.latent_frames,
        clip.latent_height,
        clip.latent_width,
        clip.audio_latents,
        config.patch_size,
        2,
        audio_tag,
        video_tag,
    )
    positions, tags, video_indices, audio_indices, text_indices, _, _ = layout
    audio_rows, video_rows = clip.latent_rows(config)
    return {
        "hidden_states": video_rows[None],
        "audio_hidden_states": audio_rows[None],
        "encoder_hidden_states": clip.text_embeds(config)[None],
        "timestep": torch.stack([video_time, audio_time]),
        "timestep_indices": (tags == audio_tag).long(),
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": video_indices,
        "audio_indices": audio_indices,
        "text_indices": text_indices,
    }
