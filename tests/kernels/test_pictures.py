import torch
from rushes_kernels.pictures import stitch_patches, to_pixels
from torch import Tensor

TOPS, LEFTS, TILE, STEP = (0, 16), (0, 8, 16), (24, 16), 8
HEIGHT, WIDTH = 40, 32


def value(tile: Tensor, frame: int, y: int, x: int) -> float:
    """Of the only colour of a tile (N, P), whose patches hold two frames."""
    token = (frame // 2 * (TILE[0] // STEP) + y // STEP) * (TILE[1] // STEP) + x // STEP
    return float(tile[token].view(2, STEP, STEP)[frame % 2, y % STEP, x % STEP])


def expected(patches: Tensor, frame: int, y: int, x: int) -> float:
    i = max(i for i, top in enumerate(TOPS) if top <= y)
    j = max(j for j, left in enumerate(LEFTS) if left <= x)

    def of(i: int, j: int) -> float:
        return value(patches[i * len(LEFTS) + j], frame, y - TOPS[i], x - LEFTS[j])

    pixel = of(i, j)
    if i and y < TOPS[i - 1] + TILE[0]:
        part = (y - TOPS[i]) / (TOPS[i - 1] + TILE[0] - TOPS[i])
        pixel = of(i - 1, j) * (1 - part) + pixel * part
    if j and x < LEFTS[j - 1] + TILE[1]:
        part = (x - LEFTS[j]) / (LEFTS[j - 1] + TILE[1] - LEFTS[j])
        pixel = of(i, j - 1) * (1 - part) + pixel * part
    return pixel


def test_every_pixel_is_its_tile_faded_in_over_those_above_and_to_the_left() -> None:
    generator = torch.Generator().manual_seed(0)
    # two latent frames of 3 x 2 patches, and a token that is no patch
    patches = torch.randn(6, 13, 2 * STEP**2, generator=generator)
    out = torch.full((1, 4, HEIGHT, WIDTH), torch.nan)
    assert stitch_patches(patches, TOPS, LEFTS, TILE, STEP, out) is out
    wanted = torch.tensor(
        [[[expected(patches, frame, y, x) for x in range(WIDTH)] for y in range(HEIGHT)] for frame in range(4)]
    )
    torch.testing.assert_close(out[0], wanted, atol=1e-6, rtol=1e-6)


def test_pixels_are_clamped_and_rounded_by_their_colour() -> None:
    frames = torch.tensor([-3.0, 0.0, 0.25, 9.0]).expand(3, 1, 1, 4)
    pixels = to_pixels(frames, (1.0, 0.5, 0.0), (0.0, 0.5, 1.0), torch.empty(1, 1, 4, 3, dtype=torch.uint8))
    assert pixels[0, 0].tolist() == [[0, 0, 255], [0, 128, 255], [64, 159, 255], [255, 255, 255]]
