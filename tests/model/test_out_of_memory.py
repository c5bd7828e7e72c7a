"""What a device without memory looks like to a rank, and what the low-memory plan does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rushes_core.errors import OutOfMemory
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.rank import is_out_of_memory
from support.rendering import RecordingReporter, render_whole, request


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemory("no memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError(), False),
    ],
)
def test_device_without_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_low_memory_plan_decodes_one_tile_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "demo"
    write_tiny_checkpoint(checkpoint, profile="demo")
    pipeline = FastH3Pipeline(checkpoint)
    decode_unit = pipeline._video_vae.decode_unit
    seen: list[int | None] = []

    def spy(latents: Any, *, tile_batch: int | None = None, **others: Any) -> Any:
        seen.append(tile_batch)
        return decode_unit(latents, tile_batch=tile_batch, **others)

    monkeypatch.setattr(pipeline._video_vae, "decode_unit", spy)
    for low_memory in (False, True):
        render_whole(pipeline, request(width=32, height=32, low_memory=low_memory), RecordingReporter())
    assert seen == [None] * 6 + [1] * 6
