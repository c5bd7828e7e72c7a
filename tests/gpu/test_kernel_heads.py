"""Dense attention of heads against the formula in fp64, with poisoned results."""

import pytest
import torch
from rushes_kernels import heads_attention
from rushes_kernels.heads_attention import attend_heads
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]
DTYPES = [torch.float16, torch.bfloat16]
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that the kernel should take must not be computed by PyTorch in silence."""

    def refuse(*args: object) -> Tensor:
        raise AssertionError("computed by the reference")

    monkeypatch.setattr(heads_attention, "attend_heads_ref", refuse)


def exact(qkv: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).double() for x in qkv.chunk(3, dim=2))
    return ((q @ k.transpose(2, 3) * qkv.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def check(qkv: Tensor) -> Tensor:
    """With u the largest error of one rounding: weights are rounded before they multiply v and not in their sum, so
    |error| <= u max|v|; the result is rounded once more. fp32 sums and ex2.approx are far smaller but for fp16, where
    they are given an eighth of that.
    """
    actual, expected = attend_heads(qkv), exact(qkv)
    unit = HALF_ULP[qkv.dtype]
    largest = float(qkv.chunk(3, dim=2)[2].abs().amax())
    torch.testing.assert_close(actual.double(), expected, atol=1.125 * unit * largest, rtol=1.01 * unit)
    assert (actual - expected).norm() <= unit * expected.norm()
    return actual


def randn(batch: int, tokens: int, heads: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, tokens, 3 * heads, 64, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 260, 1797])
def test_every_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    check(randn(2, tokens, 3, dtype))


def test_more_units_than_blocks_at_once() -> None:
    check(randn(5, 400, 32, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.0, 12.0])
def test_flat_and_steep_softmax(factor: float, dtype: torch.dtype) -> None:
    qkv = randn(1, 700, 4, dtype)
    qkv[:, :, :4] *= factor
    check(qkv)


@pytest.mark.parametrize("sign", [1, -1])
def test_references_that_rise_or_fall_with_every_tile(sign: int) -> None:
    qkv = randn(1, 1000, 2, torch.float16)
    qkv[:, :, :2] = 1
    qkv[:, :, 2:4] = (sign * torch.arange(1000, device="cuda") / 64)[None, :, None, None]
    check(qkv)


def test_products_that_are_all_negative_zeros_weigh_alike() -> None:
    qkv = randn(1, 300, 2, torch.float16)
    qkv[:, :, :2], qkv[:, :, 2:4] = 0, -1
    check(qkv)


def test_tokens_of_other_batches_do_not_count() -> None:
    qkv = randn(3, 77, 2, torch.float16)
    alone = attend_heads(qkv[1:2].contiguous())
    qkv[0], qkv[2] = torch.inf, torch.nan
    assert torch.equal(attend_heads(qkv)[1:2], alone)


def test_nan_stays_in_its_row() -> None:
    qkv = randn(1, 300, 2, torch.float16)
    sound = attend_heads(qkv)
    qkv[0, 123, 1, 7] = torch.nan
    actual = attend_heads(qkv)
    assert actual[0, 123, 1].isnan().all()
    actual[0, 123, 1] = sound[0, 123, 1]
    assert torch.equal(actual, sound)


def test_result_is_the_same_bit_for_bit_however_slow_memory_is() -> None:
    qkv = randn(4, 1797, 32, torch.float16)
    first = attend_heads(qkv)
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    for turn in range(40):
        if turn % 3 == 0:
            with torch.cuda.stream(side):
                noise[: 1 << 27].copy_(noise[1 << 27 :])
        assert torch.equal(attend_heads(qkv), first), f"launch {turn} differs"
    torch.cuda.synchronize()
