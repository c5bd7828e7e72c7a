"""What the ranks of the parallel tests do; importable in their processes and free of Diffusers."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rushes_worker.checkpoint.configs import TextEncoderConfig, TransformerConfig
from rushes_worker.checkpoint.weights import InMemoryWeights
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.model.text_encoder import TextEncoder
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


def in_small_chunks(parallel: SequenceParallel, chunk_rows: int) -> SequenceParallel:
    """The same rank of the same group, whose rows travel a few at a time."""
    return SequenceParallel(parallel.rank, parallel.size, parallel.device, chunk_rows=chunk_rows, trade_parts=3)


def denoise(
    parallel: SequenceParallel,
    tensors: dict[str, Tensor],
    clips: Sequence[Clip],
    sparsity: float,
    steps: int,
    config: TransformerConfig | None = None,
    feed_forward: torch.dtype | None = None,
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, int]]:
    """Audio and video rows of each clip after the last `steps` steps, and the elements read of each weight."""
    config = config or tiny_config()
    parallel = in_small_chunks(parallel, 37)
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
        feed_forward=feed_forward,
    )
    latents = [_denoise_one(transformer, config, schedule, clip, steps, parallel.device) for clip in clips]
    return latents, weights.read


def _denoise_one(
    transformer: Transformer,
    config: TransformerConfig,
    schedule: Schedule,
    clip: Clip,
    steps: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
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
        "traded": [_traded(parallel, here[:, own_heads], parts).cpu() for parts in (1, 2, 5)],
        "expected_trade": whole.flatten(1)[own_rows],
        "whole": whole.flatten(1),
        "landed": _landed(in_small_chunks(parallel, 2), here.flatten(1)).cpu(),
        "added_up": parallel.add_up(torch.full((4,), float(parallel.rank == 1), device=parallel.device)).cpu(),
        "passed_on": parallel.pass_on(mine).cpu(),
        "any": [parallel.any(False), parallel.any(parallel.rank == 1)],
    }


def _landed(parallel: SequenceParallel, whole: Tensor) -> Tensor:
    """The whole again, from this rank's rows and the pieces that land; NaN where none did, a row more than once is an
    error."""
    own = parallel.own_rows(len(whole))
    landed = torch.full_like(whole, torch.nan)
    for index, (rows, piece) in enumerate(parallel.land_rows(whole[own], len(whole))):
        assert landed[rows].isnan().all()
        assert len(piece) == rows.stop - rows.start > 0
        if own.start < own.stop:
            assert (rows == own) == (index == 0)
        landed[rows] = piece
    return landed


def _traded(parallel: SequenceParallel, x_ShD: Tensor, num_parts: int) -> Tensor:
    """All heads of this rank's rows, of what attention would leave of `x_ShD`; NaN where nothing was traded."""
    parallel = SequenceParallel(parallel.rank, parallel.size, parallel.device, trade_parts=num_parts)
    trade = parallel.plan_trade(len(x_ShD))
    out_NhD = x_ShD.new_full((trade.buffer_rows, *x_ShD.shape[1:]), torch.nan)
    out_NhD[slice(None) if trade.places_S is None else trade.places_S] = x_ShD
    traded = x_ShD.new_full((trade.num_own, parallel.size * x_ShD[0].numel()), torch.nan)
    num_rows = 0
    for rows, part in parallel.land_trade(out_NhD, trade):
        assert rows.start == num_rows < rows.stop
        traded[rows] = part
        num_rows = rows.stop
    return traded


def take_own_rows_before_others_send(parallel: SequenceParallel, flag: Path) -> int:
    """Rank 1 sends its rows only when rank 0 has had its own; the number of pieces that this rank got."""
    pieces = in_small_chunks(parallel, 1).land_rows(torch.zeros(2, 1), 4)
    if parallel.rank == 0:
        next(pieces)
        flag.touch()
        return 1 + len(list(pieces))
    while not flag.exists():
        time.sleep(0.01)
    return len(list(pieces))


def encode_text(
    parallel: SequenceParallel, config: TextEncoderConfig, tensors: dict[str, Tensor], prompts: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, int]]:
    """States of each prompt, and the elements read of each weight."""
    weights = RecordingWeights(tensors)
    encoder = TextEncoder(config, weights, device=parallel.device, dtype=torch.float32, parallel=parallel)
    return [encoder.encode(prompt).cpu() for prompt in prompts], weights.read


def die_on_the_last_rank(parallel: SequenceParallel) -> None:
    """The last rank vanishes; the others wait for it in a collective."""
    if parallel.rank == parallel.size - 1:
        os._exit(9)
    parallel.gather_rows(torch.zeros(1, 1), parallel.size)
