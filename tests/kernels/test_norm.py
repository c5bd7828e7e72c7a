import pytest
import torch
from rushes_kernels.norm import Update, norm_rotate_heads_, norm_rows_, rms_norm, rms_norm_rotate


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = randn(5, 24, seed=0), randn(24, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rows_of_zeros_stay_finite() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).eq(0).all()


class TestNormRows:
    def test_modulation_scales_by_one_plus_scale_then_shifts(self) -> None:
        x, weight, scale, shift = randn(5, 24, seed=0), randn(24, seed=1), randn(1, 24, seed=2), randn(1, 24, seed=3)
        expected = rms_norm(x, weight, 1e-5) * (1 + scale) + shift
        torch.testing.assert_close(norm_rows_(x, weight, 1e-5, scale_MC=scale, shift_MC=shift), expected)

    def test_update_is_added_to_the_residual_in_place(self) -> None:
        x, added, weight, gate = randn(5, 24, seed=0), randn(5, 24, seed=1), randn(24, seed=2), randn(1, 24, seed=3)
        residual = x + added * gate
        actual = norm_rows_(x, weight, 1e-5, update=Update(added, gate))
        torch.testing.assert_close(x, residual)
        torch.testing.assert_close(actual, rms_norm(residual, weight, 1e-5))

    def test_rows_pick_the_vectors_of_their_tag(self) -> None:
        x, added, weight = randn(6, 24, seed=0), randn(6, 24, seed=1), randn(24, seed=2)
        gate, scale, shift = randn(3, 3, 24, seed=3).unbind(1)
        tags = torch.tensor([1, 1, 2, 0, 0, 2], dtype=torch.uint8)
        whole = x.clone()
        actual = norm_rows_(
            whole, weight, 1e-5, update=Update(added, gate), scale_MC=scale, shift_MC=shift, tags_S=tags
        )
        for row, tag in enumerate(tags.tolist()):
            one = x[row : row + 1].clone()
            update = Update(added[row : row + 1], gate[tag : tag + 1])
            modulation = {"scale_MC": scale[tag : tag + 1], "shift_MC": shift[tag : tag + 1]}
            torch.testing.assert_close(
                actual[row : row + 1], norm_rows_(one, weight, 1e-5, update=update, **modulation)
            )
            torch.testing.assert_close(whole[row : row + 1], one)

    def test_centred_norm_is_a_layer_norm(self) -> None:
        x, weight, bias = 3 + randn(5, 24, seed=0), randn(24, seed=1), randn(24, seed=2)
        expected = torch.nn.functional.layer_norm(x, (24,), weight, bias, 1e-5)
        torch.testing.assert_close(norm_rows_(x, weight, 1e-5, shift_MC=bias[None], centred=True), expected)

    def test_both_results_are_rounded_once(self) -> None:
        x, added, weight = (randn(*shape, seed=i).bfloat16() for i, shape in enumerate([(5, 24), (5, 24), (24,)]))
        gate, scale = randn(1, 24, seed=3).bfloat16(), randn(1, 24, seed=4).bfloat16()
        residual = (x.float() + added.float() * gate.float()).bfloat16()
        expected = norm_rows_(residual.float(), weight.float(), 1e-5, scale_MC=scale.float()).bfloat16()
        actual = norm_rows_(x, weight, 1e-5, update=Update(added, gate), scale_MC=scale)
        assert torch.equal(x, residual)
        assert torch.equal(actual, expected)

    def test_result_may_have_another_dtype(self) -> None:
        x, weight = randn(5, 24, seed=0), randn(24, seed=1)
        actual = norm_rows_(x, weight, 1e-5, dtype=torch.float16)
        assert torch.equal(actual, rms_norm(x, weight, 1e-5).half())


def test_rotation_pairs_channels_half_a_rotary_width_apart() -> None:
    x, weight, angles = randn(3, 2, 8, seed=0), randn(8, seed=1), randn(3, 3, seed=2)
    turned = rms_norm_rotate(x, weight, angles.cos(), angles.sin(), 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    pairs = torch.complex(normed[..., :3], normed[..., 3:6])
    expected = pairs * torch.polar(torch.ones(3, 1, 3), angles[:, None])
    torch.testing.assert_close(turned[..., :6], torch.cat([expected.real, expected.imag], dim=-1))
    torch.testing.assert_close(turned[..., 6:], normed[..., 6:])


def test_only_the_first_heads_are_rotated_in_place() -> None:
    x, angles = randn(2, 3, 5, 8, seed=0), randn(3, 3, seed=1)
    original = x.clone()
    norm_rotate_heads_(x, 2, angles.cos(), angles.sin(), 1e-5)
    assert torch.equal(x[:, :, 2:], original[:, :, 2:])
    for batch in range(2):
        expected = rms_norm_rotate(original[batch, :, :2], torch.ones(8), angles.cos(), angles.sin(), 1e-5)
        torch.testing.assert_close(x[batch, :, :2], expected)


@pytest.mark.parametrize("operation", ["norm", "rotate"])
def test_bf16_is_rounded_once(operation: str) -> None:
    x, weight = randn(4, 2, 8, seed=0).bfloat16(), randn(8, seed=1).bfloat16()
    angles = randn(4, 4, seed=4)

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if operation == "norm":
            return rms_norm(x, weight, 1e-5)
        return rms_norm_rotate(x, weight, angles.cos(), angles.sin(), 1e-5)

    assert torch.equal(apply(x, weight), apply(x.float(), weight.float()).bfloat16())
