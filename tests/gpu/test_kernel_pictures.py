"""Patches to canvas and frames to bytes against their references, with poisoned results."""

import pytest
import torch
from rushes_kernels import pictures
from rushes_kernels.pictures import (
    stitch_patches,
    stitch_patches_ref,
    to_pixels,
    to_pixels_ref,
    to_yuv420,
    to_yuv420_ref,
)
from rushes_kernels.providers import can_build_triton
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels should take must not be computed by PyTorch in silence."""

    def refuse(*args: object) -> Tensor:
        raise AssertionError("computed by the reference")

    monkeypatch.setattr(pictures, "stitch_patches_ref", refuse)
    monkeypatch.setattr(pictures, "to_pixels_ref", refuse)
    if can_build_triton():
        monkeypatch.setattr(pictures, "to_yuv420_ref", refuse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tops", "lefts", "tile", "step", "latent_frames", "depth", "colours", "suffix"),
    [
        # the released decoder: 1344x768
        ((0, 160, 336, 512), (0, 176, 352, 528, 704, 896, 1088), (256, 256), 16, 2, 4, 3, 5),
        ((0,), (0,), (64, 80), 16, 1, 1, 3, 0),
        ((0, 8), (0, 8, 16), (24, 16), 8, 3, 2, 1, 1),
        ((0, 64), (0,), (96, 32), 32, 1, 3, 4, 7),
    ],
)
def test_canvas_equals_the_reference(
    dtype: torch.dtype,
    tops: tuple[int, ...],
    lefts: tuple[int, ...],
    tile: tuple[int, int],
    step: int,
    latent_frames: int,
    depth: int,
    colours: int,
    suffix: int,
) -> None:
    tokens = latent_frames * (tile[0] // step) * (tile[1] // step) + suffix
    patches = torch.randn(len(tops) * len(lefts), tokens, colours * depth * step**2, device="cuda").to(dtype)
    size = (colours, latent_frames * depth, tops[-1] + tile[0], lefts[-1] + tile[1])
    actual, expected = (torch.full(size, torch.nan, device="cuda") for _ in range(2))
    stitch_patches(patches, tops, lefts, tile, step, actual)
    stitch_patches_ref(patches, tops, lefts, tile, step, expected)
    # two fades of fp32 values up to 6, in which the compiler may fuse a product and a sum
    torch.testing.assert_close(actual, expected, atol=8 * 2**-22, rtol=0)


@pytest.mark.parametrize(("frames", "height", "width", "skipped"), [(22, 768, 1344, 3), (1, 2, 2, 0), (3, 5, 12, 1)])
def test_pixels_equal_the_reference(frames: int, height: int, width: int, skipped: int) -> None:
    # frames in the middle of longer ones, as a unit's body lies between its padding and its tail
    whole = 3 * torch.randn(3, skipped + frames + 1, height, width, device="cuda")
    part = whole[:, skipped : skipped + frames]
    actual, expected = (torch.full((frames, height, width, 3), 77, dtype=torch.uint8, device="cuda") for _ in range(2))
    scale, shift = (0.229, 0.224, 0.225), (0.485, 0.456, 0.406)
    to_pixels(part, scale, shift, actual)
    to_pixels_ref(part, scale, shift, expected)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("frames", "height", "width", "skipped"),
    [(22, 768, 1344, 3), (17, 480, 832, 3), (1, 2, 2, 0), (3, 6, 10, 1), (2, 1344, 768, 0), (1, 8, 1030, 2)],
)
def test_yuv_equals_the_reference(frames: int, height: int, width: int, skipped: int) -> None:
    whole = 3 * torch.randn(3, skipped + frames + 1, height, width, device="cuda")
    part = whole[:, skipped : skipped + frames]
    scale, shift = (0.229, 0.224, 0.225), (0.485, 0.456, 0.406)
    size = (frames, height * 3 // 2, width)
    expected = to_yuv420_ref(part, scale, shift, torch.full(size, 99, dtype=torch.uint8, device="cuda"))
    for poison in (77, 203):
        out = torch.full(size, poison, dtype=torch.uint8, device="cuda")
        assert torch.equal(to_yuv420(part, scale, shift, out), expected)
