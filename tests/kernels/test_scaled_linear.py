"""Rows in e4m3 and their products against their formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F
from rushes_kernels.scaled_linear import (
    E4M3,
    Quantised,
    quantise_rows,
    scaled_gated_linear,
    scaled_linear,
)
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rows(count: int, channels: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestQuantiseRows:
    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    @pytest.mark.parametrize("magnitude", [1e-3, 1.0, 3e4])
    def test_every_element_is_off_by_half_a_step_of_its_row_at_most(self, dtype: torch.dtype, magnitude: float) -> None:
        x = (rows(17, 200).clamp(-2, 2) * magnitude).to(dtype)
        quantised = quantise_rows(x)
        assert quantised.values_SC.dtype == E4M3
        # three bits behind the leading one; below 2^-6, steps of 2^-9
        bound = torch.maximum(2**-4 * x.double().abs(), 2**-10 * quantised.scales_S.double()[:, None])
        assert ((quantised.dequantised().double() - x.double()).abs() <= 1.00001 * bound).all()

    def test_largest_magnitude_of_a_row_is_kept(self) -> None:
        x = rows(17, 200)
        largest = quantise_rows(x).dequantised().abs().amax(dim=1)
        torch.testing.assert_close(largest, x.abs().amax(dim=1), rtol=1e-6, atol=0)

    def test_rows_do_not_depend_on_each_other(self) -> None:
        x = rows(9, 64)
        x[3] *= 1e4
        whole = quantise_rows(x)
        alone = quantise_rows(x[4:5].clone())
        assert torch.equal(whole.values_SC[4:5].float(), alone.values_SC.float())
        assert torch.equal(whole.scales_S[4:5], alone.scales_S)

    def test_zeros_stay_zeros(self) -> None:
        quantised = quantise_rows(torch.zeros(3, 32))
        assert torch.equal(quantised.dequantised(), torch.zeros(3, 32))
        assert (quantised.scales_S > 0).all()

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_what_is_not_finite_makes_all_products_of_its_row_nan(self, value: float) -> None:
        x, weight = rows(3, 32), quantise_rows(rows(16, 32, seed=1))
        x[1, 5] = value
        products = scaled_linear(quantise_rows(x), weight, FP32)
        assert products[1].isnan().all()
        assert products[[0, 2]].isfinite().all()

    def test_no_rows(self) -> None:
        quantised = quantise_rows(torch.zeros(0, 32))
        assert quantised.values_SC.shape == (0, 32)
        assert quantised.scales_S.shape == (0,)


class TestScaledLinear:
    @pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
    def test_products_count_times_both_scales(self, dtype: torch.dtype) -> None:
        x, weight = quantise_rows(rows(33, 96)), quantise_rows(rows(48, 96, seed=1))
        exact = dequantised_in_double(x) @ dequantised_in_double(weight).T
        tolerance = {BF16: 2**-8, FP32: 1e-5}[dtype]
        torch.testing.assert_close(scaled_linear(x, weight, dtype).double(), exact, rtol=tolerance, atol=1e-4)

    def test_result_is_put_where_it_is_wanted(self) -> None:
        x, weight = quantise_rows(rows(33, 96)), quantise_rows(rows(48, 96, seed=1))
        out = torch.full((33, 48), torch.nan)
        assert scaled_linear(x, weight, FP32, out) is out
        assert torch.equal(out, scaled_linear(x, weight, FP32))

    def test_gated_products_are_those_of_both_halves(self) -> None:
        x, weight = quantise_rows(rows(33, 96)), quantise_rows(rows(64, 96, seed=1) / 96**0.5)
        value, gate = (dequantised_in_double(x) @ dequantised_in_double(weight).T).chunk(2, dim=1)
        actual = scaled_gated_linear(x, weight, FP32)
        torch.testing.assert_close(actual.double(), value * F.silu(gate), rtol=1e-5, atol=1e-5)

    def test_error_against_products_of_what_was_quantised_is_that_of_e4m3(self) -> None:
        x, weight = rows(100, 512), rows(256, 512, seed=1)
        exact = x.double() @ weight.double().T
        error = scaled_linear(quantise_rows(x), quantise_rows(weight), FP32).double() - exact
        # a relative error of 2^-4 / sqrt(3) at the most in each factor of each product, of random sign
        assert 0.01 < error.norm() / exact.norm() < 2**0.5 * 2**-4 / 3**0.5


def dequantised_in_double(x: Quantised) -> Tensor:
    return x.values_SC.double() * x.scales_S.double()[:, None]
