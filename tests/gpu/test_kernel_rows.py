"""The passes over rows and heads against their formulas in fp64, with poisoned results."""

import pytest
import torch
from rushes_kernels import norm, row_kernels
from rushes_kernels.norm import HeadNorm, Update, norm_rotate_heads_, norm_rows_, rms_norm_rotate
from rushes_kernels.swiglu import swiglu, swiglu_ref
from rushes_kernels.tile_kernels import pack_heads, pack_tiles
from rushes_kernels.video_sparse_attention import _pool, tile_map
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF_ULP = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24}
"""Largest relative error of one rounding."""
EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: poison(new_empty(*args, **kwargs)))


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that the kernels should take must not be computed by PyTorch in silence."""

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("computed by the reference")

    monkeypatch.setattr(norm, "norm_rows_ref_", refuse)
    monkeypatch.setattr(norm, "norm_rotate_heads_ref_", refuse)


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, size: Tensor | float = 1.0) -> None:
    """`actual` is `exact`, rounded to its dtype after fp32 arithmetic on terms as large as `size`.

    fp32 sums and products of a few terms are off by some 2^-24 of the largest; 2^-19 leaves room for the sum of
    squares over a row and for the approximate root.
    """
    assert actual.isfinite().all()
    bound = HALF_ULP[actual.dtype] * exact.abs() * 1.001 + 2**-19 * size
    # below its smallest normal number fp16 has an absolute grid
    bound = bound + (2**-25 if actual.dtype == FP16 else 0)
    excess = ((actual.double() - exact).abs() - bound).max()
    assert excess <= 0, f"off by {float(excess):.3e} more than rounding"


def normed(x: Tensor, *, centred: bool = False) -> Tensor:
    x = x.double()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


class TestNormRows:
    @pytest.mark.parametrize("rows", [1, 2, 77, 5003])
    @pytest.mark.parametrize("columns", [8, 24, 256, 2048, 5376])
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    def test_modulated_norm_of_the_updated_residual(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        x, added = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype)
        weight = randn(columns, dtype=dtype)
        # as the tables of modulation lie: three tags of six vectors
        gate, shift, scale = (randn(3, 6, columns, dtype=dtype)[:, i] for i in (2, 3, 4))
        tags = torch.randint(0, 3, (rows,), device="cuda", dtype=torch.uint8)
        picked = tags.long()
        before = x.clone()
        y = norm_rows_(x, weight, EPS, update=Update(added, gate), scale_MC=scale, shift_MC=shift, tags_S=tags)
        due = added.double() * gate.double()[picked]
        assert_rounded(x, before.double() + due, before.double().abs() + due.abs())
        factors = weight.double() * (1 + scale.double()[picked])
        size = (normed(x) * factors).abs() + shift.double()[picked].abs()
        assert_rounded(y, normed(x) * factors + shift.double()[picked], size)

    @pytest.mark.parametrize("columns", [24, 5376])
    def test_vectors_may_lie_otherwise_than_gates(self, columns: int) -> None:
        x, added, weight = (randn(*shape, dtype=BF16) for shape in ((50, columns), (50, columns), (columns,)))
        gate = randn(3, 6, columns, dtype=BF16)[:, 5]
        shift, scale = randn(3, 2, columns, dtype=BF16).unbind(1)
        tags = torch.arange(50, device="cuda").remainder(3).to(torch.uint8)
        y = norm_rows_(x, weight, EPS, update=Update(added, gate), scale_MC=scale, shift_MC=shift, tags_S=tags)
        factors, shifts = weight.double() * (1 + scale.double()[tags.long()]), shift.double()[tags.long()]
        assert_rounded(y, normed(x) * factors + shifts, (normed(x) * factors).abs() + shifts.abs())

    def test_without_an_update_the_residual_stays(self) -> None:
        x, weight = randn(300, 5376, dtype=BF16), randn(5376, dtype=BF16)
        before = x.clone()
        y = norm_rows_(x, weight, EPS)
        assert torch.equal(x, before)
        assert_rounded(y, normed(x) * weight.double(), (normed(x) * weight.double()).abs())

    @pytest.mark.parametrize("rows", [3, 1797])
    @pytest.mark.parametrize("centred", [False, True])
    def test_fp32_residual_with_fp16_layers(self, rows: int, centred: bool) -> None:
        x, added = 5 + randn(rows, 2048), randn(rows, 2048, dtype=FP16)
        weight, gate, bias = randn(2048), randn(1, 2048), randn(1, 2048)
        before = x.clone()
        y = norm_rows_(x, weight, EPS, update=Update(added, gate), shift_MC=bias, centred=centred, dtype=FP16)
        due = added.double() * gate.double()
        assert_rounded(x, before.double() + due, before.double().abs() + due.abs())
        scaled = normed(x, centred=centred) * weight.double()
        # the mean is taken off values that are several times larger
        assert_rounded(y, scaled + bias.double(), 8 * weight.double().abs() + scaled.abs() + bias.double().abs())

    def test_rows_of_zeros_and_of_extremes(self) -> None:
        x = torch.zeros(4, 5376, device="cuda", dtype=BF16)
        x[1] = 1e-20
        x[2] = 1e15
        y = norm_rows_(x, torch.ones(5376, device="cuda", dtype=BF16), EPS)
        assert y[0].eq(0).all()
        assert y[1].abs().max() < 1e-16
        assert y[2].eq(1).all()

    def test_no_rows(self) -> None:
        assert norm_rows_(randn(0, 256), randn(256), EPS).shape == (0, 256)

    def test_widths_that_are_no_whole_words_are_left_to_pytorch(self) -> None:
        assert not row_kernels.takes_rows(randn(2, 12, dtype=BF16))
        assert row_kernels.takes_rows(randn(2, 12))


class TestSwiglu:
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    @pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 96), (70_001, 16), (1797, 8192), (999, 14336)])
    def test_agrees_with_the_formula(self, rows: int, width: int, dtype: torch.dtype) -> None:
        x = 3 * randn(rows, 2 * width, dtype=dtype)
        value, gate = x.double().chunk(2, dim=-1)
        exact = value * gate * gate.sigmoid()
        # the fast exponential and division: 2^-19 of the result
        assert_rounded(swiglu(x), exact, exact.abs())

    def test_extremes(self) -> None:
        ends = torch.tensor([-1e4, -100, -89, -87, -20, 0, 20, 89, 1e4], device="cuda")
        gate = ends.repeat(8)[None].to(BF16)
        x = torch.cat([torch.ones_like(gate), gate], dim=-1)
        torch.testing.assert_close(swiglu(x), swiglu_ref(x), rtol=2**-8, atol=1e-30)


class TestNormRotateHeads:
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    @pytest.mark.parametrize(
        ("batch", "tokens", "heads", "dim", "angles"),
        [(1, 1, 3, 16, 8), (2, 35, 6, 32, 8), (3, 1797, 96, 64, 24), (1, 50, 9, 128, 48)],
    )
    def test_agrees_with_the_formula(
        self, batch: int, tokens: int, heads: int, dim: int, angles: int, dtype: torch.dtype
    ) -> None:
        x = randn(batch, tokens, heads, dim, dtype=dtype)
        cos, sin = randn(tokens, angles), randn(tokens, angles)
        before, turned = x.clone(), 2 * heads // 3
        norm_rotate_heads_(x, turned, cos, sin, EPS)
        assert torch.equal(x[:, :, turned:], before[:, :, turned:])
        n = normed(before[:, :, :turned])
        first, second, rest = n.split([angles, angles, dim - 2 * angles], dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        exact = torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)
        assert_rounded(x[:, :, :turned], exact, 40.0)


class TestPackHeads:
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    @pytest.mark.parametrize(
        ("prefix", "grid"), [([1], (1, 1, 1)), ([70, 19], (5, 7, 9)), ([], (3, 5, 9)), ([65], (4, 4, 13))], ids=str
    )
    @pytest.mark.parametrize(("heads", "dim", "angles"), [(3, 16, 8), (9, 128, 48), (16, 64, 24), (1, 128, 0)])
    def test_equals_norm_rotation_and_packing_one_after_the_other(
        self,
        prefix: list[int],
        grid: tuple[int, int, int],
        heads: int,
        dim: int,
        angles: int,
        dtype: torch.dtype,
    ) -> None:
        tiles = tile_map(prefix, grid).to("cuda")
        # as a projection leaves them: a slice of wider rows
        q, k, v, _ = randn(tiles.num_rows, 4, heads, dim, dtype=dtype).unbind(1)
        cos, sin = randn(tiles.num_rows, angles), randn(tiles.num_rows, angles)
        q_weight, k_weight = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
        packed = pack_heads(q, k, v, HeadNorm(q_weight, k_weight, cos, sin, EPS), tiles.rows_nB, tiles.sizes_n)
        for (actual, means), x, weight in zip(packed[:2], (q, k), (q_weight, k_weight), strict=True):
            exact = rms_norm_rotate(x.float(), weight.float(), cos, sin, EPS).double()
            places = exact.transpose(0, 1)[:, tiles.rows_nB]
            assert_rounded(actual, places.masked_fill(~tiles.valid_nB[..., None], 0), 40.0)
            torch.testing.assert_close(means, _pool(actual, tiles))
        plain, plain_means = pack_tiles(v, tiles.rows_nB, tiles.sizes_n)
        assert torch.equal(packed[2][0], plain.masked_fill(~tiles.valid_nB[..., None], 0))
        torch.testing.assert_close(packed[2][1], plain_means)
