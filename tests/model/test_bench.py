"""What `rushes bench pipeline` refuses. Its figures need a GPU: see tests/gpu."""

import re

import pytest
import torch
from rushes_cli.bench_case import Case
from rushes_cli.bench_pipeline import check_kernels, transformer_flop
from rushes_cli.main import main
from rushes_core.errors import InvalidOutput
from rushes_kernels import plain
from rushes_worker.checkpoint.released import CONTRACT, TRANSFORMER
from torch import Tensor


class Parts:
    """Stands for a loaded model whose kernels are off by `error`."""

    def __init__(self, error: float) -> None:
        self._error = error

    def block_update(self) -> Tensor:
        exact = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return exact if plain._plain else exact * (1 + self._error)

    unit = block_update


def test_needs_a_cuda_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "pipeline", "--weights", "synthetic"]) == 1
    assert capsys.readouterr().err == "rushes bench: needs a CUDA device\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--size", "1344"], "--size must be WIDTHxHEIGHT, got 1344"),
        (["--seconds", "3"], "--seconds must be between 4 and 15, got 3"),
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--size", "31x17"], "--size: width and height must be multiples of 32 up to 4096, got 31x17"),
        (["--size", "0x32"], "--size: width and height must be multiples of 32 up to 4096, got 0x32"),
        (["--tokens", "1000", "-4"], "--tokens must be in 1..16384, got -4"),
        (["--tokens", "16385"], "--tokens must be in 1..16384, got 16385"),
        (["--keep", "/no/such/clip.mp4"], "--keep /no/such/clip.mp4: there is no folder /no/such"),
        (["--option", "precision=int8"], "--option: precision must be one of bf16, fp8, got 'int8'"),
        (["--seed", "-1"], "--seed must be in 0..9223372036854775807, got -1"),
    ],
)
def test_wrong_usage_is_one_line(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--weights", "synthetic", *option]) == 2
    assert capsys.readouterr().err == f"rushes bench: {message}\n"


@pytest.mark.parametrize("action", [["pipeline"], ["share", "--sp", "2"], ["replica", "--sp", "2"]])
def test_providers_of_attention_are_those_there_are(action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *action, "--weights", "synthetic", "--attention", "nowhere"])
    assert ended.value.code == 2
    assert re.search("--attention: invalid choice: 'nowhere'.*hopper.*triton.*torch", capsys.readouterr().err)


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_kernels_that_are_wrong_get_no_figures(error: float) -> None:
    with pytest.raises(InvalidOutput, match="no figures: a block of the transformer is off by"):
        check_kernels(Parts(error))  # type: ignore[arg-type]


def test_kernels_that_round_otherwise_pass(capsys: pytest.CaptureFixture[str]) -> None:
    check_kernels(Parts(0.005))  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("relative error 5.00e-03") == 2
    assert not plain._plain


@pytest.mark.parametrize(
    ("seconds", "tokens", "teraflop"),
    [(5, 1_000, 17_555), (10, 1_000, 40_395), (15, 1_000, 69_602), (5, 10_000, 29_530), (15, 10_000, 96_310)],
)
def test_work_of_the_transformer_is_the_published_count(seconds: float, tokens: int, teraflop: float) -> None:
    work = transformer_flop(TRANSFORMER, CONTRACT, Case(1344, 768, seconds, tokens))
    # the table leaves the coarse branch in, 0.03 %
    assert work / 1e12 == pytest.approx(teraflop, rel=1e-3)
