"""Where requests and their latents lie on the device: allocated once, filled anew for every clip.

Two requests may be under way: the one that is rendered, and the one whose text is encoded ahead. Each has a slot. What
is denoised is left in one of two banks, from which it is decoded, so that the next clip's latents never write over it.

Shapes: L text rows, C hidden channels; C' video latent channels, T latent frames of Hl x Wl latents; 2A audio rows, Ca
audio channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.pipeline.clip_shape import ClipShape
from rushes_worker.pipeline.noise import draw_noise_

NUM_SLOTS = 2
NUM_BANKS = 2


class Latents:
    """Room for the latents, or the noise, of one clip of any shape. A shape larger than the largest gets new room."""

    def __init__(self, config: TransformerConfig, largest: ClipShape, device: torch.device, *, pinned: bool = False):
        self._config = config
        self._video = torch.empty(0)
        self._audio = torch.empty(0)
        self._device = device
        self._pinned = pinned
        self._grow(largest)

    def video_CTHW(self, shape: ClipShape) -> Tensor:
        """(C', T, Hl, Wl) fp32, contiguous."""
        self._grow(shape)
        sizes = (shape.clip.num_latent_frames, shape.latent_height, shape.latent_width)
        return self._video[: self._num_video(shape)].view(self._config.in_channels, *sizes)

    def audio_rows(self, shape: ClipShape) -> Tensor:
        """(2A, Ca) fp32, contiguous."""
        self._grow(shape)
        return self._audio[: self._num_audio(shape)].view(shape.num_audio_rows, -1)

    def _num_video(self, shape: ClipShape) -> int:
        return self._config.in_channels * shape.num_video_latents

    def _num_audio(self, shape: ClipShape) -> int:
        return self._config.audio_in_channels * shape.num_audio_rows

    def _grow(self, shape: ClipShape) -> None:
        if self._num_video(shape) > len(self._video):
            self._video = torch.empty(self._num_video(shape), device=self._device, pin_memory=self._pinned)
        if self._num_audio(shape) > len(self._audio):
            self._audio = torch.empty(self._num_audio(shape), device=self._device, pin_memory=self._pinned)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a slot is held by."""

    job_id: str
    attempt: int

    @classmethod
    def of(cls, request: RenderRequest) -> "Attempt":
        return cls(request.job_id, request.attempt)


class RequestSlot:
    """Refined text and noise of one request."""

    def __init__(
        self,
        config: TransformerConfig,
        largest: ClipShape,
        *,
        text_capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.held_by: Attempt | None = None
        self.num_tokens = 0
        self.text_capacity = 0
        """Text rows, those past the tokens included."""
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        """`num_tokens` on the device."""
        self.noise = Latents(config, largest, device)
        self._text_rows = torch.empty(text_capacity, config.hidden_size, dtype=dtype, device=device)
        on_cuda = device.type == "cuda"
        self._drawn = Latents(config, largest, torch.device("cpu"), pinned=True) if on_cuda else self.noise
        self._length_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._sent = torch.cuda.Event() if on_cuda else None

    def hold(self, request: RenderRequest, shape: ClipShape, *, num_tokens: int, text_capacity: int) -> None:
        """Take the slot for `request` and draw its noise; the text is still to be written to `text_rows`."""
        self.held_by = Attempt.of(request)
        self.num_tokens = num_tokens
        self.text_capacity = text_capacity
        if text_capacity > len(self._text_rows):
            self._text_rows = self._text_rows.new_empty(text_capacity, self._text_rows.shape[1])
        if self._sent is not None:
            # what was drawn before may still be on its way
            self._sent.synchronize()
        draw_noise_(request.seed, self._drawn.video_CTHW(shape), self._drawn.audio_rows(shape))
        self._length_on_host[0] = num_tokens
        self.length.copy_(self._length_on_host, non_blocking=True)
        if self._sent is not None:
            self.noise.video_CTHW(shape).copy_(self._drawn.video_CTHW(shape), non_blocking=True)
            self.noise.audio_rows(shape).copy_(self._drawn.audio_rows(shape), non_blocking=True)
            self._sent.record()

    @property
    def text_rows(self) -> Tensor:
        """(text_capacity, C) in the transformer's compute dtype; rows from `num_tokens` on mean nothing."""
        return self._text_rows[: self.text_capacity]


class Slots:
    """The slots of a rank, and whose each is."""

    def __init__(self, slots: list[RequestSlot]) -> None:
        self._slots = slots

    def of(self, request: RenderRequest) -> RequestSlot | None:
        """The slot that holds `request`."""
        return next((slot for slot in self._slots if slot.held_by == Attempt.of(request)), None)

    def take(self) -> RequestSlot:
        """A free slot; where there is none, the one that was taken first: what was encoded ahead may never be asked
        for."""
        slot = next((slot for slot in self._slots if slot.held_by is None), self._slots[0])
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def free(self, slot: RequestSlot) -> None:
        slot.held_by = None
