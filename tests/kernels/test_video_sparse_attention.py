import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rushes_kernels import video_sparse_attention as vsa_module
from rushes_kernels.video_sparse_attention import (
    TileMap,
    num_selected_tiles,
    select_tiles,
    tile_map,
    video_sparse_attention,
    video_sparse_attention_ref,
)
from torch import Tensor

# fp32 sums of a few hundred products of unit normals, in two different orders
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


def random_inputs(tiles: TileMap, heads: int = 2, dim: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tiles.num_rows, heads, dim, generator=generator) for _ in range(4)]


class TestTileMap:
    @pytest.mark.parametrize(
        ("frames", "counts"),
        [
            (37, {64: 540, 32: 54, 16: 60, 8: 6}),
            (72, {64: 1080, 32: 108}),
            (107, {64: 1560, 48: 60, 32: 156, 24: 6}),
        ],
    )
    def test_video_tile_sizes_of_the_widescreen_canvas(self, frames: int, counts: dict[int, int]) -> None:
        tiles = tile_map([1000], (frames, 24, 42))
        assert Counter(tiles.sizes_n[tiles.num_prefix_tiles :].tolist()) == counts

    @pytest.mark.parametrize(
        ("text", "audio", "frames", "prefix", "total"),
        [
            (1000, 414, 37, 23, 683),
            (1000, 810, 72, 29, 1217),
            (1000, 1206, 107, 35, 1817),
            (10000, 414, 37, 164, 824),
            (10000, 810, 72, 170, 1358),
            (10000, 1206, 107, 176, 1958),
        ],
    )
    def test_tile_counts_of_the_widescreen_canvas(
        self, text: int, audio: int, frames: int, prefix: int, total: int
    ) -> None:
        tiles = tile_map([text, audio], (frames, 24, 42))
        assert (tiles.num_prefix_tiles, tiles.num_tiles) == (prefix, total)
        assert tiles.num_prefix_rows == text + audio

    def test_segments_are_cut_apart_and_empty_ones_vanish(self) -> None:
        tiles = tile_map([70, 0, 65], (1, 1, 1))
        assert tiles.sizes_n.tolist() == [64, 6, 64, 1, 1]
        assert tiles.rows_nB[1, :6].tolist() == list(range(64, 70))

    def test_boxes_follow_time_then_rows_then_columns(self) -> None:
        T, h, w = 5, 6, 7
        tiles = tile_map([3], (T, h, w))
        boxes: dict[tuple[int, int, int], list[int]] = {}
        for row, (t, y, x) in enumerate(itertools.product(range(T), range(h), range(w))):
            boxes.setdefault((t // 4, y // 4, x // 4), []).append(3 + row)
        expected = [boxes[key] for key in sorted(boxes)]
        found = [tiles.rows_nB[i, : tiles.sizes_n[i]].tolist() for i in range(1, tiles.num_tiles)]
        assert found == expected

    def test_every_row_has_one_place(self) -> None:
        tiles = tile_map([7, 66], (3, 5, 9))
        assert torch.equal(tiles.rows_nB.flatten()[tiles.places_S], torch.arange(tiles.num_rows))
        assert torch.equal(torch.bincount(tiles.tiles_S), tiles.sizes_n)
        assert tiles.valid_nB.sum() == tiles.num_rows

    def test_impossible_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="-1"):
            tile_map([-1], (1, 1, 1))
        with pytest.raises(ValueError, match=r"\(0, 4, 4\)"):
            tile_map([1], (0, 4, 4))


class TestNumSelectedTiles:
    @pytest.mark.parametrize(
        ("video_tiles", "selected"),
        [
            ((720, 1296, 1944), (144, 260, 389)),
            ((660, 1188, 1782), (132, 238, 357)),
            ((480, 864, 1296), (96, 173, 260)),
            ((360, 648, 972), (72, 130, 195)),
            ((320, 576, 864), (64, 116, 173)),
            ((280, 504, 756), (56, 101, 152)),
            ((200, 360, 540), (40, 72, 108)),
            ((160, 288, 432), (32, 58, 87)),
        ],
    )
    def test_counts_of_the_served_canvases(self, video_tiles: tuple[int, ...], selected: tuple[int, ...]) -> None:
        assert tuple(num_selected_tiles(0.8, V) for V in video_tiles) == selected

    def test_four_step_student(self) -> None:
        assert [num_selected_tiles(0.9, V) for V in (660, 1188, 1782)] == [66, 119, 179]

    def test_count_equals_the_exact_fraction(self) -> None:
        for V in range(1, 4000):
            assert num_selected_tiles(0.8, V) == max(1, -(-V // 5))
            assert num_selected_tiles(0.9, V) == max(1, -(-V // 10))
            assert num_selected_tiles(0.0, V) == V

    @pytest.mark.parametrize("sparsity", [-0.1, 1.0, float("nan")])
    def test_sparsity_out_of_range_is_refused(self, sparsity: float) -> None:
        with pytest.raises(ValueError, match="sparsity"):
            num_selected_tiles(sparsity, 10)


class TestSelectTiles:
    def test_lowest_columns_win_ties(self) -> None:
        scores = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 6])
        assert select_tiles(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2]]

    def test_agrees_with_a_stable_sort(self) -> None:
        # a coarse grid of values, so that most thresholds are tied
        scores = torch.randint(0, 4, (3, 50, 40), generator=torch.Generator().manual_seed(1)).float()
        for k in (1, 7, 39, 40):
            ranking = scores.argsort(dim=-1, descending=True, stable=True)
            assert torch.equal(select_tiles(scores, k), ranking[..., :k].sort(-1).values)

    def test_rows_of_nan_still_select(self) -> None:
        scores = torch.full((2, 5), torch.nan)
        scores[0, 3] = torch.inf
        assert select_tiles(scores, 2).tolist() == [[0, 3], [0, 1]]


class TestVideoSparseAttention:
    @pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 0.95])
    @pytest.mark.parametrize("grid", [(1, 1, 1), (5, 7, 9), (9, 4, 13), (2, 10, 3)], ids=str)
    def test_matches_the_reference_on_ragged_grids(self, grid: tuple[int, int, int], sparsity: float) -> None:
        tiles = tile_map([19, 70], grid)
        inputs = random_inputs(tiles)
        expected = video_sparse_attention_ref(*inputs, tiles, sparsity=sparsity)
        torch.testing.assert_close(video_sparse_attention(*inputs, tiles, sparsity=sparsity), expected, **TOLERANCE)

    def test_matches_the_reference_for_every_prefix_length(self) -> None:
        for length in range(1, 131):
            tiles = tile_map([length, 6], (5, 5, 6))
            inputs = random_inputs(tiles, dim=8, seed=length)
            expected = video_sparse_attention_ref(*inputs, tiles, sparsity=0.6)
            actual = video_sparse_attention(*inputs, tiles, sparsity=0.6)
            torch.testing.assert_close(actual, expected, **TOLERANCE, msg=lambda text, n=length: f"prefix {n}: {text}")

    def test_works_without_a_prefix(self) -> None:
        tiles = tile_map([], (5, 5, 6))
        inputs = random_inputs(tiles)
        expected = video_sparse_attention_ref(*inputs, tiles, sparsity=0.7)
        torch.testing.assert_close(video_sparse_attention(*inputs, tiles, sparsity=0.7), expected, **TOLERANCE)

    def test_odd_head_width_and_strided_inputs(self) -> None:
        tiles = tile_map([5, 9], (4, 6, 6))
        packed = torch.randn(tiles.num_rows, 3, 4 * 25, generator=torch.Generator().manual_seed(2))
        inputs = packed.chunk(4, dim=-1)
        expected = video_sparse_attention_ref(*inputs, tiles, sparsity=0.5)
        torch.testing.assert_close(video_sparse_attention(*inputs, tiles, sparsity=0.5), expected, **TOLERANCE)

    def test_dense_without_sparsity_and_gate(self) -> None:
        tiles = tile_map([33, 10], (6, 6, 5))
        q, k, v, gate = random_inputs(tiles)
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        dense = F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1)
        actual = video_sparse_attention(q, k, v, torch.zeros_like(gate), tiles, sparsity=0.0)
        torch.testing.assert_close(actual, dense, **TOLERANCE)
        torch.testing.assert_close(video_sparse_attention(q, k, v, None, tiles, sparsity=0.0), dense, **TOLERANCE)

    def test_gate_keeps_the_coarse_branch_in_dense_attention(self) -> None:
        tiles = tile_map([33, 10], (6, 6, 5))
        q, k, v, gate = random_inputs(tiles)
        with_gate = video_sparse_attention(q, k, v, gate, tiles, sparsity=0.0)
        without = video_sparse_attention(q, k, v, None, tiles, sparsity=0.0)
        assert (with_gate - without).abs().amax() > 0.1

    def test_result_does_not_depend_on_the_chunk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tiles = tile_map([33, 10], (9, 9, 9))
        inputs = random_inputs(tiles)
        whole = video_sparse_attention(*inputs, tiles, sparsity=0.7)
        monkeypatch.setattr(vsa_module, "_CHUNK_BYTES", {"cpu": 1})
        torch.testing.assert_close(video_sparse_attention(*inputs, tiles, sparsity=0.7), whole, **TOLERANCE)

    def test_equal_scores_select_the_first_tiles(self) -> None:
        tiles = tile_map([4], (4, 4, 16))
        q, k, v, _ = random_inputs(tiles)
        attended = video_sparse_attention(torch.zeros_like(q), k, v, None, tiles, sparsity=0.5)
        kept = torch.cat([torch.arange(4), tiles.rows_nB[1:3].flatten()])
        video_rows = slice(4, None)
        torch.testing.assert_close(attended[video_rows], v[kept].mean(0).expand_as(q[video_rows]), **TOLERANCE)

    def test_padding_places_carry_no_weight(self) -> None:
        # one valid row in the last tile: counted as 64 equal rows it would dominate every softmax
        tiles = tile_map([1], (1, 1, 5))
        q, k, v, _ = random_inputs(tiles)
        attended = video_sparse_attention(torch.zeros_like(q), k, v, None, tiles, sparsity=0.0)
        torch.testing.assert_close(attended, v.mean(0).expand_as(v), **TOLERANCE)

    def test_audio_segment_is_not_merged_with_text(self) -> None:
        q, k, v, gate = random_inputs(tile_map([40, 24], (4, 4, 4)))
        apart = video_sparse_attention(q, k, v, gate, tile_map([40, 24], (4, 4, 4)), sparsity=0.0)
        merged = video_sparse_attention(q, k, v, gate, tile_map([64], (4, 4, 4)), sparsity=0.0)
        assert (apart - merged).abs().amax() > 1e-2

    def test_bf16_differs_from_fp32_by_rounding_only(self) -> None:
        tiles = tile_map([33, 10], (6, 6, 5))
        inputs = [x.bfloat16() for x in random_inputs(tiles)]
        actual = video_sparse_attention(*inputs, tiles, sparsity=0.5)
        expected = video_sparse_attention_ref(*(x.float() for x in inputs), tiles, sparsity=0.5)
        assert actual.dtype == torch.bfloat16
        # two roundings to 8 bits of values up to about 2, plus bf16 probabilities inside the fine softmax
        torch.testing.assert_close(actual.float(), expected, atol=3e-2, rtol=2e-2)

    def test_nan_spreads_instead_of_crashing(self) -> None:
        tiles = tile_map([3], (4, 4, 12))
        q, k, v, gate = random_inputs(tiles)
        q[10] = torch.nan
        assert video_sparse_attention(q, k, v, gate, tiles, sparsity=0.5)[10].isnan().all()

    def test_mismatched_inputs_are_refused(self) -> None:
        tiles = tile_map([3], (4, 4, 4))
        q, k, v, gate = random_inputs(tiles)
        with pytest.raises(ValueError, match="agree"):
            video_sparse_attention(q, k[:-1], v, gate, tiles, sparsity=0.0)
        with pytest.raises(ValueError, match="67 rows, got 66"):
            video_sparse_attention(q[1:], k[1:], v[1:], gate[1:], tiles, sparsity=0.0)


class TestSpareRows:
    """A first segment that is shorter than its rows."""

    AUDIO, GRID = 9, (5, 6, 7)

    def spare(self, length: int) -> TileMap:
        tiles = tile_map([128, self.AUDIO], self.GRID).with_spare_rows(128)
        tiles.shorten_(torch.tensor(3))
        tiles.shorten_(torch.tensor(length))
        return tiles

    @pytest.mark.parametrize("attend", [video_sparse_attention, video_sparse_attention_ref])
    @pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128])
    def test_change_nothing_for_the_rows_that_count(self, attend: Callable[..., Tensor], length: int) -> None:
        tiles, exact = self.spare(length), tile_map([length, self.AUDIO], self.GRID)
        inputs = random_inputs(tiles)
        counted = torch.cat([torch.arange(length), torch.arange(128, tiles.num_rows)])
        for x in inputs:
            x[length:128] = 1e4
        expected = attend(*(x[counted] for x in inputs), exact, sparsity=0.6)
        actual = attend(*inputs, tiles, sparsity=0.6)
        torch.testing.assert_close(actual[counted], expected, **TOLERANCE)
        assert actual.isfinite().all()

    def test_must_be_whole_tiles_of_the_prefix(self) -> None:
        tiles = tile_map([130], self.GRID)
        for rows in (70, 192):
            with pytest.raises(ValueError, match=f"among the 130 of the prefix, got {rows}"):
                tiles.with_spare_rows(rows)


class TestTarget:
    """Results that are written to places of their own in a larger tensor."""

    tiles = tile_map([7, 66], (3, 5, 9))

    def test_rows_go_to_their_places_and_nothing_else_changes(self) -> None:
        inputs = random_inputs(self.tiles)
        expected = video_sparse_attention(*inputs, self.tiles, sparsity=0.5)
        S = self.tiles.num_rows
        places = torch.randperm(S + 50, generator=torch.Generator().manual_seed(0))[:S]
        out = torch.full((S + 50, *expected.shape[1:]), torch.nan)
        returned = video_sparse_attention(*inputs, self.tiles, sparsity=0.5, out_NHD=out, places_S=places)
        assert returned is out
        assert torch.equal(out[places], expected)
        assert out.isnan().all(dim=(1, 2)).sum() == 50

    def test_rows_keep_their_order_without_places(self) -> None:
        inputs = random_inputs(self.tiles)
        out = torch.empty_like(inputs[0])
        video_sparse_attention(*inputs, self.tiles, sparsity=0.5, out_NHD=out)
        assert torch.equal(out, video_sparse_attention(*inputs, self.tiles, sparsity=0.5))

    def test_target_that_does_not_fit_is_refused(self) -> None:
        inputs = random_inputs(self.tiles)
        S, H, D = inputs[0].shape

        def attend(out: Tensor | None, places: Tensor | None = None) -> None:
            video_sparse_attention(*inputs, self.tiles, sparsity=0.5, out_NHD=out, places_S=places)

        with pytest.raises(ValueError, match="has no room for"):
            attend(torch.empty(S - 1, H, D))
        with pytest.raises(ValueError, match="must be contiguous"):
            attend(torch.empty(S, D, H).transpose(1, 2))
        with pytest.raises(ValueError, match=r"places must be \(\d+,\) int64"):
            attend(torch.empty(S, H, D), torch.arange(S, dtype=torch.int32))
        with pytest.raises(ValueError, match="nothing that they are in"):
            attend(None, torch.arange(S))
