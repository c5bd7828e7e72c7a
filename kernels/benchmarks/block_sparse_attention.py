"""Block-sparse attention on the lists of a 10 s clip with a prompt of 1,000 tokens: every provider and its baselines.

All inputs are synthetic. `random` lists are uniform; `local` ones prefer tiles that are near in the video, so that the
lists of neighbouring query tiles overlap. FLOP are counted over whole tiles (`padded`) and over valid keys (`valid`).
"""

# pyright: reportMissingImports=false
import importlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench import installed, measure, measure_in_turn, report, require_passing_tests
from rushes_kernels.block_sparse_attention import block_sparse_attention
from rushes_kernels.providers import Provider
from rushes_kernels.video_sparse_attention import _attend_selected, num_selected_tiles, tile_map, video_sparse_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, DIM = 14, 128
GRID = (72, 24, 42)
PREFIX = [1000, 810]
SPARSITY = 0.8
DENSE_ROWS = 19_520


def random_lists(kind: str, num_video_tiles: int, k: int) -> Tensor:
    """(H, V, k) int64 video tiles, unsorted."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(HEADS, num_video_tiles, num_video_tiles, device="cuda", generator=generator)
    if kind == "local":
        axes = [torch.arange(-(-extent // 4), device="cuda") for extent in GRID]
        centres = torch.cartesian_prod(*axes).float()
        scores = 0.5 * scores - torch.cdist(centres, centres)
    return scores.topk(k, sorted=False).indices


def baseline_of_fastvideo(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, P: int, sizes: Tensor
) -> Callable[[], object] | None:
    if installed("fastvideo-kernel") is None:
        return None
    importlib.import_module("fastvideo_kernel")
    module = sys.modules["fastvideo_kernel.block_sparse_attn"]
    n = q.shape[1]
    attended = torch.ones(HEADS, n, n, dtype=torch.bool, device="cuda")
    attended[:, P:, P:] = False
    attended[:, P:].scatter_(-1, lists.long(), True)
    indices, counts = module._map_to_index(attended[None])
    flat = [x.flatten(1, 2)[None] for x in (q, k, v)]
    return lambda: module.block_sparse_attn_triton(*flat, indices, counts, sizes)


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_block_sparse_attention.py")
    tiles = tile_map(PREFIX, GRID).to("cuda")
    P, V, n, p = tiles.num_prefix_tiles, tiles.num_video_tiles, tiles.num_tiles, tiles.num_prefix_rows
    k_tiles = num_selected_tiles(SPARSITY, V)
    generator = torch.Generator("cuda").manual_seed(1)

    dense_q, dense_k, dense_v = (
        torch.randn(1, HEADS, DENSE_ROWS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        timing = measure(lambda: F.scaled_dot_product_attention(dense_q, dense_k, dense_v))
    roof = 4 * HEADS * DENSE_ROWS**2 * DIM / timing.median_ms / 1e9
    report("dense attention, 14 heads, 19,520 rows", "cudnn", timing, padded_tflops=roof)

    q_rows, k_rows, v_rows = (
        torch.randn(tiles.num_rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    packed = [x.transpose(0, 1).contiguous() for x in (q_rows, k_rows, v_rows)]
    # as `pack_heads` leaves them: places past a tile's size are zeros
    q, k, v = (x[:, tiles.rows_nB].masked_fill_(~tiles.valid_nB[..., None], 0) for x in packed)
    sizes = tiles.sizes_n.int()
    for kind in ("random", "local"):
        selected = random_lists(kind, V, k_tiles)
        lists = (P + selected).int()
        counts = torch.full((HEADS, V), k_tiles, dtype=torch.int32, device="cuda")
        pairs = HEADS * (P * n + V * (P + k_tiles))
        valid = P * HEADS * tiles.num_rows + HEADS * V * p + int(tiles.sizes_n[P:][selected].sum())

        def attend(provider: Provider, lists: Tensor = lists, counts: Tensor = counts) -> Callable[[], object]:
            return lambda: block_sparse_attention(q, k, v, lists, counts, sizes, num_prefix_tiles=P, provider=provider)

        def in_pytorch(selected: Tensor = selected) -> None:
            _attend_selected(q[:, P:], k, v, selected, tiles)
            F.scaled_dot_product_attention(packed[0][None, :, :p], packed[1][None], packed[2][None])

        variants: dict[str, Callable[[], object] | None] = {
            "fastvideo": baseline_of_fastvideo(q, k, v, lists, P, sizes),
            "hopper": attend(Provider.HOPPER),
            "triton": attend(Provider.TRITON),
            "torch": in_pytorch,
        }
        there = {name: run for name, run in variants.items() if run is not None}
        single = {
            name: measure(run, launches=5 if name == "torch" else 20, warm_up=1 if name == "torch" else 3)
            for name, run in there.items()
        }
        steady = measure_in_turn({name: run for name, run in there.items() if name != "torch"})
        case = f"block-sparse attention, 14 heads, {n} tiles, {P} prefix, {k_tiles} of {V} selected, {kind}"
        for title, timings in ((case, single), (f"{case}, steady", steady)):
            for name, timing in timings.items():
                padded = pairs * 64 * 64 * DIM * 4 / timing.median_ms / 1e9
                report(
                    title,
                    name,
                    timing,
                    padded_tflops=padded,
                    valid_tflops=valid * 64 * DIM * 4 / timing.median_ms / 1e9,
                    of_roof=padded / roof,
                )

    for heads, frames, audio_rows, clip in ((14, 72, 810, "10 s"), (56, 37, 414, "5 s")):
        whole_op(heads, frames, audio_rows, f"video sparse attention, {heads} heads, {clip} clip, 1,000 tokens")


@torch.inference_mode()
def whole_op(heads: int, frames: int, audio_rows: int, case: str) -> None:
    """From projected rows to the input of the output projection; 14 heads are one of four ranks, 56 are all."""
    tiles = tile_map([1000, audio_rows], (frames, 24, 42)).to("cuda")
    projected = torch.randn(tiles.num_rows, 4, heads, DIM, device="cuda").bfloat16()
    q, k = projected[:, 0].contiguous(), projected[:, 1].contiguous()
    for provider in Provider:

        def run(provider: Provider = provider) -> Tensor:
            return video_sparse_attention(
                q, k, projected[:, 2], projected[:, 3], tiles, sparsity=SPARSITY, provider=provider
            )

        report(case, provider, measure(run, launches=5, warm_up=2))


if __name__ == "__main__":
    main()
