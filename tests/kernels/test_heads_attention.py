import torch
from rushes_kernels.heads_attention import attend_heads


def test_every_token_attends_to_all_of_its_batch_by_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 7, 9, 5, generator=generator)
    out = attend_heads(qkv)
    assert out.shape == (2, 7, 3, 5)
    for batch in range(2):
        for head in range(3):
            q, k, v = (qkv[batch, :, 3 * part + head].double() for part in range(3))
            weights = (q @ k.T / 5**0.5).exp()
            expected = weights @ v / weights.sum(1, keepdim=True)
            torch.testing.assert_close(out[batch, :, head].double(), expected, atol=1e-6, rtol=1e-5)


def test_result_lies_as_rows_of_heads() -> None:
    assert attend_heads(torch.randn(2, 7, 9, 5)).is_contiguous()
