"""What a device without memory looks like to a rank, and what the low-memory plan does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rushes_core.errors import OutOfMemory
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.parallel import SequenceParallel
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "demo"
    write_tiny_checkpoint(path, profile="demo")
    return path


def test_low_memory_plan_decodes_one_tile_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def fail_for_memory(*_: Any) -> int:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class TestStart:
    def test_rank_of_several_without_memory_for_the_largest_clip_ends_and_one_alone_goes_on(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipeline = FastH3Pipeline(checkpoint)
        monkeypatch.setattr(pipeline._denoiser, "measure", fail_for_memory)
        pipeline._reserve()
        monkeypatch.setattr(pipeline, "_parallel", SequenceParallel(0, 2, torch.device("cpu")))
        with pytest.raises(torch.OutOfMemoryError):
            pipeline._reserve()

    def test_shape_to_be_captured_that_does_not_fit_is_named(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pipeline = FastH3Pipeline(checkpoint, options=["text-capacities=64", "capture=480x480x107"])
        monkeypatch.setattr(pipeline._text, "prepare", fail_for_memory)
        with pytest.raises(ValueError, match="cpu has less memory than 480x480x107x64 of RUSHES_CAPTURE needs"):
            pipeline._capture()
