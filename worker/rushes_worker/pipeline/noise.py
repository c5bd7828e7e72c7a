"""The initial sample: unit noise of one CPU generator, so that a seed means the same clip on every device.

Shapes: C video latent channels, T latent frames of Hl x Wl latents, A audio latents per channel, Ca audio channels.
"""

import torch
from torch import Tensor

from rushes_worker.model.sequence import AUDIO_CHANNELS


def initial_noise(
    seed: int,
    *,
    latent_channels: int,
    latent_frames: int,
    latent_height: int,
    latent_width: int,
    audio_latent_channels: int,
    audio_latents: int,
) -> tuple[Tensor, Tensor]:
    """Draw the video noise, then the audio noise. Neither is scaled by the first sigma (FastH3 reference).

    Returns:
        (C, T, Hl, Wl) and (2A, Ca), both fp32 on the CPU; the audio noise is in row layout.
    """
    video = torch.empty(latent_channels, latent_frames, latent_height, latent_width)
    audio = torch.empty(AUDIO_CHANNELS * audio_latents, audio_latent_channels)
    draw_noise_(seed, video, audio)
    return video, audio


def draw_noise_(seed: int, video_CTHW: Tensor, audio_rows: Tensor) -> None:
    """`initial_noise` into contiguous tensors of the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for noise in (video_CTHW, audio_rows):
        noise.normal_(generator=generator)
