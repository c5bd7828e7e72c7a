"""The kernels around block-sparse attention against the PyTorch path of video sparse attention."""

import pytest
import torch
from rushes_kernels.tile_kernels import choose_tiles, pack_tiles, unpack_tiles
from rushes_kernels.video_sparse_attention import _pool, select_tiles, tile_map
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAPS = [([1], (1, 1, 1)), ([70, 19], (5, 7, 9)), ([], (3, 5, 9)), ([65], (4, 4, 13))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN, or as a tile that there is not."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: poison(new_empty(*args, **kwargs)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("prefix", "grid"), MAPS, ids=str)
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_go_to_their_places_and_back(
    prefix: list[int], grid: tuple[int, int, int], dtype: torch.dtype, dim: int
) -> None:
    tiles = tile_map(prefix, grid).to("cuda")
    # as a projection leaves them: a slice of wider rows
    wide = torch.randn(tiles.num_rows, 4, 3, dim, device="cuda").to(dtype)
    x, gate = wide[:, 1], wide[:, 2]
    packed, means = pack_tiles(x, tiles.rows_nB, tiles.sizes_n)
    assert torch.equal(packed, x.transpose(0, 1)[:, tiles.rows_nB])
    torch.testing.assert_close(means, _pool(packed, tiles))

    alone = unpack_tiles(packed, None, None, tiles.rows_nB, tiles.sizes_n, tiles.num_rows)
    assert torch.equal(alone, x)
    coarse = torch.randn_like(means)
    gated = unpack_tiles(packed, coarse, gate, tiles.rows_nB, tiles.sizes_n, tiles.num_rows)
    expected = x.float() + coarse[:, tiles.tiles_S].transpose(0, 1) * gate.float()
    torch.testing.assert_close(gated, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("prefix", "grid"), MAPS, ids=str)
def test_rows_go_to_the_places_they_are_given(
    prefix: list[int], grid: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tiles = tile_map(prefix, grid).to("cuda")
    x, gate = torch.randn(2, tiles.num_rows, 3, 64, device="cuda").to(dtype)
    packed, means = pack_tiles(x, tiles.rows_nB, tiles.sizes_n)
    expected = unpack_tiles(packed, means, gate, tiles.rows_nB, tiles.sizes_n, tiles.num_rows)
    places = torch.randperm(tiles.num_rows + 9, device="cuda")[: tiles.num_rows]
    out = torch.empty(tiles.num_rows + 9, 3, 64, dtype=dtype, device="cuda")
    unpack_tiles(packed, means, gate, tiles.rows_nB, tiles.sizes_n, tiles.num_rows, out_NHD=out, places_S=places)
    assert torch.equal(out[places], expected)
    assert out.isnan().all(dim=(1, 2)).sum() == 9


def test_rows_that_are_not_aligned_are_copied_first() -> None:
    tiles = tile_map([7], (4, 4, 9)).to("cuda")
    wide = torch.randn(tiles.num_rows, 3, 34, device="cuda").bfloat16()
    x, gate = wide[..., 1:17], wide[..., 18:34]
    packed, means = pack_tiles(x, tiles.rows_nB, tiles.sizes_n)
    assert torch.equal(packed, x.transpose(0, 1)[:, tiles.rows_nB])
    gated = unpack_tiles(packed, torch.ones_like(means), gate, tiles.rows_nB, tiles.sizes_n, tiles.num_rows)
    torch.testing.assert_close(gated, (x.float() + gate.float()).bfloat16())


class TestChooseTiles:
    def check(self, scores: Tensor, P: int, k: int) -> None:
        expected = (P + select_tiles(scores[:, P:, P:], k)).int()
        assert torch.equal(choose_tiles(scores, P, k), expected)

    @pytest.mark.parametrize("P", [0, 1, 29])
    @pytest.mark.parametrize(
        ("V", "k"), [(1, 1), (2, 1), (63, 13), (64, 64), (65, 1), (200, 40), (1024, 1024), (1188, 238), (2100, 420)]
    )
    def test_agrees_with_the_sort(self, P: int, V: int, k: int) -> None:
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            self.check(torch.randn(2, P + V, P + V, device="cuda", generator=generator), P, k)

    @pytest.mark.parametrize("levels", [1, 2, 5])
    def test_lowest_tiles_win_ties(self, levels: int) -> None:
        scores = torch.randint(0, levels, (2, 130, 130), device="cuda").float() - 1
        for k in (1, 26, 127):
            self.check(scores, 3, k)

    def test_zeros_of_both_signs_are_equal(self) -> None:
        scores = torch.zeros(1, 40, 40, device="cuda")
        scores[:, :, ::3] = -0.0
        self.check(scores, 0, 11)

    def test_more_tiles_than_a_warp_holds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="up to 4096 video tiles, got 4097"):
            choose_tiles(torch.zeros(1, 4098, 4098, device="cuda"), 1, 5)

    def test_values_that_are_no_numbers_and_extremes(self) -> None:
        values = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-45, -1e-45, 0.0, 1.0], device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        scores = values[torch.randint(0, 9, (2, 90, 90), device="cuda", generator=generator)]
        for k in (1, 9, 30, 85, 90):
            self.check(scores, 0, k)
        self.check(torch.full((1, 70, 70), torch.nan, device="cuda"), 5, 7)
