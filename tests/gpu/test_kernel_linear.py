"""Linear layers with what follows them against their formulas in fp64, with poisoned results."""

import pytest
import torch
import torch.nn.functional as F
from rushes_kernels import linear
from rushes_kernels.linear import gated_linear, project_heads
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
BF16, FP16 = torch.bfloat16, torch.float16
HALF_ULP = {BF16: 2**-8, FP16: 2**-11}
"""Largest relative error of one rounding."""
EPS = 1e-5
ROWS = [1, 63, 64, 65, 128, 129, 200, 256, 257, 1000, 5003]
WIDTHS = [(128, 128), (192, 256), (2048, 1152), (5376, 384)]
"""Channels and inner width: the fewest that a kernel takes, odd numbers of steps and units, those of the models."""


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN; a shape that the kernels should take must not be computed by PyTorch in silence."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("computed by the reference")

    monkeypatch.setattr(linear, "swiglu", refuse)
    monkeypatch.setattr(linear, "norm_rotate_heads_", refuse)


def layer(rows: int, channels: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and bias, with products of size 1."""
    x = torch.randn(rows, channels, device="cuda").to(dtype)
    weight = (torch.randn(width, channels, device="cuda") * channels**-0.5).to(dtype)
    return x, weight, torch.randn(width, device="cuda").to(dtype)


def product_error(x: Tensor, weight: Tensor) -> Tensor:
    """How far an fp32 sum of products may be off: tensor cores keep some 2^-22 of the largest term and sum at most
    `channels` of them, whose signs are random; 2^-20 of the root of the squares' sum is four times as much."""
    return 2**-20 * (x.double().square() @ weight.double().square().T).sqrt() * x.shape[1] ** 0.5


@needs_hopper
@pytest.mark.usefixtures("only_kernels")
class TestGatedLinear:
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("channels", "width"), WIDTHS)
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_gates_products(self, rows: int, channels: int, width: int, dtype: torch.dtype, with_bias: bool) -> None:
        x, weight, bias = layer(rows, channels, 2 * width, dtype)
        actual = gated_linear(x, weight, bias if with_bias else None)
        products = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        value, gate = products.chunk(2, dim=-1)
        exact = value * F.silu(gate)
        of_value, of_gate = product_error(x, weight).chunk(2, dim=-1)
        # the derivative of SiLU is at most 1.1 and its fast form exact to 2^-20; fp16 has an absolute grid below 2^-14
        bound = HALF_ULP[dtype] * 1.001 * exact.abs() + of_value * F.silu(gate).abs() + 1.1 * of_gate * value.abs()
        bound += 2**-20 * exact.abs() + (2**-25 if dtype == FP16 else 0)
        excess = ((actual.double() - exact).abs() - bound).max()
        assert excess <= 0, f"off by {float(excess):.3e} more than rounding"

    def test_large_gates_of_either_sign_neither_overflow_nor_vanish(self) -> None:
        x = torch.zeros(64, 128, device="cuda", dtype=BF16)
        x[:, 0] = 1
        weight = torch.zeros(256, 128, device="cuda", dtype=BF16)
        weight[:128, 0] = 1
        weight[128:, 0] = torch.tensor([-1e30, -100.0, 100.0, 1e30] * 32)
        expected = torch.tensor([0.0, 0.0, 100.0, 1e30] * 32, device="cuda").to(BF16).expand(64, -1)
        torch.testing.assert_close(gated_linear(x, weight), expected, atol=1e-35, rtol=0)

    def test_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        x, weight, bias = layer(700, 2048, 1024, BF16)
        whole = gated_linear(x, weight, bias)
        assert torch.equal(gated_linear(x[256:513].clone(), weight, bias), whole[256:513])

    def test_same_bits_whatever_runs_beside(self) -> None:
        x, weight, bias = layer(9000, 2048, 2048, FP16)
        first = gated_linear(x, weight, bias)
        other = torch.cuda.Stream()
        ballast = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        for _ in range(10):
            with torch.cuda.stream(other):
                ballast.add_(1)
            assert torch.equal(gated_linear(x, weight, bias), first)


@needs_hopper
@pytest.mark.usefixtures("only_kernels")
class TestProjectHeads:
    @pytest.mark.parametrize("positions", [1, 63, 64, 65, 129, 257, 1797])
    @pytest.mark.parametrize(("batches", "channels", "heads"), [(1, 128, 4), (3, 192, 12), (2, 2048, 8)])
    @pytest.mark.parametrize("angles", [8, 24, 32])
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    def test_projects_norms_and_rotates(
        self, positions: int, batches: int, channels: int, heads: int, angles: int, dtype: torch.dtype
    ) -> None:
        x, weight, bias = layer(batches * positions, channels, 64 * heads, dtype)
        turns = torch.rand(positions, angles, device="cuda") * 6.3
        cos, sin = turns.cos(), turns.sin()
        num_normed = heads // 2 + 1
        actual = project_heads(x.unflatten(0, (batches, -1)), weight, bias, 64, num_normed, cos, sin, EPS)
        products = (x.double() @ weight.double().T + bias.double()).unflatten(0, (batches, -1))
        exact = products.unflatten(-1, (-1, 64)).clone()
        norm_rotate_heads_ref_in_double(exact[:, :, :num_normed], cos.double(), sin.double())
        # a head's values are about 1 before and after its norm, which passes the errors of its products on
        of_products = (
            product_error(x, weight).unflatten(0, (batches, -1)).unflatten(-1, (-1, 64)).amax(-1, keepdim=True)
        )
        bound = HALF_ULP[dtype] * 1.001 * exact.abs() + 16 * of_products + 2**-19
        excess = ((actual.double() - exact).abs() - bound).max()
        assert excess <= 0, f"off by {float(excess):.3e} more than rounding"

    def test_same_bits_every_time(self) -> None:
        x, weight, bias = layer(9000, 2048, 6144, FP16)
        cos, sin = (torch.randn(9000, 24, device="cuda") for _ in range(2))
        first = project_heads(x[None], weight, bias, 64, 64, cos, sin, EPS)
        for _ in range(10):
            assert torch.equal(project_heads(x[None], weight, bias, 64, 64, cos, sin, EPS), first)


def norm_rotate_heads_ref_in_double(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place; the formulas of `norm.py`."""
    x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    R = cos.shape[1]
    low, high = x[..., :R].clone(), x[..., R : 2 * R].clone()
    x[..., :R] = low * cos[:, None] - high * sin[:, None]
    x[..., R : 2 * R] = high * cos[:, None] + low * sin[:, None]


class TestWhatTheKernelsDoNotTake:
    @pytest.mark.parametrize(
        ("channels", "width", "dtype"), [(96, 128, BF16), (64, 128, BF16), (128, 64, BF16), (128, 128, torch.float32)]
    )
    def test_is_computed_all_the_same(self, channels: int, width: int, dtype: torch.dtype) -> None:
        x, weight, bias = layer(10, channels, 2 * width, dtype)
        torch.testing.assert_close(gated_linear(x, weight, bias), linear.gated_linear_ref(x, weight, bias))

    @pytest.mark.parametrize(("head_dim", "angles"), [(32, 8), (64, 12), (128, 24)])
    def test_other_heads(self, head_dim: int, angles: int) -> None:
        x, weight, bias = layer(10, 128, 256, BF16)
        cos, sin = (torch.randn(10, angles, device="cuda") for _ in range(2))
        given = (x[None], weight, bias, head_dim, 1, cos, sin, EPS)
        torch.testing.assert_close(project_heads(*given), linear.project_heads_ref(*given))

    def test_rows_that_lie_apart(self) -> None:
        x, weight, bias = layer(10, 256, 512, BF16)
        actual = gated_linear(x[:, :128], weight[:, :128], bias)
        expected = linear.gated_linear_ref(x[:, :128].contiguous(), weight[:, :128].contiguous(), bias)
        torch.testing.assert_close(actual, expected)

    def test_no_rows(self) -> None:
        x, weight, bias = layer(0, 128, 256, BF16)
        assert gated_linear(x, weight, bias).shape == (0, 128)
        angles = torch.zeros(0, 24, device="cuda")
        assert project_heads(x[None], weight, bias, 64, 2, angles, angles, EPS).shape == (1, 0, 4, 64)
