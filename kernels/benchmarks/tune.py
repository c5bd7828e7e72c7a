"""Choose the configurations of `norm_rows` for this GPU and write them to rushes_kernels/tuned.json.

Shapes are those of the released model in a 5 s clip: the transformer's residual, and one unit of the video decoder.
Kernels read the file when they are first used; nothing is tuned while a clip is rendered.
"""

# pyright: reportMissingImports=false
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from bench import measure, require_passing_tests
from rushes_kernels.norm import Update
from rushes_kernels.row_kernels import RowConfig, norm_rows, row_config, tuned_key

TUNED = Path(__file__).parents[1] / "rushes_kernels" / "tuned.json"
SHAPES = [(38_710, 5376, torch.bfloat16, torch.bfloat16), (28 * 1797, 2048, torch.float32, torch.float16)]
WARPS, THREADS, BLOCKS = (2, 3, 4, 6, 7, 8), (384, 512, 640, 768, 896, 1024), (4, 6, 8, 16, 32)


def main() -> None:
    require_passing_tests("tests/gpu/test_kernel_rows.py")
    major, minor = torch.cuda.get_device_capability()
    tuned = json.loads(TUNED.read_text())
    tuned[f"{major}.{minor}"] = {
        tuned_key(columns, residual): asdict(best(rows, columns, residual, layer))
        for rows, columns, residual, layer in SHAPES
    }
    TUNED.write_text(json.dumps(tuned, indent=2, sort_keys=True) + "\n")


def best(rows: int, columns: int, residual: torch.dtype, layer: torch.dtype) -> RowConfig:
    """The fastest configuration with an update and modulation; the first ones are told on standard error."""
    x = torch.randn(rows, columns, device="cuda").to(residual)
    gate, scale, shift = (0.1 * torch.randn(3, 1, columns, device="cuda")).to(residual).unbind(0)
    update = Update(torch.randn(rows, columns, device="cuda").to(layer), gate)
    weight = torch.ones(columns, device="cuda", dtype=residual)

    def time(config: RowConfig, launches: int) -> float:
        return measure(
            lambda: norm_rows(x, weight, 1e-5, update, scale, shift, None, False, layer, config),
            launches=launches,
            warm_up=2,
        ).median_ms

    groups = columns // (4 if residual == torch.float32 else 8)
    configs = {
        RowConfig(warps, threads // (32 * warps) * 32 * warps, blocks)
        for warps, threads, blocks in product(WARPS, THREADS, BLOCKS)
        # whole groups a thread, and up to seven of them, or a row does not fit the registers
        if groups % (32 * warps) == 0 and groups <= 7 * 32 * warps <= 7 * threads
    }
    times = {config: time(config, 9) for config in configs}
    ranking = sorted(times, key=lambda config: times[config])
    moved = 2 * x.nbytes + 2 * update.rows_SC.nbytes
    now = row_config(columns, residual, x.device)
    print(f"{tuned_key(columns, residual)}: now {now}, {time(now, 20):.4f} ms", file=sys.stderr)
    for config in ranking[:6]:
        print(f"  {config} {times[config]:.4f} ms, {moved / times[config] / 1e6:,.0f} GB/s", file=sys.stderr)
    return ranking[0]


if __name__ == "__main__":
    main()
