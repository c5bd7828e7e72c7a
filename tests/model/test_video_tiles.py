"""Tile positions and stitching, without a model."""

from itertools import pairwise

import pytest
import torch
from rushes_worker.model.video_tiles import MIN_OVERLAP_PIXELS, TILE_PIXELS, TileGrid, stitch, tile_starts
from torch import Tensor

STARTS = {
    768: (0, 160, 336, 512),
    1344: (0, 176, 352, 528, 704, 896, 1088),
    672: (0, 128, 272, 416),
    1536: (0, 176, 352, 528, 704, 896, 1088, 1280),
    1024: (0, 192, 384, 576, 768),
    480: (0, 112, 224),
    832: (0, 192, 384, 576),
    640: (0, 192, 384),
    416: (0, 160),
    992: (0, 176, 352, 544, 736),
    256: (0,),
    32: (0,),
}


@pytest.mark.parametrize(("length", "starts"), STARTS.items())
def test_tiles_start_where_the_model_was_trained_to_see_them(length: int, starts: tuple[int, ...]) -> None:
    assert tile_starts(length) == starts


@pytest.mark.parametrize("step", [2, 4, 16])
def test_tiles_cover_every_axis_exactly(step: int) -> None:
    for length in range(TILE_PIXELS + step, 2100, step):
        starts = tile_starts(length, step)
        overlaps = [a + TILE_PIXELS - b for a, b in pairwise(starts)]
        assert starts[-1] + TILE_PIXELS == length
        assert min(overlaps) >= MIN_OVERLAP_PIXELS
        assert all(start % step == 0 for start in starts)
        one_tile_less = TILE_PIXELS * (len(starts) - 1) - MIN_OVERLAP_PIXELS * (len(starts) - 2)
        assert one_tile_less < length


@pytest.mark.parametrize("length", [0, -16, 264])
def test_a_side_that_is_no_multiple_of_the_latent_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        tile_starts(length)


def canvas_tiles(canvas: Tensor, grid: TileGrid) -> list[Tensor]:
    h, w = grid.tile_height, grid.tile_width
    return [canvas[..., top : top + h, left : left + w] for top in grid.tops for left in grid.lefts]


@pytest.mark.parametrize(("height", "width"), [(32, 48), (480, 480), (416, 832), (240, 640)])
def test_tiles_that_agree_stitch_to_the_canvas(height: int, width: int) -> None:
    canvas = torch.randn(3, 2, height, width)
    grid = TileGrid(height, width, 16)
    torch.testing.assert_close(stitch(canvas_tiles(canvas, grid), grid), canvas)


def test_cut_takes_the_latents_under_each_tile() -> None:
    grid = TileGrid(416, 480, 16)
    latents = torch.randn(5, 2, 26, 30)
    tiles = grid.cut(latents)
    assert tiles.shape == (6, 5, 2, 16, 16)
    torch.testing.assert_close(tiles[4], latents[..., 10:26, 7:23], rtol=0, atol=0)


def test_a_tile_fades_in_over_its_raw_neighbours() -> None:
    grid = TileGrid(416, 416, 16)  # 2 x 2 tiles that overlap by 96
    one, two, three, four = (torch.full((1, 256, 256), value) for value in (1.0, 2.0, 4.0, 8.0))
    out = stitch([one, two, three, four], grid)[0]
    ramp = torch.arange(96) / 96
    torch.testing.assert_close(out[0, 160:256], 1 + ramp)
    torch.testing.assert_close(out[160:256, 0], 1 + 3 * ramp)
    # in the corner the tile above is faded first and the left neighbour, itself not faded, over the result
    above = 2 + 6 * ramp[:, None]
    torch.testing.assert_close(out[160:256, 160:256], 4 + (above - 4) * ramp)
    assert out[160, 300] == 2.0
    assert out[300, 300] == 8.0


def test_an_overlap_wider_than_what_a_tile_keeps_ends_early() -> None:
    grid = TileGrid(16, 480, 16)  # tiles keep 112 columns and overlap by 144
    tiles = [torch.full((1, 16, 256), value) for value in (0.0, 1.0, 0.0)]
    row = stitch(tiles, grid)[0, 0]
    torch.testing.assert_close(row[112:224], torch.arange(112) / 144)
    torch.testing.assert_close(row[224:368], 1 - torch.arange(144) / 144)
    assert row[368:].eq(0).all()
