"""The initial sample: unit noise of one CPU generator, so that a seed means the same clip on every device.

Shapes: C video latent channels, T latent frames of Hl x Wl latents, A audio latents per channel, Ca audio channels.
"""

import torch
from torch import Tensor


def draw_noise_(seed: int, video_CTHW: Tensor, audio_rows: Tensor) -> None:
    """Draw the video noise, then the audio noise. Neither is scaled by the first sigma (FastH3 reference).

    Args:
        video_CTHW: (C, T, Hl, Wl) fp32 on the CPU, contiguous.
        audio_rows: (2A, Ca) fp32 on the CPU, contiguous: in row layout.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for noise in (video_CTHW, audio_rows):
        noise.normal_(generator=generator)
