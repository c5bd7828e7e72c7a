import pytest
import torch
from rushes_kernels.video_sparse_attention import tile_map, video_sparse_attention, video_sparse_attention_ref

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grid", [(5, 7, 9), (9, 12, 13)], ids=str)
def test_matches_the_reference(grid: tuple[int, int, int], dtype: torch.dtype) -> None:
    tiles = tile_map([70, 19], grid).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gate = (
        torch.randn(tiles.num_rows, 4, 128, generator=generator, device="cuda").to(dtype) for _ in range(4)
    )
    actual = video_sparse_attention(q, k, v, gate, tiles, sparsity=0.6)
    expected = video_sparse_attention_ref(q, k, v, gate, tiles, sparsity=0.6)
    # bf16: roundings of the fine branch, its probabilities and the sum, of values up to about 4
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert actual.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 64, 70, 191, 192, 448])
def test_rows_that_are_left_out_change_nothing(length: int, dtype: torch.dtype) -> None:
    tiles = tile_map([448, 19], (9, 12, 13)).to("cuda").with_spare_rows(448)
    tiles.shorten_(torch.tensor(length, device="cuda"))
    exact = tile_map([length, 19], (9, 12, 13)).to("cuda")
    counted = torch.cat([torch.arange(length), torch.arange(448, tiles.num_rows)])
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(tiles.num_rows, 7, 128, generator=generator, device="cuda").to(dtype) for _ in range(4)]
    actual = video_sparse_attention(*inputs, tiles, sparsity=0.6)
    expected = video_sparse_attention(*(x[counted] for x in inputs), exact, sparsity=0.6)
    # the same tiles in another order
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual[counted].float(), expected.float(), atol=tolerance, rtol=tolerance)
    assert actual.isfinite().all()
