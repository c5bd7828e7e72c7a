"""What a rank's weights take at the least: a bound that is never above what the rank holds, and near it."""

import gc
from pathlib import Path

import pytest
import torch
from rushes_worker.checkpoint.directory import open_checkpoint
from rushes_worker.checkpoint.released import CONTRACT, with_synthetic_weights
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.parallel import SequenceParallel
from rushes_worker.pipeline.fasth3 import FastH3Pipeline, Precision
from rushes_worker.pipeline.footprint import check_device_holds
from torch import Tensor


def held_bytes(*owners: object) -> int:
    """Of all memory of tensors that can be reached from `owners` through what this package defines."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    waiting = list(owners)
    while waiting:
        one = waiting.pop()
        is_ours = isinstance(one, Tensor | list | tuple | dict) or "rushes" in type(one).__module__
        if id(one) in seen or not is_ours:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            waiting += gc.get_referents(one)
    return sum(found.values())


@pytest.mark.parametrize(("sp", "precision"), [(1, "bf16"), (2, "bf16"), (4, "bf16"), (7, "bf16"), (8, "fp8")])
def test_bound_is_no_more_than_a_rank_holds_and_most_of_it(tmp_path: Path, sp: int, precision: str) -> None:
    write_tiny_checkpoint(tmp_path / "split", profile="split")
    checkpoint = open_checkpoint(tmp_path / "split")
    bound = Precision.of(torch.device("cpu"), precision).least_bytes(checkpoint, sp)
    for rank in {0, sp - 1}:
        parallel = SequenceParallel(rank, sp, "cpu")
        pipeline = FastH3Pipeline(checkpoint, parallel=parallel, options=[f"precision={precision}"])
        held = held_bytes(pipeline._transformer, pipeline._text_encoder, pipeline._video_vae)
        assert 0.6 * held < bound <= held


@pytest.mark.parametrize(
    ("sp", "precision", "gigabytes"), [(1, "bf16", 99), (2, "bf16", 66), (8, "bf16", 41), (1, "fp8", 88)]
)
def test_released_student_on_gpus(tmp_path: Path, sp: int, precision: str, gigabytes: float) -> None:
    checkpoint = with_synthetic_weights(tmp_path, CONTRACT, seed=0, device="cpu")
    bound = Precision.of(torch.device("cuda"), precision).least_bytes(checkpoint, sp)
    assert bound / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_device_that_cannot_hold_the_weights_is_told_with_both_numbers() -> None:
    device = torch.device("cuda:0")
    check_device_holds(10**11, device, 10**11, 1)
    with pytest.raises(ValueError, match=r"cuda:0 has 85\.0 GB of memory, .* one of 1 ranks take at least 99\.2 GB"):
        check_device_holds(99_200_000_000, device, 85_000_000_000, 1)
