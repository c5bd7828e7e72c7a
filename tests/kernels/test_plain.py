import pytest
import torch
from rushes_kernels.plain import OPERATIONS, compute_plainly, may_run_kernel


def test_unknown_operation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no such operation: norms; there are norm_rows"):
        compute_plainly(["norm_rows", "norms"])


def test_cpu_tensors_never_reach_a_kernel() -> None:
    assert not any(may_run_kernel(operation, torch.zeros(1)) for operation in OPERATIONS)
