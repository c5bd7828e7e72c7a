"""Linear layers with what follows them: the transformer's with 38,710 rows of a 5 s clip, the decoder's with one unit.

Inputs are synthetic. FLOP are those of the products. `apart` is the product by cuBLAS and what follows as a kernel of
its own: `swiglu`, `norm_rotate_heads_`.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench import measure, report, require_passing_tests
from rushes_kernels.linear import gated_linear, project_heads
from rushes_kernels.norm import norm_rotate_heads_
from rushes_kernels.swiglu import swiglu
from torch import Tensor

TRANSFORMER_ROWS, TRANSFORMER_WIDTH, TRANSFORMER_INNER = 38_710, 5376, 14_336
TILES, HEAD, ANGLES = 28, 64, 24
DECODER_ROWS, DECODER_WIDTH, DECODER_INNER = TILES * 1797, 2048, 8192
EPS = 1e-5


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_linear.py")
    bf16, fp16 = torch.bfloat16, torch.float16
    gated("gated_linear, transformer", TRANSFORMER_ROWS, TRANSFORMER_WIDTH, TRANSFORMER_INNER, bf16, biased=False)
    gated("gated_linear, decoder", DECODER_ROWS, DECODER_WIDTH, DECODER_INNER, fp16, biased=True)
    heads("project_heads, decoder")


def gated(case: str, rows: int, channels: int, inner: int, dtype: torch.dtype, *, biased: bool) -> None:
    x, weight, bias = layer(rows, channels, 2 * inner, dtype)
    given = bias if biased else None
    flop = 2 * rows * channels * 2 * inner
    compare(case, flop, lambda: gated_linear(x, weight, given), lambda: swiglu(F.linear(x, weight, given)))


def heads(case: str) -> None:
    x, weight, bias = layer(DECODER_ROWS, DECODER_WIDTH, 3 * DECODER_WIDTH, torch.float16)
    x = x.unflatten(0, (TILES, -1))
    cos, sin = (torch.randn(DECODER_ROWS // TILES, ANGLES, device="cuda") for _ in range(2))
    num_normed = 2 * DECODER_WIDTH // HEAD
    compare(
        case,
        2 * DECODER_ROWS * DECODER_WIDTH * 3 * DECODER_WIDTH,
        lambda: project_heads(x, weight, bias, HEAD, num_normed, cos, sin, EPS),
        lambda: norm_rotate_heads_(F.linear(x, weight, bias).unflatten(-1, (-1, HEAD)), num_normed, cos, sin, EPS),
    )


def layer(rows: int, channels: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, channels, device="cuda").to(dtype)
    weight = (torch.randn(width, channels, device="cuda") * channels**-0.5).to(dtype)
    return x, weight, torch.randn(width, device="cuda").to(dtype)


def compare(case: str, flop: int, together: Callable[[], object], apart: Callable[[], object]) -> None:
    for variant, run in (("together", together), ("apart", apart)):
        timing = measure(run)
        report(case, variant, timing, valid_tflops=flop / timing.median_ms / 1e9)


if __name__ == "__main__":
    main()
