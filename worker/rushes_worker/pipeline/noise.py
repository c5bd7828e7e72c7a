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
    generator = torch.Generator("cpu").manual_seed(seed)
    video = torch.randn(1, latent_channels, latent_frames, latent_height, latent_width, generator=generator)
    audio = torch.randn(AUDIO_CHANNELS * audio_latents, audio_latent_channels, generator=generator)
    return video[0], audio
