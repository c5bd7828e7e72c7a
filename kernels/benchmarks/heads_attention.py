"""Dense attention of the video decoder's heads of 64 channels, for one unit: 28 tiles of 1,797 tokens, 32 heads.

Inputs are synthetic. FLOP are those of the two products over valid tokens.
"""

# pyright: reportMissingImports=false
import torch
from bench import measure, report, require_passing_tests
from rushes_kernels.heads_attention import attend_heads, attend_heads_ref

TILES, TOKENS, HEADS, DIM = 28, 1797, 32, 64


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_heads.py")
    qkv = torch.randn(TILES, TOKENS, 3 * HEADS, DIM, device="cuda", dtype=torch.float16)
    flop = 4 * TILES * HEADS * TOKENS**2 * DIM
    for variant, operation in (("hopper", attend_heads), ("torch", attend_heads_ref)):
        timing = measure(lambda operation=operation: operation(qkv))
        report("attend_heads, one unit of the decoder", variant, timing, valid_tflops=flop / timing.median_ms / 1e9)


if __name__ == "__main__":
    main()
