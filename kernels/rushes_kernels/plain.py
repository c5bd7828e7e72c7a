"""Which operations run as kernels: on CUDA all of them, wherever dtype and shape suit.

`compute_plainly` has some computed by their PyTorch reference instead, to measure what a kernel is worth or to find
the one that is at fault.
"""

from collections.abc import Iterable

from torch import Tensor

OPERATIONS = (
    "norm_rows",
    "swiglu",
    "gated_linear",
    "quantise_rows",
    "scaled_linear",
    "pack_heads",
    "score_tiles",
    "norm_rotate_heads",
    "project_heads",
    "attend_heads",
    "stitch_patches",
    "to_pixels",
    "to_yuv420",
)

_plain: set[str] = set()


def compute_plainly(operations: Iterable[str]) -> None:
    """From now on, in this process, exactly these operations are computed by their references.

    Raises:
        ValueError: there is no such operation.
    """
    wanted = set(operations)
    if unknown := wanted - set(OPERATIONS):
        raise ValueError(f"no such operation: {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    _plain.clear()
    _plain.update(wanted)


def may_run_kernel(operation: str, x: Tensor) -> bool:
    assert operation in OPERATIONS
    return x.is_cuda and operation not in _plain
