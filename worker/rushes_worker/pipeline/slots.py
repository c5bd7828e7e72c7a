"""Where requests and their latents lie on the device: allocated once, filled anew for every clip.

Two requests may be under way: the one whose last frames are decoded, and the next, whose work is queued behind them.
Each has a slot. What is denoised is left in one of two banks, from which it is decoded, so that the next clip's latents
never write over it.

Shapes: L text rows, C hidden channels; C' video latent channels, T latent frames of Hl x Wl latents; 2A audio rows, Ca
audio channels.
"""

import torch
from torch import Tensor

from rushes_worker.checkpoint.configs import TransformerConfig
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
        self.text_capacity = 0
        """Text rows, those past the prompt's included."""
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        """Tokens of the prompt, on the device."""
        self.noise = Latents(config, largest, device)
        self._text_rows = torch.empty(text_capacity, config.hidden_size, dtype=dtype, device=device)
        on_cuda = device.type == "cuda"
        self._drawn = Latents(config, largest, torch.device("cpu"), pinned=True) if on_cuda else self.noise
        self._length_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._sent = torch.cuda.Event() if on_cuda else None

    def hold(self, num_tokens: int, *, text_capacity: int) -> None:
        """Take the slot for a prompt of so many tokens, whose text is still to be written to `text_rows`."""
        self.text_capacity = text_capacity
        if text_capacity > len(self._text_rows):
            self._text_rows = self._text_rows.new_empty(text_capacity, self._text_rows.shape[1])
        self._wait_for_host_memory()
        self._length_on_host[0] = num_tokens
        self.length.copy_(self._length_on_host, non_blocking=True)

    def draw_noise(self, seed: int, shape: ClipShape) -> None:
        """Fill `noise`."""
        self._wait_for_host_memory()
        drawn = self._drawn.video_CTHW(shape), self._drawn.audio_rows(shape)
        draw_noise_(seed, *drawn)
        if self._sent is not None:
            for there, here in zip((self.noise.video_CTHW(shape), self.noise.audio_rows(shape)), drawn, strict=True):
                there.copy_(here, non_blocking=True)
            self._sent.record()

    def _wait_for_host_memory(self) -> None:
        """What was written to it for the request before may still be on its way."""
        if self._sent is not None:
            self._sent.synchronize()

    @property
    def text_rows(self) -> Tensor:
        """(text_capacity, C) in the transformer's compute dtype; rows past the prompt's mean nothing."""
        return self._text_rows[: self.text_capacity]
