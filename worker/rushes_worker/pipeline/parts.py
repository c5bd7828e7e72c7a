"""Single parts of a loaded pipeline, at the size of a clip: for checks and benchmarks."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rushes_worker.model.sequence import PackedSequence
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.fasth3 import FastH3Pipeline


class Parts:
    """One rank's transformer and decoder with random inputs of the shapes that a request has.

    Args:
        text_length: prompt tokens.
    """

    def __init__(self, pipeline: FastH3Pipeline, request: RenderRequest, text_length: int) -> None:
        self._transformer = pipeline._transformer
        self._video_vae = pipeline._video_vae
        self._graphs = pipeline._graphs
        config, device = pipeline._config, pipeline._device
        shape = ClipShape.plan(request, config, self._video_vae.config.spatial_compression)
        self._sequence = PackedSequence.build(
            config,
            text_length=text_length,
            audio_latents=shape.clip.num_audio_latents,
            latent_frames=shape.clip.num_latent_frames,
            latent_height=shape.latent_height,
            latent_width=shape.latent_width,
            device=device,
        )
        self._transformer.prepare(self._sequence)
        self._own_rows = pipeline._parallel.own_rows(self._sequence.num_rows)
        generator = torch.Generator(device).manual_seed(request.seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        text, audio, video = (segment.num_rows for segment in self._sequence.segments)
        self._rows_SC = randn(self._sequence.num_rows, config.hidden_size).to(pipeline.dtype)
        self._text_rows = self._rows_SC[:text]
        self._audio_rows = randn(audio, config.audio_in_channels)
        self._video_rows = randn(video, config.patch_features)
        frames = self._video_vae.units.unit_latents
        self._unit_CTYX = randn(self._video_vae.config.latent_channels, frames, shape.latent_height, shape.latent_width)

    def plainly(self) -> AbstractContextManager[None]:
        """Within, the memory that clips pass through is free; PyTorch's operations take over 17 GiB at 15 s."""
        return self._graphs.plainly()

    @torch.inference_mode()
    def block_update(self) -> Tensor:
        """(s, C) fp32: what the first block adds to this rank's of random rows in the fourth step."""
        rows_sC = self._rows_SC[self._own_rows]
        return self._transformer.run_block(0, 3, rows_sC.clone(), self._sequence).float() - rows_sC.float()

    @torch.inference_mode()
    def step(self) -> None:
        """One denoise step, in the memory that those of clips pass through."""
        self._graphs.run(None, self._forward)

    def _forward(self) -> None:
        self._transformer.forward(3, self._text_rows, self._audio_rows, self._video_rows, self._sequence)

    @torch.inference_mode()
    def unit(self) -> Tensor:
        """One decoded temporal unit."""
        return self._video_vae.decode_unit(self._unit_CTYX)
