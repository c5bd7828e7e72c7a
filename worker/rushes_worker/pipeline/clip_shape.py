"""What the size and the length of a request make of the latents."""

import math
from dataclasses import dataclass
from typing import Self

from rushes_core.canvas import CANVASES, Canvas
from rushes_core.clip import ADMISSIBLE_FRAMES, Clip
from rushes_core.errors import InvalidRequest
from rushes_kernels.video_sparse_attention import VIDEO_BOX

from rushes_worker.checkpoint.configs import TransformerConfig
from rushes_worker.model.sequence import AUDIO_CHANNELS
from rushes_worker.pipeline.base import RenderRequest


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

    @classmethod
    def largest(cls, config: TransformerConfig, compression: int) -> Self:
        """That of the longest clip on the canvas, of those that the API admits, which needs the most memory."""

        def need(canvas: Canvas) -> tuple[int, int]:
            rows, columns = (
                pixels // (compression * patch)
                for pixels, patch in zip((canvas.height, canvas.width), config.patch_size[1:], strict=True)
            )
            return rows * columns, math.ceil(rows / VIDEO_BOX[1]) * math.ceil(columns / VIDEO_BOX[2])

        canvas = max(CANVASES, key=need)
        return cls(Clip(ADMISSIBLE_FRAMES[-1]), canvas.height // compression, canvas.width // compression)

    @property
    def num_video_latents(self) -> int:
        """Of one channel."""
        return self.clip.num_latent_frames * self.latent_height * self.latent_width

    @property
    def num_audio_rows(self) -> int:
        return AUDIO_CHANNELS * self.clip.num_audio_latents

    def num_other_rows(self, config: TransformerConfig) -> int:
        """Rows of the packed sequence beside those of the text."""
        return self.num_audio_rows + self.num_video_latents // (config.patch_size[1] * config.patch_size[2])
