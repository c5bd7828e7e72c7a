"""Both CUDA providers against the reference, and against themselves when memory is slow."""

from pathlib import Path

import pytest
import torch
from rushes_kernels import block_sparse_hopper
from rushes_kernels.nvrtc import KernelError, Module
from rushes_kernels.providers import Provider, choose_provider
from rushes_kernels.video_sparse_attention import tile_map, video_sparse_attention, video_sparse_attention_ref
from support.tile_lists import Problem
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
HOPPER = pytest.param(Provider.HOPPER, marks=needs_hopper)
BOTH = pytest.mark.parametrize("provider", [HOPPER, Provider.TRITON])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result starts as NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))


def assert_equal_but_for_rounding(actual: Tensor, expected: Tensor, largest_value: Tensor | float) -> None:
    """Unit roundoff u of bf16 is 2^-8. Weights p are rounded to bf16 before they multiply v and not in their sum:
    |error| <= u sum(p |v|) / sum(p) <= u max|v|; the result is rounded once more: <= u |result|. fp32 sums, the lazily
    moved reference and ex2.approx are a thousand times smaller. Rounding errors are uniform: their norm is u / sqrt(3).
    """
    unit = 2**-8
    torch.testing.assert_close(actual.float(), expected, atol=unit * float(largest_value), rtol=1.01 * unit)
    assert (actual.float() - expected).norm() <= unit * expected.norm()


def check(problem: Problem, provider: Provider) -> Tensor:
    """Of the rows past a tile's size only that they are numbers: their queries mean nothing."""
    actual = problem.run(provider, check=True)
    assert actual.isfinite().all()
    valid = torch.arange(problem.v.shape[2], device="cuda") < problem.sizes[:, None]
    expected = problem.reference()
    assert_equal_but_for_rounding(actual[:, valid], expected[:, valid], problem.v[:, valid].abs().amax())
    return actual


def random_counts(heads: int, num_video_tiles: int, most: int) -> Tensor:
    generator = torch.Generator().manual_seed(most)
    return torch.randint(0, most + 1, (heads, num_video_tiles), generator=generator)


def uneven(seed: int = 0) -> Problem:
    """Lists of 0 to 170 tiles beside each other."""
    counts = random_counts(3, 200, 170)
    return Problem.random(heads=3, num_prefix_tiles=1, counts=counts, dtype=torch.bfloat16, seed=seed)


def lopsided() -> Problem:
    """One long list among short ones: some warpgroups skip dozens of tiles at a time."""
    counts = [190 if tile % 3 == 1 else 1 for tile in range(200)]
    return Problem.random(heads=2, num_prefix_tiles=0, counts=counts, dtype=torch.bfloat16, seed=1)


@BOTH
class TestAgainstTheReference:
    @pytest.mark.parametrize(
        ("num_prefix_tiles", "counts"),
        [
            (1, [1]),
            (0, [1]),
            (0, [0]),
            (1, []),
            (7, []),
            (1, [0, 0]),
            (2, [2, 0, 1]),
            (5, [1] * 4),
            (3, [7] * 7),
            (29, [5] * 11),
            (70, [3, 1, 2, 3]),
        ],
        ids=str,
    )
    def test_small_shapes(self, provider: Provider, num_prefix_tiles: int, counts: list[int]) -> None:
        for seed in range(3):
            check(
                Problem.random(
                    heads=3, num_prefix_tiles=num_prefix_tiles, counts=counts, dtype=torch.bfloat16, seed=seed
                ),
                provider,
            )

    def test_tiles_of_every_size(self, provider: Provider) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=0, counts=[1] * 64, dtype=torch.bfloat16)
        problem.sizes = torch.arange(1, 65, dtype=torch.int32, device="cuda")
        # each query tile attends to one key tile alone, past whose size there are huge values
        problem.lists = torch.arange(64, dtype=torch.int32, device="cuda").flip(0).view(1, 64, 1).contiguous()
        padding = torch.arange(64, device="cuda") >= problem.sizes[:, None]
        problem.k, problem.v = (torch.randn_like(x) for x in (problem.k, problem.v))
        problem.k[:, padding], problem.v[:, padding] = 100, 1000
        check(problem, provider)

    @pytest.mark.parametrize("make", [uneven, lopsided])
    def test_uneven_lists(self, provider: Provider, make: object) -> None:
        check(make(), provider)  # type: ignore[operator]

    @pytest.mark.parametrize("factor", [0.0, 60.0])
    def test_flat_and_steep_softmax(self, provider: Provider, factor: float) -> None:
        problem = uneven(seed=2)
        problem.q *= factor
        check(problem, provider)

    def test_references_that_rise_with_every_tile(self, provider: Provider) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=0, counts=[60] * 60, dtype=torch.bfloat16)
        problem.lists = problem.lists.sort(-1).values.contiguous()
        problem.sizes[:] = 64
        problem.q[:] = 1
        heights = torch.arange(60, device="cuda")[:, None, None]
        problem.k = (heights * 0.125 + torch.zeros_like(problem.k)).bfloat16()
        problem.v = torch.randn_like(problem.v)
        check(problem, provider)
        problem.k = -problem.k
        check(problem, provider)

    def test_full_size_of_ten_seconds(self, provider: Provider) -> None:
        problem = Problem.random(heads=4, num_prefix_tiles=29, counts=[238] * 1188, dtype=torch.bfloat16)
        actual = problem.run(provider, check=True)
        generator = torch.Generator().manual_seed(0)
        tiles = [0, 28, 29, 30, 31, 1215, 1216, *torch.randint(1217, (40,), generator=generator).tolist()]
        for tile in tiles:
            head, size = tile % 4, int(problem.sizes[tile])
            expected = problem.expected_tile(head, tile)
            assert_equal_but_for_rounding(actual[head, tile, :size], expected[:size], 6.0)
        assert actual.isfinite().all()

    def test_order_of_a_list_changes_rounding_only(self, provider: Provider) -> None:
        problem = uneven(seed=3)
        first = problem.run(provider).float()
        counted = torch.arange(problem.lists.shape[-1], device="cuda") < problem.counts[..., None]
        problem.lists = torch.where(counted, problem.lists, 10_000).sort(-1, descending=False).values.int()
        torch.testing.assert_close(problem.run(provider).float(), first, atol=2**-7, rtol=2**-7)

    def test_products_that_are_all_negative_zeros_weigh_alike(self, provider: Provider) -> None:
        problem = uneven(seed=7)
        problem.q[:], problem.k[:] = 0, -1
        check(problem, provider)

    def test_nan_stays_in_its_rows(self, provider: Provider) -> None:
        problem = uneven(seed=4)
        sound = problem.run(provider)
        problem.q[1, 7, 11] = torch.nan
        actual = problem.run(provider)
        assert actual[1, 7, 11].isnan().all()
        actual[1, 7, 11] = sound[1, 7, 11]
        assert torch.equal(actual, sound)

    def test_entries_out_of_range_are_passed_over(self, provider: Provider) -> None:
        problem = Problem.random(heads=2, num_prefix_tiles=1, counts=[5] * 9, dtype=torch.bfloat16)
        problem.lists[..., 5:] = -1
        expected = problem.run(provider)
        wide = torch.full((2, 9, 8), 10, dtype=torch.int32, device="cuda")
        wide[..., :5] = problem.lists
        wide[..., 5], wide[..., 6], wide[..., 7] = -1, 2**31 - 1, -(2**31)
        problem.lists = wide
        problem.counts[:] = 2**31 - 1
        torch.testing.assert_close(problem.run(provider), expected)
        problem.counts[:] = -(2**31)
        prefix_only = problem.run(provider)
        assert prefix_only.isfinite().all()
        problem.counts[:] = 0
        assert torch.equal(problem.run(provider), prefix_only)


@BOTH
@pytest.mark.parametrize("make", [uneven, lopsided])
def test_result_is_the_same_bit_for_bit_however_slow_memory_is(provider: Provider, make: object) -> None:
    problem = make()  # type: ignore[operator]
    first = problem.run(provider)
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    for turn in range(150):
        if turn % 3 == 0:
            with torch.cuda.stream(side):
                noise[: 1 << 27].copy_(noise[1 << 27 :])
        assert torch.equal(problem.run(provider), first), f"launch {turn} differs"
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("places", "dim"), [(16, 32), (64, 64), (32, 128)])
def test_triton_takes_other_types_and_shapes(places: int, dim: int, dtype: torch.dtype) -> None:
    problem = Problem.random(
        heads=2, num_prefix_tiles=3, counts=[4, 1, 0, 7, 2, 7, 3], places=places, dim=dim, dtype=dtype
    )
    # fp16: values up to 4.5, weights and results rounded to 11 bits; fp32: sums of a few hundred products
    tolerance = 2**-11 * 4.5 if dtype == torch.float16 else 2e-5
    torch.testing.assert_close(
        problem.run(Provider.TRITON).float(), problem.reference(), atol=tolerance, rtol=tolerance
    )


@needs_hopper
class TestHopper:
    def test_other_shapes_are_refused(self) -> None:
        problem = Problem.random(heads=1, num_prefix_tiles=1, counts=[1], dim=64, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"head dimension 128 .* got torch.bfloat16, 64, 64 and 2"):
            problem.run(Provider.HOPPER)

    def test_kernel_is_compiled_into_the_given_directory_and_found_there(self, tmp_path: Path) -> None:
        source = Path(block_sparse_hopper.__file__).with_suffix(".cu")
        device = torch.device("cuda", torch.cuda.current_device())
        parts = {
            "macros": block_sparse_hopper.MACROS,
            "preludes": [source.with_name(name) for name in ("hopper.cuh", "hopper_attention.cuh")],
        }
        sizes = {
            Module(source, device, **parts, one_generation=True, directory=tmp_path).binary_bytes for _ in range(2)
        }
        assert len(sizes) == 1
        assert len(list(tmp_path.iterdir())) == 1

    def test_source_that_does_not_compile_is_explained(self, tmp_path: Path) -> None:
        source = tmp_path / "wrong.cu"
        source.write_text("int half_a_function() { return")
        with pytest.raises(KernelError, match=r"cannot compile wrong\.cu:\n.*error"):
            Module(source, torch.device("cuda", 0), directory=tmp_path)


@pytest.mark.parametrize("sparsity", [0.0, 0.6, 0.95])
@pytest.mark.parametrize(
    ("prefix", "grid"), [([1], (1, 1, 1)), ([70, 19], (5, 7, 9)), ([1], (9, 12, 13)), ([500, 3], (2, 10, 3))], ids=str
)
@pytest.mark.parametrize("provider", [HOPPER, Provider.TRITON, Provider.TORCH])
def test_video_sparse_attention(
    provider: Provider, prefix: list[int], grid: tuple[int, int, int], sparsity: float
) -> None:
    tiles = tile_map(prefix, grid).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gate = (
        torch.randn(tiles.num_rows, 4, 128, generator=generator, device="cuda").bfloat16() for _ in range(4)
    )
    actual = video_sparse_attention(q, k, v, gate, tiles, sparsity=sparsity, provider=provider)
    expected = video_sparse_attention_ref(*(x.float() for x in (q, k, v, gate)), tiles, sparsity=sparsity)
    # the fine branch as above, with v up to 5; it is rounded once before and once after the coarse branch is added
    torch.testing.assert_close(actual.float(), expected, atol=2**-8 * 10, rtol=2**-7)


def test_rule_takes_the_fastest_provider() -> None:
    expected = Provider.HOPPER if torch.cuda.get_device_capability() == (9, 0) else Provider.TRITON
    assert choose_provider("cuda", dtype=torch.bfloat16, head_dim=128) is expected
