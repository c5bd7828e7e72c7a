"""What the load tests say of arguments and variables that cannot be: one line, and no server was started."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "loadtest"

Ended = Callable[[str], tuple[int, str]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Runs a program: exit status and the last line of standard error, before which there is only argparse's usage."""
    for name in [name for name in os.environ if name.startswith("RUSHES_")]:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(PROGRAMS)

    def run(words: str) -> tuple[int, str]:
        name, *arguments = words.split()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as exit_of:
            runpy.run_path(str(PROGRAMS / name), run_name="__main__")
        said = capsys.readouterr()
        assert said.out == ""
        before, _, line = said.err.rstrip("\n").rpartition("\n")
        assert before == "" or before.startswith("usage: "), said.err
        assert isinstance(exit_of.value.code, int)
        return exit_of.value.code, line

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("replica.py --checkpoint x --layout r1s3", "layout 'r1s3': s must be one of 1, 2, 4, 7, 8"),
        ("replica.py --checkpoint x --sizes 480", "a size must be WIDTHxHEIGHT, got 480"),
        ("replica.py --checkpoint x --frames 108", "num_frames=108 is not one of 107, 124"),
        ("replica.py --checkpoint x --jobs -1", "--jobs: must be a whole number of at least 0, got -1"),
        ("replica.py --checkpoint x --device tpu", "--device: invalid choice: 'tpu'"),
        ("api.py --workers 0", "--workers: must be a whole number of at least 1, got 0"),
        ("api.py --seconds 0", "--seconds: must be a number above 0, got 0"),
        ("campaigns.py --lines none", "--lines: must be a whole number of at least 1, got none"),
        ("claim_latency.py --claims 3", "--claims must be at least --connections, 4, got 3"),
        ("media.py finish --seconds 3", "seconds must be between 4 and 15, got 3"),
        ("media.py finish --threads 99", "threads must be a whole number from 1 to 64, got 99"),
        ("media.py many --sizes 4096x768", "a size must be at most 1344x768, got 4096x768"),
        ("media.py many --env NAME", "must be NAME=VALUE, with commas for several, got NAME"),
        ("migration.py --rate inf", "--rate: must be a number above 0, got inf"),
        ("night.py --replicas 1", "--replicas: must be a whole number of at least 2, got 1"),
        ("released_checkpoint.py x --device tpu", "no tensor can be made on tpu"),
        ("throughput.py --processes 0", "--processes: must be a whole number of at least 1, got 0"),
        ("webhooks.py --cases all", "--cases: invalid choice: 'all'"),
        ("webhooks.py --deliveries 3", "--deliveries must be at least --endpoints, 20, got 3"),
    ],
)
def test_arguments_that_cannot_be_are_one_line_and_status_2(ended: Ended, words: str, told: str) -> None:
    status, line = ended(words)
    assert (status, told in line) == (2, True), line
    assert line.startswith(words.split()[0])


def test_a_checkpoint_that_is_none_is_one_line_and_status_1(ended: Ended, tmp_path: Path) -> None:
    assert ended(f"replica.py --checkpoint {tmp_path}/none") == (
        1,
        f"replica.py: --checkpoint {tmp_path}/none: no such directory",
    )


def test_a_variable_that_is_wrong_is_one_line_and_status_2(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSHES_CAPTURE", "64x64x107")
    status, line = ended("migration.py")
    assert status == 2
    assert line.startswith("migration.py: settings: "), line
    assert "canvas 64x64 of 64x64x107 is not one of 1536x672, " in line


def test_a_database_that_is_away_is_one_line_and_status_1(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSHES_DATABASE_URL", "postgresql+psycopg://a:secret@127.0.0.1:1/c")
    monkeypatch.setenv("RUSHES_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("RUSHES_S3_BUCKET", "bucket")
    status, line = ended("migration.py")
    assert (status, line.startswith("migration.py: database: connection failed")) == (1, True), line
    assert "secret" not in line
