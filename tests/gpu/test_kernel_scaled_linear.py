"""Rows in e4m3 and their products against their formulas, with poisoned results."""

import pytest
import torch
import torch.nn.functional as F
from rushes_kernels import scaled_linear as module
from rushes_kernels.scaled_linear import (
    Quantised,
    quantise_rows,
    quantise_rows_ref,
    scaled_gated_linear,
    scaled_linear,
)
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device of compute capability 8.9 or more",
    ),
]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF_ULP = 2**-8
ROWS = [1, 63, 64, 65, 128, 129, 200, 256, 257, 1000, 5003]
WIDTHS = [(256, 128), (384, 256), (2048, 1152), (5376, 384), (14_336, 256)]
"""Channels and inner width: the fewest that a kernel takes, odd numbers of steps and units, those of the model."""


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN; a shape that the kernels should take must not be computed by anything else."""
    new_empty, empty = Tensor.new_empty, torch.empty

    def poisoned(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: poisoned(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("not computed by the kernel")

    for name in ("swiglu", "scaled_mm", "scaled_linear_ref", "quantise_rows_ref"):
        monkeypatch.setattr(module, name, refuse)


def layer(rows: int, channels: int, width: int) -> tuple[Quantised, Quantised]:
    """Rows and weight with products of size 1; rows of very different sizes."""
    x = torch.randn(rows, channels, device="cuda") * torch.logspace(-2, 2, rows, device="cuda")[:, None]
    weight = torch.randn(width, channels, device="cuda") * channels**-0.5
    return quantise_rows_ref(x.to(BF16)), quantise_rows_ref(weight.to(BF16))


def products(x: Quantised, weight: Quantised) -> tuple[Tensor, Tensor]:
    """Exact, and how far a sum of tensor cores may be off: at each 32 channels it loses what lies 2^-13 below the
    largest of the sum so far and the products, towards zero; a sum is rarely above four times the root of all squares.
    """
    values = x.values_SC.double() @ weight.values_SC.double().T
    spread = (x.values_SC.double().square() @ weight.values_SC.double().square().T).sqrt()
    scales = x.scales_S.double()[:, None] * weight.scales_S.double()
    steps = x.values_SC.shape[1] / 32
    return values * scales, 2**-13 * steps * 4 * spread * scales


class TestQuantiseRows:
    @pytest.mark.usefixtures("only_kernels")
    @pytest.mark.parametrize("count", [1, 7, 1000, 5003])
    @pytest.mark.parametrize("channels", [8, 200, 2048, 5376, 14_336])
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    def test_same_bits_as_the_reference(self, count: int, channels: int, dtype: torch.dtype) -> None:
        x = (torch.randn(count, channels, device="cuda") * torch.logspace(-3, 3, count, device="cuda")[:, None]).to(
            dtype
        )
        x[count // 2] = 0
        actual, expected = quantise_rows(x), quantise_rows_ref(x)
        assert torch.equal(actual.values_SC.view(torch.uint8), expected.values_SC.view(torch.uint8))
        assert torch.equal(actual.scales_S, expected.scales_S)

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_what_is_not_finite_makes_all_products_of_its_row_nan(self, value: float) -> None:
        x = torch.randn(200, 256, device="cuda").to(BF16)
        x[70, 5] = value
        weight = quantise_rows(torch.randn(256, 256, device="cuda").to(BF16))
        result = scaled_linear(quantise_rows(x), weight, BF16)
        assert result[70].isnan().all()
        assert result[[*range(70), *range(71, 200)]].isfinite().all()


@needs_hopper
@pytest.mark.usefixtures("only_kernels")
class TestProducts:
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("channels", "width"), WIDTHS)
    def test_count_times_both_scales(self, rows: int, channels: int, width: int) -> None:
        x, weight = layer(rows, channels, 2 * width)
        exact, bound = products(x, weight)
        excess = (scaled_linear(x, weight, BF16).double() - exact).abs() - (bound + HALF_ULP * 1.001 * exact.abs())
        assert excess.max() <= 0, f"off by {float(excess.max()):.3e} more than rounding"

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("channels", "width"), WIDTHS)
    def test_are_gated(self, rows: int, channels: int, width: int) -> None:
        x, weight = layer(rows, channels, 2 * width)
        (value, gate), (of_value, of_gate) = (both.chunk(2, dim=1) for both in products(x, weight))
        exact = value * F.silu(gate)
        # the derivative of SiLU is at most 1.1, and between -1 and 1 it may change as much as its argument
        bound = HALF_ULP * 1.001 * exact.abs() + of_value * (F.silu(gate).abs() + of_gate) + 1.1 * of_gate * value.abs()
        excess = (scaled_gated_linear(x, weight, BF16).double() - exact).abs() - bound - 2**-20 * exact.abs()
        assert excess.max() <= 0, f"off by {float(excess.max()):.3e} more than rounding"

    def test_are_put_where_they_are_wanted(self) -> None:
        x, weight = layer(300, 256, 512)
        whole = torch.full((400, 512), torch.nan, device="cuda", dtype=BF16)
        scaled_linear(x, weight, BF16, whole[50:350])
        assert torch.equal(whole[50:350], scaled_linear(x, weight, BF16))
        assert whole[:50].isnan().all()
        assert whole[350:].isnan().all()

    def test_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        x, weight = layer(700, 2048, 1024)
        part = Quantised(x.values_SC[256:513].clone(), x.scales_S[256:513].clone())
        assert torch.equal(scaled_gated_linear(part, weight, BF16), scaled_gated_linear(x, weight, BF16)[256:513])

    def test_same_bits_whatever_runs_beside(self) -> None:
        x, weight = layer(9000, 2048, 4096)
        first = scaled_gated_linear(x, weight, BF16)
        other = torch.cuda.Stream()
        ballast = torch.zeros(1 << 28, device="cuda", dtype=torch.uint8)
        for _ in range(10):
            with torch.cuda.stream(other):
                ballast.add_(1)
            assert torch.equal(scaled_gated_linear(x, weight, BF16), first)


class TestWhatTheKernelsDoNotTake:
    @pytest.mark.parametrize(("channels", "width"), [(128, 128), (272, 144), (40, 24)])
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    def test_is_computed_all_the_same(self, channels: int, width: int, dtype: torch.dtype) -> None:
        x, weight = layer(65, channels, 2 * width)
        exact, bound = products(x, weight)
        excess = (scaled_linear(x, weight, dtype).double() - exact).abs() - (bound + 2 * HALF_ULP * exact.abs())
        assert excess.max() <= 0
        torch.testing.assert_close(
            scaled_gated_linear(x, weight, dtype).float(),
            module.scaled_gated_linear_ref(x, weight, dtype).float(),
            rtol=0.05,
            atol=0.05,
        )

    def test_fp32(self) -> None:
        x, weight = layer(65, 256, 256)
        torch.testing.assert_close(scaled_linear(x, weight, FP32), module.scaled_linear_ref(x, weight, FP32))

    def test_no_rows(self) -> None:
        x, weight = layer(0, 256, 512)
        assert scaled_linear(x, weight, BF16).shape == (0, 512)
        assert scaled_gated_linear(x, weight, BF16).shape == (0, 256)
        assert len(quantise_rows(torch.zeros(0, 256, device="cuda", dtype=BF16))) == 0
