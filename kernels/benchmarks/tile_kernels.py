"""The kernels around block-sparse attention, for the 14 heads of one of four ranks and a 10 s clip, against their roof.

Inputs are synthetic. The roof of a pass over memory is the rate of a device copy in the same run; bytes are those that
must move: every input read once, every result written once.
"""

# pyright: reportMissingImports=false
import torch
from bench import measure, report, require_passing_tests
from rushes_kernels.coarse import coarse_means, coarse_means_ref, score_tiles, score_tiles_ref
from rushes_kernels.tile_kernels import choose_tiles, pack_tiles, unpack_tiles
from rushes_kernels.video_sparse_attention import _pool, num_selected_tiles, select_tiles, tile_map

HEADS, DIM = 14, 128


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_tiles.py", "tests/gpu/test_kernel_coarse.py")
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source))
    roof = 2 * source.nbytes / timing.median_ms / 1e6
    report("copy of 2 GiB", "torch", timing, gb_per_s=roof)

    tiles = tile_map([1000, 810], (72, 24, 42)).to("cuda")
    P, V, n = tiles.num_prefix_tiles, tiles.num_video_tiles, tiles.num_tiles
    k = num_selected_tiles(0.8, V)
    projected = torch.randn(tiles.num_rows, 4, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    x, gate = projected[:, 0], projected[:, 3]
    fine, means = pack_tiles(x, tiles.rows_nB, tiles.sizes_n)
    row_bytes, tile_bytes, mean_bytes = 2 * x.numel(), fine.nbytes, means.nbytes

    def pack_in_pytorch() -> None:
        _pool(x.transpose(0, 1).contiguous()[:, tiles.rows_nB], tiles)

    def unpack_in_pytorch() -> None:
        out = fine.flatten(1, 2)[:, tiles.places_S]
        gated = means[:, tiles.tiles_S].mul_(gate.transpose(0, 1))
        gated.add_(out).to(x.dtype).transpose(0, 1).contiguous()

    passes = {
        "pack_tiles": (
            lambda: pack_tiles(x, tiles.rows_nB, tiles.sizes_n),
            pack_in_pytorch,
            row_bytes + tile_bytes + mean_bytes,
        ),
        "unpack_tiles": (
            lambda: unpack_tiles(fine, means, gate, tiles.rows_nB, tiles.sizes_n, tiles.num_rows),
            unpack_in_pytorch,
            3 * row_bytes + mean_bytes,
        ),
    }
    for name, (kernel, reference, moved) in passes.items():
        for variant, run in (("cuda", kernel), ("torch", reference)):
            timing = measure(run)
            rate = moved / timing.median_ms / 1e6
            report(f"{name}, 14 heads, 10 s clip", variant, timing, gb_per_s=rate, of_roof=rate / roof)

    scores = torch.randn(HEADS, n, n, device="cuda")
    video = scores[:, P:, P:].contiguous()
    case = f"choose {k} of {V} tiles, 14 heads"
    report(case, "cuda", measure(lambda: choose_tiles(scores, P, k)))
    report(case, "torch.topk alone", measure(lambda: video.topk(k)))
    report(case, "torch.topk alone, not sorted", measure(lambda: video.topk(k, sorted=False)))
    report(case, "torch", measure(lambda: select_tiles(video, k)))

    between_tiles(HEADS, n, "14 heads, 10 s clip")
    between_tiles(56, 683, "56 heads, 5 s clip")


def between_tiles(heads: int, n: int, case: str) -> None:
    q, k, v = torch.randn(3, heads, n, DIM, device="cuda").unbind(0)
    scale = DIM**-0.5
    report(f"score_tiles, {case}", "cuda", measure(lambda: score_tiles(q, k, scale)))
    report(f"score_tiles, {case}", "torch", measure(lambda: score_tiles_ref(q, k, scale)))
    scores, reference = score_tiles(q, k, scale), score_tiles_ref(q, k, scale)
    report(f"coarse_means, {case}", "cuda", measure(lambda: coarse_means(scores, v)))
    report(f"coarse_means, {case}", "torch", measure(lambda: coarse_means_ref(reference, v)))


if __name__ == "__main__":
    main()
