"""The schedule of the distilled student, whatever the sizes of its weights (FastVideo-FastH3-8-Step-V2)."""

DENOISING_STEPS = (999, 874, 749, 624, 500, 375, 250, 125)
"""Timesteps of its forwards."""
VIDEO_SHIFT, AUDIO_SHIFT = 10.0, 3.0
