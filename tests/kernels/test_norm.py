import pytest
import torch
from rushes_kernels.norm import rms_norm, rms_norm_modulate, rms_norm_rotate


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = randn(5, 24, seed=0), randn(24, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rows_of_zeros_stay_finite() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).eq(0).all()


def test_modulation_scales_by_one_plus_scale_then_shifts() -> None:
    x, weight, scale, shift = randn(5, 24, seed=0), randn(24, seed=1), randn(24, seed=2), randn(24, seed=3)
    expected = rms_norm(x, weight, 1e-5) * (1 + scale) + shift
    torch.testing.assert_close(rms_norm_modulate(x, weight, scale, shift, 1e-5), expected)


def test_rotation_pairs_channels_half_a_rotary_width_apart() -> None:
    x, weight, angles = randn(3, 2, 8, seed=0), randn(8, seed=1), randn(3, 3, seed=2)
    turned = rms_norm_rotate(x, weight, angles.cos(), angles.sin(), 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    pairs = torch.complex(normed[..., :3], normed[..., 3:6])
    expected = pairs * torch.polar(torch.ones(3, 1, 3), angles[:, None])
    torch.testing.assert_close(turned[..., :6], torch.cat([expected.real, expected.imag], dim=-1))
    torch.testing.assert_close(turned[..., 6:], normed[..., 6:])


@pytest.mark.parametrize("operation", ["norm", "modulate", "rotate"])
def test_bf16_is_rounded_once(operation: str) -> None:
    x, weight = randn(4, 2, 8, seed=0).bfloat16(), randn(8, seed=1).bfloat16()
    scale, shift, angles = randn(8, seed=2), randn(8, seed=3), randn(4, 4, seed=4)

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if operation == "norm":
            return rms_norm(x, weight, 1e-5)
        if operation == "modulate":
            return rms_norm_modulate(x, weight, scale, shift, 1e-5)
        return rms_norm_rotate(x, weight, angles.cos(), angles.sin(), 1e-5)

    assert torch.equal(apply(x, weight), apply(x.float(), weight.float()).bfloat16())
