"""The passes over rows, heads and pictures against their roof, at the released model's sizes in a 5 s clip.

Inputs are synthetic. The roof of a pass is the rate of a device copy in the same run; bytes are those that must move:
every input read once, every result written once.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable

import torch
from bench import measure, report, require_passing_tests
from rushes_kernels import norm
from rushes_kernels.norm import HeadNorm, Update, norm_rotate_heads_, norm_rows_, rms_norm_rotate
from rushes_kernels.pictures import (
    stitch_patches,
    stitch_patches_ref,
    to_pixels,
    to_pixels_ref,
    to_yuv420,
    to_yuv420_ref,
)
from rushes_kernels.swiglu import swiglu, swiglu_ref
from rushes_kernels.tile_kernels import pack_heads, pack_tiles
from rushes_kernels.video_sparse_attention import tile_map
from torch import Tensor

TRANSFORMER_WIDTH, TRANSFORMER_INNER, HEADS, DIM, ANGLES = 5376, 14336, 56, 128, 48
TILES, TOKENS, DECODER_WIDTH = 28, 1797, 2048
UNIT_FRAMES, HEIGHT, WIDTH = 28, 768, 1344
EPS = 1e-5


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_rows.py", "tests/gpu/test_kernel_pictures.py")
    source = randn(1 << 30)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source))
    roof = 2 * source.nbytes / timing.median_ms / 1e6
    report("copy of 2 GiB", "torch", timing, gb_per_s=roof)
    cases = (
        *(transformer_norm, transformer_swiglu, heads_of_attention),
        *(decoder_norm, decoder_swiglu, decoder_heads, decoder_canvas, decoder_pixels, decoder_yuv),
    )
    for case in cases:
        name, kernel, reference, moved = case()
        for variant, run in (("cuda", kernel), ("torch", reference)):
            timing = measure(run)
            rate = moved / timing.median_ms / 1e6
            report(name, variant, timing, gb_per_s=rate, of_roof=rate / roof)


Case = tuple[str, Callable[[], object], Callable[[], object], int]
"""Name, kernel, reference, and bytes that must move."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def transformer_norm() -> Case:
    tiles = tile_map([1000, 414], (37, 24, 42))
    x, added, weight = (randn(*shape, TRANSFORMER_WIDTH) for shape in ((tiles.num_rows,), (tiles.num_rows,), ()))
    gate, scale, shift = (0.1 * randn(3, 6, TRANSFORMER_WIDTH)).unbind(1)[:3]
    tags = torch.zeros(tiles.num_rows, device="cuda", dtype=torch.uint8)
    tags[:1000], tags[1000:1414] = 1, 2

    def run(operation: Callable[..., Tensor]) -> Tensor:
        return operation(x, weight, EPS, update=Update(added, gate), scale_MC=scale, shift_MC=shift, tags_S=tags)

    return (
        "norm_rows, transformer",
        lambda: run(norm_rows_),
        lambda: run(norm.norm_rows_ref_),
        2 * x.nbytes + 2 * added.nbytes,
    )


def transformer_swiglu() -> Case:
    x = randn(38_710, 2 * TRANSFORMER_INNER)
    return "swiglu, transformer", lambda: swiglu(x), lambda: swiglu_ref(x), x.nbytes * 3 // 2


def heads_of_attention() -> Case:
    tiles = tile_map([1000, 414], (37, 24, 42)).to("cuda")
    q, k, v, _ = randn(tiles.num_rows, 4, HEADS, DIM).unbind(1)
    cos, sin = (randn(tiles.num_rows, ANGLES, dtype=torch.float32) for _ in range(2))
    head_norm = HeadNorm(randn(DIM), randn(DIM), cos, sin, EPS)

    def one_after_the_other() -> None:
        for heads, weight in ((q, head_norm.q_weight_D), (k, head_norm.k_weight_D)):
            pack_tiles(rms_norm_rotate(heads, weight, cos, sin, EPS), tiles.rows_nB, tiles.sizes_n)
        pack_tiles(v, tiles.rows_nB, tiles.sizes_n)

    return (
        "pack_heads, q, k and v of 56 heads",
        lambda: pack_heads(q, k, v, head_norm, tiles.rows_nB, tiles.sizes_n),
        one_after_the_other,
        3 * 2 * (q.numel() + tiles.num_tiles * tiles.tile_rows * HEADS * DIM),
    )


def decoder_norm() -> Case:
    x = randn(TILES * TOKENS, DECODER_WIDTH, dtype=torch.float32)
    weight, gate = randn(DECODER_WIDTH, dtype=torch.float32), 0.1 * randn(1, DECODER_WIDTH, dtype=torch.float32)
    update = Update(randn(TILES * TOKENS, DECODER_WIDTH, dtype=torch.float16), gate)
    return (
        "norm_rows, decoder",
        lambda: norm_rows_(x, weight, EPS, update=update, dtype=torch.float16),
        lambda: norm.norm_rows_ref_(x, weight, EPS, update=update, dtype=torch.float16),
        2 * x.nbytes + 2 * update.rows_SC.nbytes,
    )


def decoder_swiglu() -> Case:
    x = randn(TILES * TOKENS, 8 * DECODER_WIDTH, dtype=torch.float16)
    return "swiglu, decoder", lambda: swiglu(x), lambda: swiglu_ref(x), x.nbytes * 3 // 2


def decoder_heads() -> Case:
    heads = randn(TILES, TOKENS, 96, 64, dtype=torch.float16)
    cos, sin = (randn(TOKENS, 24, dtype=torch.float32) for _ in range(2))
    return (
        "norm_rotate_heads, q and k of the decoder",
        lambda: norm_rotate_heads_(heads, 64, cos, sin, EPS),
        lambda: norm.norm_rotate_heads_ref_(heads, 64, cos, sin, EPS),
        heads.nbytes * 4 // 3,
    )


def decoder_canvas() -> Case:
    patches = randn(TILES, TOKENS, 3 * 4 * 16**2, dtype=torch.float16)
    canvas = randn(3, UNIT_FRAMES, HEIGHT, WIDTH, dtype=torch.float32)
    where = (patches, (0, 160, 336, 512), (0, 176, 352, 528, 704, 896, 1088), (256, 256), 16, canvas)
    return (
        "stitch_patches, decoder",
        lambda: stitch_patches(*where),
        lambda: stitch_patches_ref(*where),
        patches[:, :-5].numel() * patches.element_size() + canvas.nbytes,
    )


def decoder_pixels() -> Case:
    frames = randn(3, UNIT_FRAMES, HEIGHT, WIDTH, dtype=torch.float32)
    pixels = torch.empty(UNIT_FRAMES, HEIGHT, WIDTH, 3, dtype=torch.uint8, device="cuda")
    where = (frames, (0.229, 0.224, 0.225), (0.485, 0.456, 0.406), pixels)
    return (
        "to_pixels, decoder",
        lambda: to_pixels(*where),
        lambda: to_pixels_ref(*where),
        frames.nbytes + pixels.nbytes,
    )


def decoder_yuv() -> Case:
    frames = randn(3, UNIT_FRAMES, HEIGHT, WIDTH, dtype=torch.float32)
    yuv = torch.empty(UNIT_FRAMES, HEIGHT * 3 // 2, WIDTH, dtype=torch.uint8, device="cuda")
    where = (frames, (0.229, 0.224, 0.225), (0.485, 0.456, 0.406), yuv)
    return (
        "to_yuv420, decoder",
        lambda: to_yuv420(*where),
        lambda: to_yuv420_ref(*where),
        frames.nbytes + yuv.nbytes,
    )


if __name__ == "__main__":
    main()
