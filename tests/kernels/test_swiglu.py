import torch
from rushes_kernels.swiglu import swiglu


def test_first_half_is_the_value_and_second_half_the_gate() -> None:
    value, gate = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    torch.testing.assert_close(swiglu(torch.cat([value, gate], dim=-1)), value * gate / (1 + torch.exp(-gate)))
    assert not torch.allclose(swiglu(torch.cat([gate, value], dim=-1)), swiglu(torch.cat([value, gate], dim=-1)))


def test_bf16_is_rounded_once() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(swiglu(x), swiglu(x.float()).bfloat16())
