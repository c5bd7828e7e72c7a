"""One rank of a replica without the others: what it computes, and the bench that times it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rushes_cli.main import main
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.parallel import SequenceParallel
from rushes_worker.transport import LocalCopies
from support.parallel import run_ranks
from support.rendering import render_as, render_recording, request
from support.transport import Replaying


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "split"
    write_tiny_checkpoint(path, profile="split")
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks of several on one machine have, or sums would be made in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_alone_computes_what_it_computes_among_others(checkpoint: Path, size: int) -> None:
    # six units: more ranks than units for eight
    one = request(prompt="x", width=32, height=32)
    for rank, (expected, arrived) in enumerate(run_ranks(render_recording, size, checkpoint, one)):
        if rank not in (0, size - 1):
            continue
        others = Replaying(arrived)
        alone = render_as(SequenceParallel(rank, size, "cpu", others), checkpoint, one)
        assert others.is_over
        assert sorted(alone.units) == sorted(expected.units) == list(range(rank, 6, size))
        assert all(np.array_equal(alone.units[unit], expected.units[unit]) for unit in expected.units)
        assert (alone.samples is None) == (expected.samples is None) == (rank < size - 1)
        if expected.samples is not None:
            assert np.array_equal(alone.samples, expected.samples)


def test_copies_write_as_much_as_would_arrive() -> None:
    copies = LocalCopies()
    part = torch.arange(6.0).view(3, 2)
    whole = torch.full((12, 2), torch.nan)
    copies.all_gather(whole, part).wait()
    assert torch.equal(whole, part.repeat(4, 1))
    for rows in (2, 3, 7):
        received = torch.full((rows, 2), torch.nan)
        copies.all_to_all(received, part, [0, rows], [0, 3]).wait()
        assert torch.equal(received, part.repeat(3, 1)[:rows])
    copies.all_to_all(received, part[:0], [0, 7], [0, 0]).wait()
    assert not received.any()


@pytest.mark.parametrize(("sp", "rank", "units"), [(1, 0, 7), (2, 0, 4), (8, 7, 0)])
def test_bench_shows_times_and_memory_of_a_share(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], sp: int, rank: int, units: int
) -> None:
    clip = ["--size", "32x32", "--tokens", "9", "--seconds", "5", "--warm-up", "0"]
    place = ["--sp", str(sp), "--rank", str(rank), "--device", "cpu"]
    assert main(["bench", "share", "--weights", str(checkpoint), *place, *clip]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (figures["sp"], figures["rank"], figures["units"], figures["clips"]) == (sp, rank, units, 1)
    assert figures["case"] == "5 s, 9 tokens, 32x32"
    stages = [figures[name] for name in ("encoding", "denoising", "decoding")]
    assert all(seconds > 0 for seconds in stages)
    assert figures["sum"] == pytest.approx(sum(stages), abs=2e-3)
    assert figures["peak_gib"] >= figures["resident_gib"] > 0


def test_rank_must_be_one_of_the_replica(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "share", "--weights", "synthetic", "--sp", "2", "--rank", "2"]) == 2
    assert capsys.readouterr().err == "rushes bench: --rank must be in 0..1, got 2\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sp", "3", "--device", "cpu"], "--sp must be one of 1, 2, 4, 7, 8, got 3"),
        (["--sp", "0", "--device", "cpu"], "--sp must be one of 1, 2, 4, 7, 8, got 0"),
        (["--sp", "2", "--device", "tpu"], "--device must be cpu, cuda or cuda:N, got tpu"),
        (["--sp", "2", "--device", "meta"], "--device must be cpu, cuda or cuda:N, got meta"),
        (["--sp", "2", "--device", "cpu"], "--weights synthetic needs a CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_made(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rushes_cli.bench_share.synthetic_checkpoint", None)
    assert main(["bench", "share", "--weights", "synthetic", *options]) == 2
    assert capsys.readouterr().err == f"rushes bench: {message}\n"
