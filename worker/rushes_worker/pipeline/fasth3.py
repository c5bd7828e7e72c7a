"""The pipeline of a FastH3 student on one rank: prompt in, frames as bytes and a soundtrack out.

All ranks of a replica run the same code. They share the text encoder's heads and the transformer's rows and heads; the
temporal units of the video VAE are dealt round-robin, and the last rank, which has the fewest, decodes the sound. A
fault that one rank finds in its own output is agreed on before it is raised, so that no rank is left waiting for
another; but not in what is decoded last, after which none waits.

What a clip needs on the device is allocated once (`slots.py`, `workspace.py`), and its work is replayed from graphs
(`graphs.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Self

import torch
from rushes_core.captures import MAX_TEXT_CAPACITY
from rushes_core.contract import InferenceContract, load_contract
from rushes_core.errors import NotFinite
from rushes_core.log import get_logger
from rushes_core.prompt import PromptTokenizer
from rushes_kernels.scaled_linear import E4M3

from rushes_worker.checkpoint.directory import Checkpoint, open_checkpoint
from rushes_worker.checkpoint.loader import Loader, Unwatched
from rushes_worker.checkpoint.released import with_synthetic_weights
from rushes_worker.model.audio_vae import AudioVaeDecoder
from rushes_worker.model.sequence import PackedSequence
from rushes_worker.model.text_encoder import TextEncoder
from rushes_worker.model.transformer import Transformer
from rushes_worker.model.video_vae import VideoVaeDecoder
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import LoadWatch, RenderRequest, Reporter
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.decode import CONVERSIONS, ClipDecoder
from rushes_worker.pipeline.denoise import Denoiser
from rushes_worker.pipeline.footprint import FEED_FORWARD, check_device_holds, least_weight_bytes
from rushes_worker.pipeline.graphs import Graphs, MemoryUse
from rushes_worker.pipeline.options import PipelineOptions
from rushes_worker.pipeline.outbound import Handover
from rushes_worker.pipeline.schedule import Schedule
from rushes_worker.pipeline.slots import NUM_BANKS, NUM_SLOTS, Latents, RequestSlot
from rushes_worker.pipeline.text import TextStage, capacity_for
from rushes_worker.pipeline.workspace import Workspace
from rushes_worker.pixels import PixelFormat

MAX_PROMPT_TOKENS = MAX_TEXT_CAPACITY
"""What a rank accepts whatever the API's own limit is."""
WORKSPACE_SPARE = 1.05
"""Of the memory that work passes through: pieces of other shapes fit less tightly."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Precision:
    """Compute dtypes by component; norms, softmax, residual sums and everything near the latents are fp32 anyway."""

    transformer: torch.dtype
    feed_forward: torch.dtype
    """Of the weights and inputs of these layers of the transformer's blocks."""
    text_encoder: torch.dtype
    video_vae: torch.dtype

    @classmethod
    def of(cls, device: torch.device, precision: str) -> Self:
        """
        Args:
            precision: as `PipelineOptions` has it.
        """
        on_gpu = device.type == "cuda"
        rows, vae = (torch.bfloat16, torch.float16) if on_gpu else (torch.float32, torch.float32)
        return cls(rows, E4M3 if precision == "fp8" else rows, rows, vae)

    def least_bytes(self, checkpoint: Checkpoint, sp: int) -> int:
        """What the weights of every one of `sp` ranks take at the least."""
        dtypes = {
            "transformer": self.transformer,
            FEED_FORWARD: self.feed_forward,
            "text_encoder": self.text_encoder,
            "vae": self.video_vae,
        }
        return least_weight_bytes(checkpoint, sp, dtypes)

    def __str__(self) -> str:
        parts = {"transformer": self.transformer}
        if self.feed_forward != self.transformer:
            parts["feed-forward layers"] = self.feed_forward
        parts |= {"text encoder": self.text_encoder, "video VAE": self.video_vae}
        return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in parts.items())


class FastH3Pipeline:
    """A loaded student on one rank; implements `Pipeline`."""

    def __init__(
        self,
        checkpoint: Path | Checkpoint,
        *,
        rank: int = 0,
        sp: int = 1,
        device: str = "cpu",
        options: Sequence[str] = (),
        watch: LoadWatch | None = None,
        contract: InferenceContract | None = None,
        parallel: SequenceParallel | None = None,
    ) -> None:
        """Check the checkpoint, join the other ranks and load this rank's part of every component.

        Args:
            checkpoint: a directory, or one that was opened.
            options: as `PipelineOptions` reads them.
            watch: told how far the load is.
            contract: the checkpoint's, which is read otherwise.
            parallel: this rank's place, instead of joining others as `rank` of `sp` on `device`.

        Raises:
            CheckpointError: the directory cannot be served.
            CheckpointUnreadable: its file system failed.
            ValueError: `sp` does not divide the transformer's heads, an option is unknown or cannot be served, or the
                device has less memory than the weights take.
        """
        chosen = PipelineOptions.parse(options)
        watch = watch or Unwatched()
        with watch.stage("checking the checkpoint"):
            opened = _opened(checkpoint, chosen, device, contract)
        self._config = opened.transformer_config
        self._parallel = parallel or SequenceParallel.connect(rank, sp, device)
        self._device = self._parallel.device
        precision = Precision.of(self._device, chosen.precision)
        if self._device.type == "cuda":
            need, total = precision.least_bytes(opened, self._parallel.size), torch.cuda.mem_get_info(self._device)[1]
            check_device_holds(need, self._device, total, self._parallel.size)
            torch.cuda.set_device(self._device)
            # the default stream cannot be captured; everything of this rank runs on this one
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
            # the fp32 projections of latents would lose what the reference keeps
            torch.set_float32_matmul_precision("highest")

        self._tokenizer = PromptTokenizer(opened.tokenizer_path / "tokenizer.json")
        self._schedule = Schedule.from_contract(opened.contract)
        self.precision = str(precision)
        self.dtype = precision.transformer
        """Of the transformer's rows."""
        self.feed_forward_dtype = precision.feed_forward
        self._audio_vae = None
        with Loader(opened, self._device, watch) as loader:
            with loader.component("transformer") as weights:
                self._transformer = Transformer(
                    opened.transformer_config,
                    weights,
                    schedule=self._schedule,
                    sparsity=opened.contract.vsa_sparsity,
                    device=self._device,
                    dtype=precision.transformer,
                    parallel=self._parallel,
                    feed_forward=precision.feed_forward,
                    attention=chosen.attention,
                )
            with loader.component("text_encoder") as weights:
                self._text_encoder = TextEncoder(
                    opened.text_encoder_config,
                    weights,
                    device=self._device,
                    dtype=precision.text_encoder,
                    parallel=self._parallel,
                )
            with loader.component("vae") as weights:
                self._video_vae = VideoVaeDecoder(
                    opened.video_vae_config, weights, device=self._device, dtype=precision.video_vae
                )
            if self._is_last:
                with loader.component("audio_vae") as weights:
                    self._audio_vae = AudioVaeDecoder(opened.audio_vae_config, weights, device=self._device)
        self._build_stages(chosen)
        if self._device.type == "cuda":
            with watch.stage("warming up"):
                self._warm_up()
            with watch.stage("reserving the workspace"):
                self._reserve()
            if chosen.captures:
                with watch.stage("capturing graphs"):
                    self._capture()

    @torch.inference_mode()
    def render(self, request: RenderRequest, reporter: Reporter) -> Handover:
        """Render one clip.

        Returns:
            The last unit's frames or the sound on their way to the host; they alone are then still to be handed over.

        Raises:
            Cancelled: as the reporter raised it at a boundary.
            InvalidRequest: the prompt, the size or the length cannot be rendered; on all ranks.
            NotFinite: latents, frames or samples are not finite; on all ranks.
        """
        before = MemoryUse.now(self._device)
        if not request.low_memory:
            rest = self._render(request, reporter)
        else:
            with self._graphs.plainly():
                rest = self._render(request, reporter)
        used = MemoryUse.now(self._device)
        log.info(
            "render_memory",
            job_id=request.job_id,
            allocations=used.allocations - before.allocations,
            segments=used.segments - before.segments,
            reserved_bytes=used.reserved_bytes,
            graphs=self._graphs.num_graphs,
            graph_bytes=self._graphs.num_bytes,
        )
        return rest

    def _render(self, request: RenderRequest, reporter: Reporter) -> Handover:
        shape = self._shape_of(request)
        slot = self._prepare(request, shape, reporter)
        bank = next(self._banks)

        def after_step(completed_steps: int) -> None:
            reporter.progress("denoising", completed_steps)
            reporter.checkpoint()

        self._enter(reporter, "denoising", request)
        if not self._denoiser.denoise(slot, shape, bank, after_step):
            raise NotFinite("the denoised latents are not finite", stage="denoising")

        self._enter(reporter, "decoding", request)
        last = self._decoder.decode(bank, shape, reporter, tile_batch=1 if request.low_memory else None)
        return Handover(last, reporter)

    def _prepare(self, request: RenderRequest, shape: ClipShape, reporter: Reporter) -> RequestSlot:
        """The slot with the request's refined text and noise."""
        token_ids = self._tokenizer.encode(request.prompt, max_tokens=MAX_PROMPT_TOKENS)
        self._enter(reporter, "encoding", request)
        slot = next(self._slots)
        capacity = capacity_for(len(token_ids), self._capacities, other_rows=shape.num_other_rows(self._config))
        slot.hold(len(token_ids), text_capacity=capacity)
        self._text.encode(token_ids, slot)
        # the device encodes the text meanwhile
        slot.draw_noise(request.seed, shape)
        reporter.checkpoint()
        return slot

    def _shape_of(self, request: RenderRequest) -> ClipShape:
        return ClipShape.plan(request, self._config, self._video_vae.config.spatial_compression)

    def _build_stages(self, options: PipelineOptions) -> None:
        """Everything that is allocated once, for the largest shape that is admitted."""
        config, device = self._config, self._device
        largest = ClipShape.largest(config, self._video_vae.config.spatial_compression)
        longest = max(options.text_capacities)
        self._options = options
        # on the CPU swscale converts sooner, beside the next unit
        self._pixels = options.pixels or (PixelFormat.YUV420P if device.type == "cuda" else PixelFormat.RGB24)
        self._graphs = Graphs(device, max_bytes=options.graph_bytes)
        # what is never captured need not have the same rows for several lengths
        self._capacities = options.text_capacities if self._graphs.captures else ()
        self._slots = cycle(
            [
                RequestSlot(config, largest, text_capacity=longest, device=device, dtype=self.dtype)
                for _ in range(NUM_SLOTS)
            ]
        )
        self._banks = cycle([Latents(config, largest, device) for _ in range(NUM_BANKS)])
        workspace = Workspace(
            device,
            max(
                Denoiser.workspace_bytes(config, largest, longest, self.dtype),
                ClipDecoder.workspace_bytes(self._video_vae, largest, self._pixels),
            ),
        )
        self._text = TextStage(self._text_encoder, self._transformer, self._graphs, max_rows=MAX_PROMPT_TOKENS)
        self._denoiser = Denoiser(config, self._transformer, self._schedule, self._graphs, workspace)
        self._decoder = ClipDecoder(
            self._video_vae,
            self._audio_vae,
            self._parallel,
            self._graphs,
            workspace,
            largest=largest,
            pixels=self._pixels,
        )

    @torch.inference_mode()
    def _reserve(self) -> None:
        """Take the memory that work passes through, as much as the largest shape needs."""
        largest = ClipShape.largest(self._config, self._video_vae.config.spatial_compression)
        try:
            need = self._denoiser.measure(largest, max(self._options.text_capacities))
        except torch.OutOfMemoryError as error:
            if self._parallel.size > 1:
                # the others wait for this rank in a collective: they go on only when it ends
                raise
            log.warning("workspace_not_measured", error=str(error))
        else:
            self._graphs.reserve(int(need * WORKSPACE_SPARE))

    @torch.inference_mode()
    def _capture(self) -> None:
        """Make the graphs that are to be there before the first job.

        Raises:
            ValueError: the device has less memory than a shape needs.
        """
        for wanted in self._options.captures:
            request = RenderRequest("capture", 1, "", 0, wanted.width, wanted.height, wanted.num_frames)
            shape = self._shape_of(request)
            try:
                self._text.prepare(wanted.text_capacity)
                self._denoiser.prepare(shape, wanted.text_capacity)
                self._decoder.prepare(shape)
            except torch.OutOfMemoryError as error:
                raise ValueError(f"{self._device} has less memory than {wanted} of RUSHES_CAPTURE needs") from error
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run every part once on next to nothing: kernels are compiled and libraries loaded before the first clip."""
        video, config = self._video_vae.config, self._config
        text_rows = self._transformer.refine(self._text_encoder.encode(torch.tensor([0])))
        sequence = PackedSequence.build(
            config,
            text_length=1,
            audio_latents=1,
            latent_frames=1,
            latent_height=4 * config.patch_size[1],
            latent_width=4 * config.patch_size[2],
            device=self._device,
        )
        self._transformer.forward(
            0,
            text_rows,
            torch.zeros(2, config.audio_in_channels, device=self._device),
            torch.zeros(16, config.patch_features, device=self._device),
            sequence,
        )
        frames = self._video_vae.decode_unit(
            torch.zeros(video.latent_channels, self._video_vae.units.unit_latents, 2, 2)
        )
        CONVERSIONS[self._pixels](frames)
        if self._audio_vae is not None:
            self._audio_vae.decode(torch.zeros(2, config.audio_in_channels, 2))
        torch.cuda.synchronize(self._device)

    @property
    def _is_first(self) -> bool:
        return self._parallel.rank == 0

    @property
    def _is_last(self) -> bool:
        return self._parallel.rank == self._parallel.size - 1

    def _enter(self, reporter: Reporter, phase: str, request: RenderRequest) -> None:
        reporter.progress(phase)
        if request.low_memory and self._device.type == "cuda":
            # blocks cached in the sizes of one stage are of no use to the next
            torch.cuda.empty_cache()


def _opened(
    checkpoint: Path | Checkpoint, options: PipelineOptions, device: str, contract: InferenceContract | None
) -> Checkpoint:
    """
    Raises:
        CheckpointError: the directory cannot be served.
        CheckpointUnreadable: its file system failed.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if options.synthetic_seed is None:
        return open_checkpoint(checkpoint, contract)
    contract = contract or load_contract(checkpoint)
    return with_synthetic_weights(checkpoint, contract, seed=options.synthetic_seed, device=device)
