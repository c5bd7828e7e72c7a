import torch
from rushes_kernels.linear import gated_linear, project_heads
from torch import Tensor


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_first_half_of_the_products_is_gated_by_the_second() -> None:
    x, weight, bias = randn(3, 5), randn(8, 5), randn(8)
    value, gate = x @ weight[:4].T + bias[:4], x @ weight[4:].T + bias[4:]
    torch.testing.assert_close(gated_linear(x, weight, bias), value * gate / (1 + torch.exp(-gate)))


def test_gated_layer_may_have_no_bias() -> None:
    x, weight = randn(3, 5), randn(8, 5)
    torch.testing.assert_close(gated_linear(x, weight), gated_linear(x, weight, torch.zeros(8)))


def test_first_heads_are_normed_and_turned_and_the_rest_left_alone() -> None:
    x, weight, bias = randn(2, 3, 5), randn(24, 5), randn(24)
    cos, sin = randn(3, 2).cos(), randn(3, 2).sin()
    heads = (x @ weight.T + bias).unflatten(-1, (3, 8))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)
    low, high, rest = normed.split([2, 2, 4], dim=-1)
    c, s = cos[None, :, None], sin[None, :, None]
    turned = torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)
    actual = project_heads(x, weight, bias, 8, 2, cos, sin, 1e-5)
    torch.testing.assert_close(actual, torch.cat([turned[:, :, :2], heads[:, :, 2:]], dim=2))
