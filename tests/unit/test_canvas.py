"""The twelve canvases and the names that clients have for them."""

import pytest
from rushes_core.canvas import CANVASES, DEFAULT_CANVAS, SIZE_ALIASES, Canvas, canvas_for_size


def test_twelve_distinct_canvases_are_served() -> None:
    assert len({canvas.size for canvas in CANVASES}) == 12
    assert DEFAULT_CANVAS.size == "1344x768"


@pytest.mark.parametrize("canvas", CANVASES, ids=lambda canvas: canvas.size)
def test_every_canvas_is_made_of_whole_patches(canvas: Canvas) -> None:
    assert canvas.width % 32 == canvas.height % 32 == 0


@pytest.mark.parametrize("canvas", CANVASES, ids=lambda canvas: canvas.size)
def test_every_canvas_is_found_by_its_size(canvas: Canvas) -> None:
    assert canvas_for_size(canvas.size) is canvas


@pytest.mark.parametrize(
    ("alias", "size"),
    [
        ("1280x720", "1344x768"),
        ("1792x1024", "1344x768"),
        ("720x1280", "768x1344"),
        ("1024x1792", "768x1344"),
    ],
)
def test_each_size_of_openai_stands_for_the_canvas_of_its_orientation(alias: str, size: str) -> None:
    canvas = canvas_for_size(alias)
    assert canvas is not None
    assert canvas.size == size
    assert set(SIZE_ALIASES) == {"1280x720", "1792x1024", "720x1280", "1024x1792"}


@pytest.mark.parametrize("size", ["769x1345", "1344X768", "1344x768 ", "", "768", "１３４４x768", "1344x768x1"])
def test_other_sizes_are_not_served(size: str) -> None:
    assert canvas_for_size(size) is None
