"""The pipeline of a FastH3 student on one rank: prompt in, uint8 frames and a soundtrack out.

All ranks of a replica run the same code. They share the text encoder's heads and the transformer's rows and heads; the
temporal units of the video VAE are dealt round-robin, and the last rank, which has the fewest, decodes the sound. A
fault that one rank finds in its own output is agreed on before it is raised, so that no rank is left waiting for
another.

Shapes: L text tokens, A audio latents per channel, T latent frames of Hl x Wl latents, C latent channels, H x W pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from rushes_core.clip import Clip
from rushes_core.contract import load_contract
from rushes_core.errors import InvalidRequest, NotFinite
from rushes_core.prompt import PromptTokenizer
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.checkpoint.directory import Checkpoint, open_checkpoint
from rushes_worker.checkpoint.loader import Loader, Unwatched
from rushes_worker.checkpoint.released import with_synthetic_weights
from rushes_worker.model.audio_vae import AudioVaeDecoder
from rushes_worker.model.sequence import PackedSequence, audio_latents, patchify, unpatchify
from rushes_worker.model.text_encoder import TextEncoder
from rushes_worker.model.transformer import Transformer
from rushes_worker.model.video_units import cross_fade, to_uint8
from rushes_worker.model.video_vae import VideoVaeDecoder
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import LoadWatch, RenderRequest, Reporter
from rushes_worker.pipeline.denoise import denoise
from rushes_worker.pipeline.noise import initial_noise
from rushes_worker.pipeline.options import PipelineOptions
from rushes_worker.pipeline.schedule import Schedule

MAX_PROMPT_TOKENS = 16_384
"""What a rank accepts whatever the API's own limit is."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Compute dtypes by component; norms, softmax, residual sums and everything near the latents are fp32 anyway."""

    transformer: torch.dtype
    text_encoder: torch.dtype
    video_vae: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> Self:
        if device.type == "cuda":
            return cls(torch.bfloat16, torch.bfloat16, torch.float16)
        return cls(torch.float32, torch.float32, torch.float32)

    def __str__(self) -> str:
        parts = {"transformer": self.transformer, "text encoder": self.text_encoder, "video VAE": self.video_vae}
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
        parallel: SequenceParallel | None = None,
    ) -> None:
        """Check the checkpoint, join the other ranks and load this rank's part of every component.

        Args:
            checkpoint: a directory, or one that was opened.
            options: as `PipelineOptions` reads them.
            watch: told how far the load is.
            parallel: this rank's place, instead of joining others as `rank` of `sp` on `device`.

        Raises:
            CheckpointError: the directory cannot be served.
            ValueError: `sp` does not divide the transformer's heads, an option is unknown or cannot be served.
        """
        chosen = PipelineOptions.parse(options)
        watch = watch or Unwatched()
        with watch.stage("checking the checkpoint"):
            opened = _opened(checkpoint, chosen, device)
        self._config = opened.transformer_config
        self._parallel = parallel or SequenceParallel.connect(rank, sp, device)
        self._device = self._parallel.device
        precision = Precision.of(self._device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # the fp32 projections of latents would lose what the reference keeps
            torch.set_float32_matmul_precision("highest")

        self._tokenizer = PromptTokenizer(opened.tokenizer_path / "tokenizer.json")
        self._schedule = Schedule.from_contract(opened.contract)
        self.precision = str(precision)
        self.dtype = precision.transformer
        """Of the transformer's rows."""
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
        if self._device.type == "cuda":
            with watch.stage("warming up"):
                self._warm_up()

    @torch.inference_mode()
    def render(self, request: RenderRequest, reporter: Reporter) -> "Handover | None":
        """Render one clip.

        Returns:
            On CUDA, the last unit's frames or the sound on their way to the host; they alone are then still to be
            handed over.

        Raises:
            Cancelled: as the reporter raised it at a boundary.
            InvalidRequest: the prompt, the size or the length cannot be rendered; on all ranks.
            NotFinite: latents, frames or samples are not finite; on all ranks.
        """
        shape = ClipShape.plan(request, self._config, self._video_vae.config.spatial_compression)
        token_ids = self._tokenizer.encode(request.prompt, max_tokens=MAX_PROMPT_TOKENS)

        self._enter(reporter, "encoding", request)
        text_rows = self._transformer.refine(self._encode(token_ids))
        reporter.checkpoint()

        audio_rows, video_rows = self._denoise(request, text_rows, shape, reporter)

        self._enter(reporter, "decoding", request)
        latents_CTHW = unpatchify(
            video_rows,
            self._config.patch_size,
            latent_frames=shape.clip.num_latent_frames,
            latent_height=shape.latent_height,
            latent_width=shape.latent_width,
        )
        last = self._decode(
            latents_CTHW,
            audio_rows,
            shape.clip,
            reporter,
            tile_batch=1 if request.low_memory else None,
        )
        rest = Handover(last, reporter)
        if self._device.type == "cuda":
            return rest
        rest.hand_over()
        return None

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run every part once on next to nothing: kernels are compiled and libraries loaded before the first clip."""
        video, config = self._video_vae.config, self._config
        text_rows = self._transformer.refine(self._encode([0]))
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
        self._video_vae.decode_unit(torch.zeros(video.latent_channels, self._video_vae.units.unit_latents, 2, 2))
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

    def _encode(self, token_ids: list[int]) -> Tensor:
        """(L, text_dim) states of the text encoder, on every rank."""
        return self._text_encoder.encode(torch.tensor(token_ids))

    def _denoise(
        self, request: RenderRequest, text_rows: Tensor, shape: "ClipShape", reporter: Reporter
    ) -> tuple[Tensor, Tensor]:
        video_noise, audio_noise = initial_noise(
            request.seed,
            latent_channels=self._config.in_channels,
            latent_frames=shape.clip.num_latent_frames,
            latent_height=shape.latent_height,
            latent_width=shape.latent_width,
            audio_latent_channels=self._config.audio_in_channels,
            audio_latents=shape.clip.num_audio_latents,
        )
        sequence = PackedSequence.build(
            self._config,
            text_length=len(text_rows),
            audio_latents=shape.clip.num_audio_latents,
            latent_frames=shape.clip.num_latent_frames,
            latent_height=shape.latent_height,
            latent_width=shape.latent_width,
            device=self._device,
        )

        def after_step(completed_steps: int) -> None:
            reporter.progress("denoising", completed_steps)
            reporter.checkpoint()

        audio_rows = audio_noise.to(self._device)
        video_rows = patchify(video_noise.to(self._device), self._config.patch_size)
        self._enter(reporter, "denoising", request)
        audio_rows, video_rows = denoise(
            self._transformer, self._schedule, text_rows, audio_rows, video_rows, sequence, after_step
        )
        if not (audio_rows.isfinite().all() and video_rows.isfinite().all()):
            raise NotFinite("the denoised latents are not finite", stage="denoising")
        return audio_rows, video_rows

    def _decode(
        self, latents_CTHW: Tensor, audio_rows: Tensor, clip: Clip, reporter: Reporter, *, tile_batch: int | None
    ) -> "_Outbound":
        """Decode this rank's units; what the last round decoded is returned and not handed over.

        A unit's first frames fade in over the tail of the unit before, which the rank before decodes in the same round;
        rank 0 gets it one round earlier from the last rank. The last rank decodes the sound beside the others' last
        units where it has none itself in that round, else before the first: the media process has it before the last
        frames. What is decoded in one round is handed over while the device works on the next.
        """
        units = self._video_vae.units
        num_units = units.num_units(latents_CTHW.shape[1])
        height, width = (extent * self._video_vae.config.spatial_compression for extent in latents_CTHW.shape[2:])
        no_tail = torch.zeros(3, units.tail_frames, height, width, device=self._device)
        carried_tail = no_tail
        is_even = num_units % self._parallel.size == 0
        outbound = self._decode_audio(audio_rows, clip, "samples") if is_even else _Outbound("samples", None, None)
        for first in range(0, num_units, self._parallel.size):
            unit = first + self._parallel.rank
            what = "frames" if first + self._parallel.size <= num_units else "frames or samples"
            body, tail, is_finite, sound = None, no_tail, None, None
            if unit >= num_units:
                sound = self._decode_audio(audio_rows, clip, what)
            else:
                frames = self._video_vae.decode_unit(latents_CTHW[:, units.latent_frames(unit)], tile_batch=tile_batch)
                body, tail = units.split(frames)
                is_finite = frames.isfinite().all()
            passed_tail = self._parallel.pass_on(tail)
            if body is not None:
                if unit > 0:
                    body = cross_fade(carried_tail if self._is_first else passed_tail, body)
                if unit == num_units - 1:
                    body = torch.cat([body, tail], dim=1)
                body = to_uint8(body)
            carried_tail = passed_tail
            decoded, outbound = outbound, sound or _Outbound(what, body, is_finite, unit)
            self._hand_over(decoded, reporter)
            reporter.checkpoint()
        return outbound

    def _decode_audio(self, audio_rows: Tensor, clip: Clip, what: str) -> "_Outbound":
        """The soundtrack on the last rank, nothing on others."""
        if self._audio_vae is None:
            return _Outbound(what, None, None)
        samples = self._audio_vae.decode(audio_latents(audio_rows))
        # the decoder makes whole latents' worth of samples; the soundtrack lasts as long as the picture
        samples = F.pad(samples, (0, clip.num_audio_samples - samples.shape[1]))
        return _Outbound(what, samples, samples.isfinite().all())

    def _hand_over(self, outbound: "_Outbound", reporter: Reporter) -> None:
        """
        Raises:
            NotFinite: what some rank decoded in that round is not finite; on all ranks.
        """
        outbound.wait()
        if self._parallel.any(not outbound.is_finite):
            raise NotFinite(f"decoded {outbound.what} are not finite", stage="decoding")
        outbound.hand_to(reporter)


class _Outbound:
    """A result of this rank, or none, on its way to the host; `values` and `is_finite` count after `wait`.

    Args:
        what: all ranks decode in this round, for people.
        unit: None for the sound.
    """

    def __init__(self, what: str, values: Tensor | None, is_finite: Tensor | None, unit: int | None = None) -> None:
        self.what = what
        self.unit = unit
        self.values = None if values is None else _to_host(values)
        self._flag = None if is_finite is None else _to_host(is_finite)
        self._copied = None
        if values is not None and values.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_finite(self) -> bool:
        return self._flag is None or bool(self._flag)

    @property
    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def hand_to(self, reporter: Reporter) -> None:
        if self.values is None:
            return
        if self.unit is None:
            reporter.audio(self.values.numpy())
        else:
            reporter.frames(self.unit, self.values.numpy())


class Handover:
    """What one rank decoded last; implements `pipeline.base.Remainder`."""

    def __init__(self, outbound: _Outbound, reporter: Reporter) -> None:
        self._outbound = outbound
        self._reporter = reporter

    @property
    def is_done(self) -> bool:
        return self._outbound.is_here

    def hand_over(self) -> None:
        """
        Raises:
            NotFinite: it is not finite; on this rank alone, which waits for no other any more.
        """
        self._outbound.wait()
        if not self._outbound.is_finite:
            raise NotFinite(f"decoded {self._outbound.what} are not finite", stage="decoding")
        self._outbound.hand_to(self._reporter)


def _opened(checkpoint: Path | Checkpoint, options: PipelineOptions, device: str) -> Checkpoint:
    """
    Raises:
        CheckpointError: the directory cannot be served.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if options.synthetic_seed is None:
        return open_checkpoint(checkpoint)
    return with_synthetic_weights(checkpoint, load_contract(checkpoint), seed=options.synthetic_seed, device=device)


def _to_host(x: Tensor) -> Tensor:
    """`x` on the CPU; from CUDA it is there when what the stream holds now is done."""
    if not x.is_cuda:
        return x
    # pageable memory would make the host wait, and copy at a tenth of the speed
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ClipShape:
    """A clip and its latents."""

    clip: Clip
    latent_height: int
    latent_width: int

    @classmethod
    def plan(cls, request: RenderRequest, config: TransformerConfig, compression: int) -> Self:
        """The latents of a request.

        Raises:
            InvalidRequest: the clip's length or its size cannot be rendered.
        """
        try:
            clip = Clip(request.num_frames)
        except ValueError as error:
            raise InvalidRequest(str(error), param="seconds") from error
        for name, pixels, patch in (
            ("height", request.height, config.patch_size[1]),
            ("width", request.width, config.patch_size[2]),
        ):
            if pixels < 1 or pixels % (compression * patch):
                raise InvalidRequest(
                    f"{name}={pixels} is not a positive multiple of {compression * patch}", param="size"
                )
        return cls(clip, request.height // compression, request.width // compression)
