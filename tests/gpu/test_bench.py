"""`rushes bench pipeline` on a tiny checkpoint: figures of every stage, and none when a kernel is wrong."""

import json
from pathlib import Path

import pytest
import torch
from rushes_cli.main import main
from rushes_kernels import row_kernels
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "wide"
    write_tiny_checkpoint(path, profile="wide")
    return path


def bench(checkpoint: Path, *options: str) -> int:
    sizes = ["--size", "384x320", "--tokens", "50", "--repeat", "2"]
    return main(["bench", "pipeline", "--weights", str(checkpoint), *sizes, *options])


def test_a_clip_has_its_times(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(checkpoint, "--keep", str(tmp_path / "clip.mp4")) == 0
    lines = capfd.readouterr().out.splitlines()
    figures = json.loads(next(line for line in lines if line.startswith("{")))
    assert figures["case"] == "5 s, 50 tokens, 384x320"
    stages = [figures[name] for name in ("encoding", "denoising", "decoding", "finishing")]
    assert sum(stages) == pytest.approx(figures["total"], rel=0.1)
    assert (tmp_path / "clip.mp4").stat().st_size > 10_000


def test_a_wrong_kernel_gets_no_figures(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = row_kernels.swiglu
    monkeypatch.setattr(row_kernels, "swiglu", lambda x: right(x) * 1.2)
    assert bench(checkpoint) == 1
    shown = capfd.readouterr()
    assert "no figures" in shown.err
    assert "{" not in shown.out


@pytest.mark.parametrize("sp", [1, 2])
def test_a_share_has_its_times_and_its_memory(checkpoint: Path, sp: int, capfd: pytest.CaptureFixture[str]) -> None:
    clip = ["--size", "384x320", "--tokens", "50"]
    assert main(["bench", "share", "--weights", str(checkpoint), "--sp", str(sp), *clip]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures["units"] == (7 if sp == 1 else 4)
    assert all(figures[name] > 0 for name in ("encoding", "denoising", "decoding", "resident_gib"))
    assert figures["peak_gib"] > figures["resident_gib"]
