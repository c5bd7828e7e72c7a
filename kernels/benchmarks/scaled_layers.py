"""The transformer's feed-forward layer in e4m3 beside bf16: 38,710 rows of a 5 s clip, loops in turn.

Inputs are synthetic. FLOP are those of the products. `apart` is the product of the device's library and what follows as
a kernel of its own, `bf16` what is done without e4m3.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from bench import measure, measure_in_turn, report, require_passing_tests
from rushes_kernels.linear import gated_linear
from rushes_kernels.scaled_linear import quantise_rows, scaled_gated_linear, scaled_linear, scaled_mm
from rushes_kernels.swiglu import swiglu
from torch import Tensor

ROWS, WIDTH, INNER = 38_710, 5376, 14_336


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_linear.py", "tests/gpu/test_kernel_scaled_linear.py")
    x, hidden = rows(WIDTH), rows(INNER)
    up, down = weight(2 * INNER, WIDTH), weight(WIDTH, INNER)
    scaled_x, scaled_hidden, scaled_up, scaled_down = map(quantise_rows, (x, hidden, up, down))
    bf16 = torch.bfloat16

    for name, one in (("normed rows", x), ("hidden rows", hidden)):
        timing = measure(lambda one=one: quantise_rows(one))
        report(f"quantise_rows, {name}", "kernel", timing, gbps=3 * one.numel() / timing.median_ms / 1e6)

    compare(
        "values and gates, gated",
        2 * ROWS * WIDTH * 2 * INNER,
        {
            "bf16": lambda: gated_linear(x, up),
            "e4m3": lambda: scaled_gated_linear(scaled_x, scaled_up, bf16),
            "e4m3 apart": lambda: swiglu(scaled_mm(scaled_x, scaled_up, bf16)),
        },
    )
    out = torch.empty(ROWS, WIDTH, device="cuda", dtype=bf16)
    compare(
        "back to the residual's width",
        2 * ROWS * WIDTH * INNER,
        {
            "bf16": lambda: F.linear(hidden, down),
            "e4m3": lambda: scaled_linear(scaled_hidden, scaled_down, bf16, out),
            "e4m3 apart": lambda: scaled_mm(scaled_hidden, scaled_down, bf16),
        },
    )

    def layer() -> Tensor:
        inner = scaled_gated_linear(quantise_rows(x), scaled_up, bf16)
        return scaled_linear(quantise_rows(inner), scaled_down, bf16, out)

    compare(
        "the whole layer",
        2 * ROWS * WIDTH * 3 * INNER,
        {"bf16": lambda: F.linear(gated_linear(x, up), down), "e4m3": layer},
    )


def rows(channels: int) -> Tensor:
    return torch.randn(ROWS, channels, device="cuda").bfloat16()


def weight(width: int, channels: int) -> Tensor:
    return (torch.randn(width, channels, device="cuda") * channels**-0.5).bfloat16()


def compare(case: str, flop: int, variants: Mapping[str, Callable[[], object]]) -> None:
    for name, timing in measure_in_turn(variants, seconds=0.3).items():
        report(f"{case}, steady", name, timing, valid_tflops=flop / timing.median_ms / 1e9)


if __name__ == "__main__":
    main()
