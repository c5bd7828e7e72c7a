"""Frames to 4:2:0 in Triton: against the reference in its interpreter, and whether it compiles for GPUs."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from rushes_kernels.pictures import to_yuv420_ref
from support.compiled import compile_to_yuv420

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")

SCALE, SHIFT = (0.229, 0.224, 0.225), (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(1, 2, 2), (2, 6, 10), (3, 16, 34), (1, 8, 600), (1, 4, 512), (0, 4, 4)]
)
def test_every_byte_is_that_of_the_reference(
    frames: int, height: int, width: int, interpreter: ProcessPoolExecutor
) -> None:
    from rushes_kernels import picture_triton

    generator = torch.Generator().manual_seed(height * width)
    # frames in the middle of longer ones, as a unit's body lies between its padding and its tail
    whole = 3 * torch.randn(3, frames + 2, height, width, generator=generator)
    part = whole[:, 1 : 1 + frames]
    size = (frames, height * 3 // 2, width)
    expected = to_yuv420_ref(part, SCALE, SHIFT, torch.full(size, 99, dtype=torch.uint8))
    # two poisons: a byte that is never written shows under one of them
    for poison in (77, 203):
        out = torch.full(size, poison, dtype=torch.uint8)
        assert torch.equal(interpreter.submit(picture_triton.to_yuv420, part, SCALE, SHIFT, out).result(), expected)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_a_gpu_and_rounds_every_operation(capability: int) -> None:
    ptx = compile_to_yuv420(capability)
    assert "fma.rn.f32" not in ptx
    assert "ld.global.v2" in ptx
