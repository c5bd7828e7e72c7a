"""Latents to frames and sound on one rank, unit by unit: one graph for a unit of each canvas, one for a soundtrack of
each length.

Shapes: C latent channels, T' latent frames of a unit of Y x X latents, H x W pixels; f frames of a unit, its padding
included, b of its body, t of its tail; 2A audio rows, N samples.
"""

from functools import partial
from typing import NamedTuple

import torch
from rushes_core.errors import NotFinite
from torch import Tensor

from rushes_worker.model.audio_vae import AudioVaeDecoder
from rushes_worker.model.sequence import audio_latents
from rushes_worker.model.video_tiles import fade_in_
from rushes_worker.model.video_units import to_uint8, to_yuv420
from rushes_worker.model.video_vae import VideoVaeDecoder
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.base import Reporter
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.graphs import Graphs, Work
from rushes_worker.pipeline.outbound import HostRing, Outbound
from rushes_worker.pipeline.slots import Latents
from rushes_worker.pipeline.workspace import Carving, Workspace
from rushes_worker.pixels import PixelFormat

CONVERSIONS = {PixelFormat.RGB24: to_uint8, PixelFormat.YUV420P: to_yuv420}
"""Of decoded frames to what is handed over."""


class ClipDecoder:
    """
    Args:
        audio_vae: of the rank that decodes the sound; None on others.
        largest: the shape that room is made for.
        pixels: what frames are handed over as.
    """

    def __init__(
        self,
        video_vae: VideoVaeDecoder,
        audio_vae: AudioVaeDecoder | None,
        parallel: SequenceParallel,
        graphs: Graphs,
        workspace: Workspace,
        *,
        largest: ClipShape,
        pixels: PixelFormat,
    ) -> None:
        self._pixels = pixels
        self._video_vae = video_vae
        self._parallel = parallel
        self._graphs = graphs
        self._workspace = workspace
        self._canvases: dict[tuple[int, int], _Canvas] = {}
        self._sound = None if audio_vae is None else _Sound(audio_vae, largest)
        canvas = _carve(Carving(), video_vae, largest.latent_height, largest.latent_width, pixels)
        self._frames_on_host = HostRing(canvas.pixels.numel(), torch.uint8, video_vae.device)
        num_samples = 2 * largest.clip.num_audio_samples if self._sound else 0
        self._samples_on_host = HostRing(num_samples, torch.float32, video_vae.device)

    @staticmethod
    def workspace_bytes(video_vae: VideoVaeDecoder, largest: ClipShape, pixels: PixelFormat) -> int:
        """What a unit takes of the workspace."""
        carving = Carving()
        _carve(carving, video_vae, largest.latent_height, largest.latent_width, pixels)
        return carving.num_bytes

    def decode(self, bank: Latents, shape: ClipShape, reporter: Reporter, *, tile_batch: int | None) -> Outbound:
        """Decode this rank's units. A unit's first frames fade in over the tail of the unit before, which the rank
        before decodes in the same round; rank 0 gets it one round earlier from the last rank.

        The last rank decodes the sound beside the others' last units where it has none itself in that round, else
        before the first: the media process has it before the last frames. What is decoded in one round is handed over
        while the device works on the next.

        Args:
            tile_batch: as `VideoVaeDecoder.decode_unit` takes it.

        Returns:
            What the last round decoded, which is not handed over.

        Raises:
            NotFinite: what some rank decoded is not finite; on all ranks.
        """
        units = self._video_vae.units
        latents_CTYX = bank.video_CTHW(shape)
        num_units = units.num_units(latents_CTYX.shape[1])
        canvas = self._canvas(shape.latent_height, shape.latent_width)
        is_even = num_units % self._parallel.size == 0
        outbound = self._decode_sound(bank, shape, "samples") if is_even else Outbound("samples")
        for first in range(0, num_units, self._parallel.size):
            unit = first + self._parallel.rank
            what = "frames" if first + self._parallel.size <= num_units else "frames or samples"
            if unit >= num_units:
                current = self._decode_sound(bank, shape, what)
                self._pass_tail_on(canvas)
            else:
                canvas.latents_CTYX.copy_(latents_CTYX[:, units.latent_frames(unit)])
                self._decode_unit(canvas, is_first=unit == 0, tile_batch=tile_batch)
                num_frames = units.clip_length + (units.tail_frames if unit == num_units - 1 else 0)
                current = Outbound(
                    what,
                    self._frames_on_host,
                    canvas.pixels[:num_frames],
                    canvas.is_finite,
                    unit=unit,
                    pixels=self._pixels,
                )
            decoded, outbound = outbound, current
            self._hand_over(decoded, reporter)
            reporter.checkpoint()
        return outbound

    def prepare(self, shape: ClipShape) -> None:
        """Capture the graphs of a shape."""
        canvas = self._canvas(shape.latent_height, shape.latent_width)
        canvas.latents_CTYX.zero_()
        canvas.tail_CtHW.zero_()
        for name, work in self._works(canvas, None):
            self._graphs.prepare((name, canvas.size), work, work)
        if self._sound is not None:
            self._sound.load(torch.zeros_like(self._sound.rows(shape)))
            self._graphs.prepare(
                ("sound", shape.clip.num_frames), partial(self._sound.decode, shape), partial(self._sound.decode, shape)
            )

    def _decode_unit(self, canvas: "_Canvas", *, is_first: bool, tile_batch: int | None) -> None:
        """Latents of the canvas to pixels, and tails from rank to rank."""
        (name, decode), (finish_name, finish) = self._works(canvas, tile_batch)
        self._graphs.run((name, canvas.size), decode)
        if is_first:
            # a unit that fades in over its own frames stays as it is
            body, _ = self._video_vae.units.split(canvas.frames_CfHW)
            canvas.tail_CtHW.copy_(body[:, : canvas.tail_CtHW.shape[1]])
        if self._parallel.rank > 0:
            self._pass_tail_on(canvas)
        self._graphs.run((finish_name, canvas.size), finish)
        if self._parallel.rank == 0:
            self._pass_tail_on(canvas)

    def _works(self, canvas: "_Canvas", tile_batch: int | None) -> tuple[tuple[str, Work], tuple[str, Work]]:
        def decode() -> None:
            self._video_vae.decode_unit(canvas.latents_CTYX, tile_batch=tile_batch, canvas=canvas.frames_CfHW)
            torch.all(canvas.frames_CfHW.isfinite().view(1, -1), dim=1, out=canvas.is_finite)

        def finish() -> None:
            body, tail = self._video_vae.units.split(canvas.frames_CfHW)
            fade_in_(body, canvas.tail_CtHW, dim=-3)
            convert = CONVERSIONS[self._pixels]
            convert(body, canvas.pixels[: body.shape[1]])
            convert(tail, canvas.pixels[body.shape[1] :])

        return ("unit", decode), ("pixels", finish)

    def _pass_tail_on(self, canvas: "_Canvas") -> None:
        """This rank's tail to the next rank, and that of the one before over which the next unit here fades in."""
        _, tail = self._video_vae.units.split(canvas.frames_CfHW)

        def pass_on() -> None:
            canvas.tail_CtHW.copy_(self._parallel.pass_on(tail))

        self._graphs.run(None, pass_on)

    def _decode_sound(self, bank: Latents, shape: ClipShape, what: str) -> Outbound:
        """The soundtrack on the last rank, nothing on others."""
        sound = self._sound
        if sound is None:
            return Outbound(what)
        sound.load(bank.audio_rows(shape))
        self._graphs.run(("sound", shape.clip.num_frames), partial(sound.decode, shape))
        return Outbound(what, self._samples_on_host, sound.samples(shape), sound.is_finite)

    def _hand_over(self, outbound: "Outbound", reporter: Reporter) -> None:
        """
        Raises:
            NotFinite: what some rank decoded in that round is not finite; on all ranks.
        """
        outbound.wait()
        if self._parallel.any(not outbound.is_finite):
            raise NotFinite(f"decoded {outbound.what} are not finite", stage="decoding")
        outbound.hand_to(reporter)

    def _canvas(self, height: int, width: int) -> "_Canvas":
        """Of Y x X latents; its tensors lie over those of all others."""
        if (height, width) not in self._canvases:
            need = Carving()
            _carve(need, self._video_vae, height, width, self._pixels)
            carving = self._workspace.carve(need.num_bytes)
            self._canvases[height, width] = _carve(carving, self._video_vae, height, width, self._pixels)
        return self._canvases[height, width]


class _Canvas(NamedTuple):
    """What decoding a unit reads and writes, at fixed addresses."""

    latents_CTYX: Tensor
    frames_CfHW: Tensor
    """(3, f, H, W) fp32."""
    tail_CtHW: Tensor
    """Over which the body fades in."""
    pixels: Tensor
    """(b + t, ...) uint8."""
    is_finite: Tensor
    """(1,) bool: whether the frames are."""

    @property
    def size(self) -> tuple[int, int]:
        """H and W."""
        return self.frames_CfHW.shape[2], self.frames_CfHW.shape[3]


def _carve(
    carving: Carving, video_vae: VideoVaeDecoder, latent_height: int, latent_width: int, pixels: PixelFormat
) -> _Canvas:
    units = video_vae.units
    height, width = (extent * video_vae.config.spatial_compression for extent in (latent_height, latent_width))
    num_frames = units.clip_length + units.tail_frames
    return _Canvas(
        carving.take(
            video_vae.config.latent_channels, units.unit_latents, latent_height, latent_width, dtype=torch.float32
        ),
        carving.take(3, units.unit_frames, height, width, dtype=torch.float32),
        carving.take(3, units.tail_frames, height, width, dtype=torch.float32),
        carving.take(num_frames, *pixels.shape(height, width), dtype=torch.uint8),
        carving.take(1, dtype=torch.bool),
    )


class _Sound:
    """What decoding a soundtrack reads and writes, at fixed addresses; room for the longest."""

    def __init__(self, audio_vae: AudioVaeDecoder, largest: ClipShape) -> None:
        self._audio_vae = audio_vae
        channels = audio_vae.config.latent_channels
        self._rows = torch.empty(largest.num_audio_rows, channels, device=audio_vae.device)
        self._samples = torch.empty(2 * largest.clip.num_audio_samples, device=audio_vae.device)
        self.is_finite = torch.empty(1, dtype=torch.bool, device=audio_vae.device)

    def rows(self, shape: ClipShape) -> Tensor:
        """(2A, Ca) fp32."""
        return self._rows[: shape.num_audio_rows]

    def samples(self, shape: ClipShape) -> Tensor:
        """(2, N) fp32."""
        return self._samples[: 2 * shape.clip.num_audio_samples].view(2, -1)

    def load(self, rows: Tensor) -> None:
        self._rows[: len(rows)].copy_(rows)

    def decode(self, shape: ClipShape) -> None:
        decoded = self._audio_vae.decode(audio_latents(self.rows(shape)))
        samples = self.samples(shape)
        # the decoder makes whole latents' worth of samples; the soundtrack lasts as long as the picture
        num_decoded = min(decoded.shape[1], samples.shape[1])
        samples[:, :num_decoded].copy_(decoded[:, :num_decoded])
        samples[:, num_decoded:].zero_()
        torch.all(samples.isfinite().view(1, -1), dim=1, out=self.is_finite)
