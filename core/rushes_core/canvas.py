"""The twelve canvases that FastH3 is served on, and the sizes that other clients call them by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Canvas:
    """One served frame size, in pixels."""

    aspect_ratio: str
    short_edge: int
    width: int
    height: int

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"


CANVASES: tuple[Canvas, ...] = (
    Canvas("21:9", 768, 1536, 672),
    Canvas("16:9", 768, 1344, 768),
    Canvas("4:3", 768, 1024, 768),
    Canvas("1:1", 768, 768, 768),
    Canvas("3:4", 768, 768, 1024),
    Canvas("9:16", 768, 768, 1344),
    Canvas("21:9", 480, 992, 416),
    Canvas("16:9", 480, 832, 480),
    Canvas("4:3", 480, 640, 480),
    Canvas("1:1", 480, 480, 480),
    Canvas("3:4", 480, 480, 640),
    Canvas("9:16", 480, 480, 832),
)
"""Bucket sizes of the distilled student; `short_edge` is the bucket's name, not always the shorter side."""

DEFAULT_CANVAS = CANVASES[1]

BY_SIZE: dict[str, Canvas] = {canvas.size: canvas for canvas in CANVASES}

SIZE_ALIASES: dict[str, str] = {
    "1280x720": "1344x768",
    "1792x1024": "1344x768",
    "720x1280": "768x1344",
    "1024x1792": "768x1344",
}
"""OpenAI's four sizes: none is a FastH3 canvas, so each stands for the canvas of its aspect ratio."""


def canvas_for_size(size: str) -> Canvas | None:
    """The canvas that `size` (`WxH`, or an alias) names, or None."""
    return BY_SIZE.get(SIZE_ALIASES.get(size, size))
