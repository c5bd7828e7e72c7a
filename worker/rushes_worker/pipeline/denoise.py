"""The denoise loop: one forward per step feeds the solver steps of both modalities."""

from collections.abc import Callable

from torch import Tensor

from rushes_worker.model.sequence import PackedSequence
from rushes_worker.model.transformer import Transformer
from rushes_worker.pipeline.schedule import Schedule


def denoise(
    transformer: Transformer,
    schedule: Schedule,
    text_rows: Tensor,
    audio_rows: Tensor,
    video_rows: Tensor,
    sequence: PackedSequence,
    after_step: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Turn noise into latents. Every step starts from the same text rows; latents stay fp32 between steps.

    Args:
        text_rows: (L, hidden) from `Transformer.refine`.
        audio_rows: (2A, audio channels) fp32 noise.
        video_rows: (T*h*w, patch features) fp32 noise.
        after_step: called with the number of finished steps; what it raises ends the loop.

    Returns:
        Audio rows and video rows, fp32.
    """
    for step in range(schedule.num_steps):
        audio_velocity, video_velocity = transformer.forward(step, text_rows, audio_rows, video_rows, sequence)
        audio_rows = schedule.audio.step(step, audio_rows, audio_velocity)
        video_rows = schedule.video.step(step, video_rows, video_velocity)
        after_step(step + 1)
    return audio_rows, video_rows
