from pathlib import Path

import pytest
import torch
from rushes_kernels import providers
from rushes_kernels.pictures import stitch_patches, to_pixels, to_yuv420
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


PLAIN = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))


def yuv420(frames: Tensor) -> Tensor:
    _, f, height, width = frames.shape
    return to_yuv420(frames, *PLAIN, torch.full((f, height * 3 // 2, width), 77, dtype=torch.uint8))


def sample(frames: Tensor, plane: int, y: int, x: int) -> float:
    """Of U (0) or V (1) of the only frame, not rounded: by the formula, pixel by pixel."""
    height = frames.shape[2]
    total = 0.0
    for row, weight in zip(range(2 * y - 1, 2 * y + 3), (1, 3, 3, 1), strict=True):
        for column in (2 * x, 2 * x + 1):
            red, green, blue = frames[:, 0, min(max(row, 0), height - 1), column].double().tolist()
            luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
            total += weight / 16 * ((blue - luma) / 1.8556 if plane == 0 else (red - luma) / 1.5748)
    return 128 + 224 * total


def test_every_sample_of_420_is_what_the_formula_says() -> None:
    frames = torch.rand(3, 1, 6, 10, generator=torch.Generator().manual_seed(0))
    out = yuv420(frames)[0].double()
    luma = torch.einsum("c,chw->hw", torch.tensor([0.2126, 0.7152, 0.0722]).double(), frames[:, 0].double())
    # rounding is half a step
    torch.testing.assert_close(out[:6], 16 + 219 * luma, atol=0.5001, rtol=0)
    chroma = out[6:].reshape(2, 3, 5)
    wanted = torch.tensor(
        [[[sample(frames, plane, y, x) for x in range(5)] for y in range(3)] for plane in range(2)]
    ).double()
    torch.testing.assert_close(chroma, wanted, atol=0.5001, rtol=0)


@pytest.mark.parametrize(
    ("colour", "yuv"),
    [
        # ITU-R BT.709, 8 bits in limited range
        ((1.0, 1.0, 1.0), (235, 128, 128)),
        ((0.0, 0.0, 0.0), (16, 128, 128)),
        ((1.0, 0.0, 0.0), (63, 102, 240)),
        ((0.0, 1.0, 0.0), (173, 42, 26)),
        ((0.0, 0.0, 1.0), (32, 240, 118)),
        ((9.0, -9.0, 9.0), (78, 214, 230)),
    ],
    ids=str,
)
def test_colours_are_those_of_the_standard_in_limited_range(
    colour: tuple[float, ...], yuv: tuple[int, int, int]
) -> None:
    out = yuv420(torch.tensor(colour).view(3, 1, 1, 1).expand(3, 2, 4, 6).contiguous())
    for plane, value in zip((out[:, :4], *out[:, 4:].reshape(2, 2, 6).unbind(1)), yuv, strict=True):
        assert (plane == value).all()


def test_triton_takes_frames_only_where_its_launchers_can_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "later" / "cache"))
    can_build = providers.can_build_triton.__wrapped__
    monkeypatch.setenv("CC", "cc")
    assert can_build()
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not can_build()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert can_build()
    # as for a user who may not write there
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert not can_build()
    monkeypatch.undo()
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    assert not can_build()
