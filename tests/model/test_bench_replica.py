"""`rushes bench replica` with ranks on the CPU: its figures, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.bench_ranks import exposure
from rushes_cli.bench_replica import judge
from rushes_cli.main import main
from rushes_core.errors import InvalidOutput
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "demo"
    write_tiny_checkpoint(path, profile="demo")
    return path


def bench(checkpoint: Path, *options: str) -> int:
    clip = ["--size", "32x32", "--tokens", "9", "--warm-up", "0", "--repeat", "1"]
    return main(["bench", "replica", "--weights", str(checkpoint), "--device", "cpu", *clip, *options])


def test_two_ranks_have_their_figures(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    everything = ["--check", "--tune", "--timeline", str(tmp_path / "trace"), "--jobs", "2", "--job-sizes", "32x32"]
    assert bench(checkpoint, "--sp", "2", *everything) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    loaded, check, graphs, clip, timeline, tune, jobs = lines
    assert len(loaded["ranks"]) == 2
    for errors in check["check"]:
        assert list(errors) == ["block 0", "block 1", "latents"]
        # sums of products in another order, in fp32
        assert all(error["sp"] < 1e-5 for error in errors.values())
    # four units on the first rank; three, and the sound, on the last one
    assert graphs["graphs"] == [{"results": 4, "differ": 0}] * 2
    assert (clip["case"], clip["sp"], clip["clips"]) == ("5 s, 9 tokens, 32x32", 2, 1)
    stages = [clip[name] for name in ("encoding", "denoising", "decoding", "finishing")]
    assert sum(stages) == pytest.approx(clip["total"], abs=1e-3)
    assert len(clip["peak_gib"]) == 2
    assert all(0 < one["transfers_ms"] < one["step_ms"] for one in timeline["timeline"])
    assert len(list((tmp_path / "trace").iterdir())) == 2
    assert {"chunks of 1024", "1 parts", "copies instead of transfers"} < set(tune["tune"])
    assert [one["clips"] for one in jobs["jobs"]] == [2, 2]
    assert [one["units"] for one in jobs["jobs"]] == [6, 6]


def test_ranks_that_are_wrong_get_no_figures() -> None:
    right = {"block 0": {"sp": 5e-3, "noise": 4e-3}, "latents": {"sp": 0.0, "noise": 0.0}}
    judge([right, right])
    for error in (1e-2, float("nan")):
        wrong: dict[str, Any] = right | {"latents": {"sp": error, "noise": 4e-3}}
        with pytest.raises(InvalidOutput, match="no figures: latents of rank 1 is off by"):
            judge([right, wrong])


def test_a_checkpoint_that_is_not_there_is_told_before_ranks_start(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(checkpoint.parent / "nowhere", "--sp", "2") == 1
    assert capfd.readouterr().err == f"rushes bench: {checkpoint.parent / 'nowhere'}: no such directory\n"


def test_ranks_that_cannot_be_loaded_end_it(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(checkpoint, "--sp", "2", "--option", "attention=hopper") == 1
    assert "failed to wait_for_all: ValueError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sp", "3"], "--sp must be one of 1, 2, 4, 7, 8, got 3"),
        (["--sp", "2", "--jobs", "-1"], "--jobs must be at least 0, got -1"),
        (["--sp", "2", "--job-sizes", "31x17"], "--job-sizes: width and height must be multiples of 32 up to 4096"),
        (["--sp", "2", "--option", "attention=nowhere"], "--option: attention must be one of hopper, triton, torch"),
        (["--sp", "2", "--option", "speed=9"], "--option: this pipeline takes the options attention=PROVIDER, "),
    ],
)
def test_what_is_not_served_is_refused_before_ranks_start(
    options: list[str], message: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # the checkpoint would be missed next
    assert bench(checkpoint.parent / "nowhere", *options) == 2
    assert f"rushes bench: {message}" in capfd.readouterr().err


def test_synthetic_weights_are_refused_without_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(Path("synthetic"), "--sp", "2") == 2
    assert capfd.readouterr().err == "rushes bench: --weights synthetic needs CUDA devices\n"


def test_transfers_are_exposed_where_nothing_is_computed() -> None:
    work = [
        ("gemm", 0.0, 4.0),
        ("ncclDevKernel_AllGather", 1.0, 3.0),
        ("ncclDevKernel_SendRecv", 5.0, 8.0),
        ("norm", 7.0, 9.0),
        ("gemm", 10.0, 11.0),
    ]
    assert exposure(work) == {"step_ms": 11.0, "transfers_ms": 5.0, "exposed_ms": 2.0, "idle_ms": 2.0}
