"""The diffusion transformer: one stack of blocks over the packed sequence of text, audio and video rows.

Attention is video sparse attention with a projected gate; modulation comes from tables by (step, modality). Rows are
shared between the ranks of a replica and so are the heads: a rank normalises its own rows, gathers everybody's,
projects and attends with its own heads over the whole sequence, and trades the result back for its own rows.

Shapes: S packed rows (L text, 2A audio, N video), s this rank's; C hidden channels, H heads, h this rank's, D head
dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rushes_core.log import get_logger
from rushes_kernels.norm import norm_rows_
from rushes_kernels.nvrtc import DriverError, KernelError
from rushes_kernels.providers import Provider, choose_provider
from rushes_kernels.video_sparse_attention import plan_video_sparse_attention, prepare_video_sparse_attention
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.checkpoint.weights import WeightSource
from rushes_worker.model.block import Block
from rushes_worker.model.modulation import Modulation
from rushes_worker.model.parameters import Parameters
from rushes_worker.model.refiner import Refiner
from rushes_worker.model.sequence import Modality, PackedSequence
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.schedule import Schedule

log = get_logger(__name__)


class Transformer:
    """The transformer of one student, on one rank, for one schedule.

    Args:
        weights: tensors under their published names, the gate projections of all blocks included.
        schedule: times whose modulation tables are computed here.
        sparsity: share of video tiles that a video tile does not attend to.
        dtype: of linear layers and activations; both input projections, the time embedding and both output heads are
            fp32 whatever it is.
        feed_forward: of the weights of the blocks' feed-forward layers; None: `dtype`.
        attention: what computes the fine branch; None takes the fastest provider of the device.

    Raises:
        ValueError: the ranks do not divide the heads, or the provider cannot serve on this device or not be compiled.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: WeightSource,
        *,
        schedule: Schedule,
        sparsity: float,
        device: torch.device | str,
        dtype: torch.dtype,
        parallel: SequenceParallel,
        feed_forward: torch.dtype | None = None,
        attention: Provider | str | None = None,
    ) -> None:
        head_dim = config.attention_head_dim
        provider = choose_provider(device, dtype=dtype, head_dim=head_dim, wanted=attention)
        try:
            prepare_video_sparse_attention(provider, device, dtype=dtype, head_dim=head_dim)
        except DriverError:
            raise
        except KernelError as error:
            raise ValueError(f"attention provider {provider} cannot be compiled: {error}") from error
        log.info("attention_provider_chosen", provider=provider, device=str(device), asked_for=attention)
        heads = parallel.own_heads(config.num_attention_heads)
        self.device = torch.device(device)
        self.dtype = dtype
        parameters = Parameters(weights, self.device, dtype)
        self._config = config
        self._parallel = parallel
        self._heads = heads
        self._provider = provider
        self._sparsity = sparsity
        self._refiner = Refiner(config, parameters)
        self._modulation = Modulation(config, parameters, schedule)
        self._blocks = [
            Block(
                config,
                parameters.under(f"transformer_blocks.{i}"),
                heads,
                sparsity,
                parallel,
                provider,
                feed_forward or dtype,
            )
            for i in range(config.num_layers)
        ]
        self._inputs = {
            Modality.VIDEO: _Head.load(parameters.under("proj_in")),
            Modality.AUDIO: _Head.load(parameters.under("audio_proj_in")),
        }
        self._outputs = {
            Modality.VIDEO: _Head.load(parameters.under("proj_out")),
            Modality.AUDIO: _Head.load(parameters.under("audio_proj_out")),
        }
        self._norm_out = parameters.get("norm_out.norm.weight")

    def refine(self, text_embeds: Tensor, length: Tensor | None = None) -> Tensor:
        """Text rows of the packed sequence, from the text encoder's states; the same in every step.

        Args:
            text_embeds: (L, text_dim), any floating dtype.
            length: int64 (1,) on the device, how many of them count; None: all. What the others become is finite, if
                they are, and means nothing.

        Returns:
            (L, C) in the compute dtype, whole on every rank.
        """
        return self._refiner(text_embeds, length)

    def new_rows(self, count: int) -> Tensor:
        """(count, C) in the compute dtype, not filled."""
        return torch.empty(count, self._config.hidden_size, dtype=self.dtype, device=self.device)

    def prepare(self, sequence: PackedSequence) -> None:
        """Make what attention keeps for sequences of this shape; nothing is made when they are attended to."""
        if self._heads.stop > self._heads.start:
            plan_video_sparse_attention(
                sequence.tiles,
                self._provider,
                heads=self._heads.stop - self._heads.start,
                sparsity=self._sparsity,
                device=sequence.cos_SR.device,
            )

    def run_block(self, layer: int, step: int, x_sC: Tensor, sequence: PackedSequence) -> Tensor:
        """One block alone: (s, C) residual before it, which is changed, to (s, C) after it."""
        tags_s = sequence.tags_S[self._parallel.own_rows(sequence.num_rows)]
        trade = self._parallel.plan_trade(sequence.num_rows)
        due = self._blocks[layer](x_sC, None, self._modulation.at(step).block(layer), tags_s, sequence, trade)
        norm_rows_(x_sC, self._norm_out, self._config.final_norm_eps, update=due, tags_S=tags_s)
        return x_sC

    def forward(
        self,
        step: int | Tensor,
        text_rows: Tensor,
        audio_rows: Tensor,
        video_rows: Tensor,
        sequence: PackedSequence,
        *,
        depth: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of both modalities at step `step` of the schedule.

        Args:
            step: a number, or int64 (1,) on the device.
            text_rows: (L, C) compute dtype, as `refine` returned them.
            audio_rows: (2A, audio_in_channels) fp32.
            video_rows: (N, patch features) fp32.
            depth: run the first blocks alone, to rehearse: they need the memory and the kernels of all.

        Returns:
            Audio velocity (2A, audio_in_channels) and video velocity (N, patch features), fp32, whole on every rank.

        Raises:
            ValueError: a tensor has another number of rows than the sequence.
        """
        sources = {Modality.TEXT: text_rows, Modality.AUDIO: audio_rows, Modality.VIDEO: video_rows}
        for segment in sequence.segments:
            if len(sources[segment.modality]) != segment.num_rows:
                raise ValueError(
                    f"the sequence has {segment.num_rows} {segment.modality.name.lower()} rows, "
                    f"got {len(sources[segment.modality])}"
                )
        own = self._parallel.own_rows(sequence.num_rows)
        runs = sequence.runs(own)

        x_sC = text_rows.new_empty(own.stop - own.start, self._config.hidden_size)
        for run in runs:
            rows = sources[run.modality][run.source]
            head = self._inputs.get(run.modality)
            x_sC[run.rows] = rows if head is None else head(rows).to(x_sC.dtype)

        due = None
        tags_s = sequence.tags_S[own]
        trade = self._parallel.plan_trade(sequence.num_rows)
        vectors = self._modulation.at(step)
        for layer, block in enumerate(self._blocks[:depth]):
            due = block(x_sC, due, vectors.block(layer), tags_s, sequence, trade)
        shift_MC, scale_MC = vectors.out
        y_sC = norm_rows_(
            x_sC,
            self._norm_out,
            self._config.final_norm_eps,
            update=due,
            scale_MC=scale_MC,
            shift_MC=shift_MC,
            tags_S=tags_s,
        )

        widths = {modality: head.weight.shape[0] for modality, head in self._outputs.items()}
        velocity_sF = x_sC.new_zeros(len(x_sC), max(widths.values()), dtype=torch.float32)
        for run in runs:
            head = self._outputs.get(run.modality)
            if head is not None:
                velocity_sF[run.rows, : widths[run.modality]] = head(y_sC[run.rows].float())
        velocity_SF = self._parallel.gather_rows(velocity_sF, sequence.num_rows)
        audio, video = (
            velocity_SF[sequence.rows_of(modality), : widths[modality]] for modality in (Modality.AUDIO, Modality.VIDEO)
        )
        return audio, video


@dataclass(frozen=True, slots=True)
class _Head:
    """A small fp32 projection between latents and hidden channels."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def load(cls, parameters: Parameters) -> "_Head":
        return cls(parameters.fp32("weight"), parameters.fp32("bias"))

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)
