"""AdaLN modulation for every step of a schedule, computed once so that the projections need not be kept.

    phi(t)  = [cos(t f_0..), sin(t f_0..)],  f_j = 10000^(-j / (freq_dim / 2))      t in [0, 1], unscaled
    temb    = linear_2(SiLU(linear_1(phi(t))))                                      fp32
    table   = linear(SiLU(temb) rounded to the compute dtype)

Shapes: N steps, M = 3 modalities (a row's tag), C hidden channels.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.parameters import Parameters
from rushes_worker.model.sequence import Modality
from rushes_worker.pipeline.schedule import Schedule

_TIME_OF = [0, 0, 1]
"""Which of a step's two times (video, audio) a modality runs on: text runs on the video's."""


class BlockVectors(NamedTuple):
    """How one block modulates rows in one step, by their modality: (M, C) each."""

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    feed_forward_shift: Tensor
    feed_forward_scale: Tensor
    feed_forward_gate: Tensor


class Modulation:
    """Shift, scale and gate vectors by step, block and modality."""

    def __init__(self, config: TransformerConfig, parameters: Parameters, schedule: Schedule) -> None:
        times_N2 = torch.stack([schedule.video.timesteps, schedule.audio.timesteps], dim=1).to(parameters.device)
        embedder = parameters.under("time_embedder")
        weights = [embedder.fp32(f"linear_{i}.{name}") for i in (1, 2) for name in ("weight", "bias")]
        embedding = time_embedding(times_N2, config.freq_dim, *weights)
        activated_N2E = F.silu(embedding).to(parameters.dtype)

        self.blocks_LNM6C = torch.stack(
            [
                _block_table(parameters.under(f"transformer_blocks.{i}.adaln_proj.linear"), activated_N2E)
                for i in range(config.num_layers)
            ]
        )
        """(layers, N, M, 6, C): the six vectors in the order of `BlockVectors`."""
        out = parameters.under("norm_out.linear")
        self.out_NM2C = _project(out, activated_N2E).unflatten(-1, (2, -1))[:, _TIME_OF]
        """(N, M, 2, C): shift and scale before the output heads."""

    def at(self, step: int | Tensor) -> "StepVectors":
        """The vectors of one step, given as a number or as int64 (1,) on the device, which is not waited for."""
        if isinstance(step, int):
            return StepVectors(self.blocks_LNM6C[:, step], self.out_NM2C[step])
        return StepVectors(
            self.blocks_LNM6C.index_select(1, step).squeeze(1), self.out_NM2C.index_select(0, step).squeeze(0)
        )


@dataclass(frozen=True, eq=False)
class StepVectors:
    """How all blocks, and the output, modulate rows in one step."""

    blocks_LM6C: Tensor
    out_M2C: Tensor

    def block(self, layer: int) -> BlockVectors:
        return BlockVectors(*self.blocks_LM6C[layer].unbind(1))

    @property
    def out(self) -> tuple[Tensor, ...]:
        """Shift and scale before the output heads, each (M, C)."""
        return self.out_M2C.unbind(1)


def time_embedding(
    times: Tensor, freq_dim: int, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor
) -> Tensor:
    """Embed times (...) fp32 as (..., time_embed_dim) fp32."""
    half = freq_dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
    angles = times[..., None] * frequencies
    waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return F.linear(F.silu(F.linear(waves, weight_1, bias_1)), weight_2, bias_2)


def _block_table(linear: Parameters, activated_N2E: Tensor) -> Tensor:
    """(N, M, 6, C): of the rows that the projection makes for both times, those that a modality's own time selects."""
    projected = _project(linear, activated_N2E).unflatten(-1, (len(Modality), 6, -1))
    return projected[:, _TIME_OF, list(Modality)]


def _project(linear: Parameters, activated_N2E: Tensor) -> Tensor:
    weight, bias = linear.get("weight"), linear.get("bias")
    # one product per step, as a forward of that step would compute it: GEMMs of other heights may round differently
    return torch.stack([F.linear(activated_2E, weight, bias) for activated_2E in activated_N2E])
