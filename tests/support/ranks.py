"""What the ranks of the parallel tests do; importable in their processes and free of Diffusers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.model.transformer import Transformer
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.schedule import Schedule
from support.tiny_model import Clip, tiny_config, tiny_contract
from torch import Tensor


class RecordingWeights(InMemoryWeights):
    """Remembers how many elements of each tensor were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: dict[str, int] = {}

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = super().get(name, rows, columns)
        self.read[name] = tensor.numel()
        return tensor


def denoise(
    parallel: SequenceParallel, tensors: dict[str, Tensor], clips: Sequence[Clip], sparsity: float, steps: int
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, int]]:
    """Audio and video rows of each clip after the last `steps` steps, and the elements read of each weight."""
    config = tiny_config()
    schedule = Schedule.from_contract(tiny_contract())
    weights = RecordingWeights(tensors)
    transformer = Transformer(
        config,
        weights,
        schedule=schedule,
        sparsity=sparsity,
        device=parallel.device,
        dtype=torch.float32,
        parallel=parallel,
    )
    return [_denoise_one(transformer, schedule, clip, steps, parallel.device) for clip in clips], weights.read


def _denoise_one(
    transformer: Transformer, schedule: Schedule, clip: Clip, steps: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    config = tiny_config()
    sequence = PackedSequence.build(config, **clip.shape, device=device)
    text_rows = transformer.refine(clip.text_embeds(config).to(device))
    audio, video = (rows.to(device) for rows in clip.latent_rows(config))
    for step in range(schedule.num_steps - steps, schedule.num_steps):
        audio_velocity, video_velocity = transformer.forward(step, text_rows, audio, video, sequence)
        audio = schedule.audio.step(step, audio, audio_velocity)
        video = schedule.video.step(step, video, video_velocity)
    return audio.cpu(), video.cpu()


def exercise_collectives(parallel: SequenceParallel, num_rows: int) -> dict[str, Any]:
    """Each collective on rows and heads that say where they come from."""
    heads, dim = 2 * parallel.size, 3
    whole = torch.arange(num_rows * heads * dim, dtype=torch.float32).view(num_rows, heads, dim)
    own_rows, own_heads = parallel.own_rows(num_rows), parallel.own_heads(heads)
    mine = torch.full((4,), float(parallel.rank), device=parallel.device)
    here = whole.to(parallel.device)
    return {
        "gathered": parallel.gather_rows(here.flatten(1)[own_rows], num_rows).cpu(),
        "traded": parallel.heads_to_rows(here[:, own_heads].contiguous()).cpu(),
        "expected_trade": whole.flatten(1)[own_rows],
        "whole": whole.flatten(1),
        "broadcast": parallel.broadcast(mine.clone(), 1).cpu(),
        "passed_on": parallel.pass_on(mine).cpu(),
        "any": [parallel.any(False), parallel.any(parallel.rank == 1)],
    }


def die_on_the_last_rank(parallel: SequenceParallel) -> None:
    """The last rank vanishes; the others wait for it in a collective."""
    if parallel.rank == parallel.size - 1:
        os._exit(9)
    parallel.gather_rows(torch.zeros(1, 1), parallel.size)
