"""Diffusers' MiniMax-H3 with tiny random weights: the independent truth of the model tests."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from rushes_core.contract import load_contract
from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pipeline.schedule import Schedule
from support.tiny_model import Clip
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

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


def diffusers_clip(checkpoint: Path, request: RenderRequest) -> tuple[np.ndarray, np.ndarray]:
    """The clip that Diffusers' whole text-to-video pipeline makes of a request, in fp32 on the CPU.

    It attends densely and knows no gates; the contract's rungs are put in the place of its uniform schedule.

    Returns:
        uint8 [F, H, W, 3] and float32 [2, samples].
    """
    components = {
        "text_encoder": Qwen3VLForConditionalGeneration.from_pretrained(
            checkpoint / "text_encoder", dtype=torch.float32
        ),
        "processor": _TextProcessor(),
        "tokenizer": Qwen2Tokenizer.from_pretrained(checkpoint / "tokenizer"),
        "transformer": MiniMaxH3Transformer3DModel.from_pretrained(checkpoint / "transformer"),
        "vae": AutoencoderKLMiniMaxH3.from_pretrained(checkpoint / "vae"),
        "audio_vae": AutoencoderKLMiniMaxH3Audio.from_pretrained(checkpoint / "audio_vae"),
    }
    schedule = Schedule.from_contract(load_contract(checkpoint))
    for name, grid in (("scheduler", schedule.video), ("audio_scheduler", schedule.audio)):
        scheduler = MiniMaxH3Scheduler.from_pretrained(checkpoint / name)
        scheduler.set_timesteps = partial(_set_timesteps, scheduler, grid.sigmas)
        components[name] = scheduler
    pipeline = MiniMaxH3Blocks().get_workflow("t2va").init_pipeline()
    pipeline.update_components(**components)
    pipeline.set_progress_bar_config(disable=True)
    state = pipeline(
        prompt=request.prompt,
        num_inference_steps=schedule.num_steps + 1,
        num_frames=request.num_frames,
        height=request.height,
        width=request.width,
        output_type="pt",
        generator=torch.Generator("cpu").manual_seed(request.seed),
    )
    frames = (state.get("videos")[0] * 255).round().byte().permute(0, 2, 3, 1)
    return frames.numpy(), state.get("audio")[0].numpy()


class _TextProcessor:
    """What text uses of Qwen3-VL's processor, which cannot be built without torchvision."""

    def create_mm_token_type_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        return [[0] * len(token_ids) for token_ids in prompts]


def _set_timesteps(scheduler: MiniMaxH3Scheduler, sigmas: Tensor, *_args: object, **_kwargs: object) -> None:
    type(scheduler).set_timesteps(scheduler, sigmas=sigmas)
