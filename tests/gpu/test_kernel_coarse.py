"""Products between tiles by bf16 parts against fp64, with poisoned memory."""

import pytest
import torch
from rushes_kernels import coarse
from rushes_kernels.coarse import coarse_means, score_tiles
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs compute capability 8.0 or newer",
    ),
]
SHAPES = [(56, 683, 128), (14, 1217, 128), (1, 1, 128), (3, 8, 64), (2, 97, 16), (1, 2050, 8)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels should take must not be computed by PyTorch in silence."""

    def refuse(*args: object) -> Tensor:
        raise AssertionError("computed by the reference")

    monkeypatch.setattr(coarse, "score_tiles_ref", refuse)
    monkeypatch.setattr(coarse, "coarse_means_ref", refuse)


@pytest.mark.parametrize(("heads", "tiles", "dim"), SHAPES)
def test_scores_are_as_exact_as_fp32(heads: int, tiles: int, dim: int) -> None:
    q, k = torch.randn(2, heads, tiles, dim, device="cuda") * torch.logspace(-3, 3, dim, device="cuda")
    scores = score_tiles(q, k, 0.3)
    exact = 0.3 * q.double() @ k.double().transpose(1, 2)
    terms = 0.3 * q.double().abs() @ k.double().abs().transpose(1, 2)
    # tensor cores cut sums off at 2^-23 of the largest so far, once in 16 of the 6 D terms, and each
    # of the 16 by less; the parts leave out still less
    assert ((scores - exact).abs() <= (6 * dim / 16 + 8) * 2**-23 * terms).all()


@pytest.mark.parametrize(("heads", "tiles", "dim"), SHAPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_means_are_far_more_exact_than_what_they_are_rounded_to(heads: int, tiles: int, dim: int, scale: float) -> None:
    q, k, v = torch.randn(3, heads, tiles, dim, device="cuda").unbind(0)
    scores = score_tiles(q, k, scale * dim**-0.5)
    scores[..., : tiles // 3] = -torch.inf
    means = coarse_means(scores, v)
    weights = scores.double().softmax(-1)
    # two parts of each leave out 2^-17 of weights and of values and their product; sums as above, and the exponentials
    # of differences up to 200 are off by 2^-15 of themselves where they matter
    assert ((means - weights @ v.double()).abs() <= 2**-13 * (weights @ v.double().abs())).all()
    assert means.is_contiguous()


def test_rows_of_scores_are_chosen_from_as_they_lie() -> None:
    q, k = torch.randn(2, 2, 13, 128, device="cuda")
    scores = score_tiles(q, k, 1.0)
    assert scores.shape == (2, 13, 13)
    assert scores.stride(-1) == 1
    assert scores.isfinite().all()
