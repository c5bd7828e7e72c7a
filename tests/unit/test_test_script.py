"""`scripts/test.sh` with a stand-in for pytest: what runs beside what, what is shown, and what a signal ends."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
# waits until both run, so that a run one after the other would not end
PYTEST = """\
#!{python}
import os, pathlib, signal, sys, time
name = "computing" if "no:cacheprovider" in sys.argv else "waiting"
pathlib.Path(name).write_text(" ".join(sys.argv[1:]))
if name == "computing" or "tests/faults" in sys.argv:
    while not all(os.path.exists(one) for one in ("computing", "waiting")):
        time.sleep(0.01)
try:
    print(f"report of {{name}}, nice {{os.nice(0)}}", flush=True)
    pathlib.Path(name + ".runs").touch()
    time.sleep({seconds})
except KeyboardInterrupt:
    pathlib.Path(name + ".interrupted").touch()
    sys.exit(2)
sys.exit(int(os.environ.get("STATUS_" + name, "0")))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with nothing but the script and the stand-in, which ends at once."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stand_in(tmp_path, seconds=0)
    return tmp_path


def stand_in(root: Path, *, seconds: float) -> None:
    path = root / ".venv" / "bin" / "pytest"
    path.write_text(PYTEST.format(python=sys.executable, seconds=seconds))
    path.chmod(0o755)


def run(root: Path, *arguments: str, **statuses: int) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | {f"STATUS_{name}": str(status) for name, status in statuses.items()}
    command = [str(root / "scripts" / "test.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_both_halves_run_at_once_and_are_shown_whole(root: Path) -> None:
    done = run(root)
    assert done.returncode == 0, done.stderr
    here = os.nice(0)
    expected = [f"report of waiting, nice {here}", f"report of computing, nice {min(19, here + 10)}"]
    assert done.stdout.splitlines() == expected


def test_every_test_is_in_one_half(root: Path) -> None:
    """By the tests that pytest finds, whatever folders there are."""
    (root / "tests").symlink_to(ROOT / "tests")
    run(root)
    waiting, computing = ((root / name).read_text().split() for name in ("waiting", "computing"))
    assert waiting[0] == "--ignore"
    assert computing[:2] == ["-p", "no:cacheprovider"]
    left_out, *folders = waiting[1:]
    given = [*folders, *computing[2:]]
    assert len(set(given)) == len(given)
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    for file in files:
        holders = [one for one in given if file.is_relative_to(one)]
        assert len(holders) == (2 if file == Path(left_out) else 1), (file, holders)


@pytest.mark.parametrize(("waiting", "computing", "status"), [(0, 1, 1), (1, 0, 1), (3, 1, 3)])
def test_the_failure_of_either_half_is_one(root: Path, waiting: int, computing: int, status: int) -> None:
    done = run(root, waiting=waiting, computing=computing)
    assert done.returncode == status
    assert "report of computing" in done.stdout


def test_arguments_go_to_one_pytest(root: Path) -> None:
    done = run(root, "tests/unit", "-k", "canvas", waiting=5)
    assert done.returncode == 5
    assert (root / "waiting").read_text() == "tests/unit -k canvas"
    assert not (root / "computing").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_both_halves(root: Path, number: signal.Signals, status: int) -> None:
    stand_in(root, seconds=600)
    with subprocess.Popen(
        [str(root / "scripts" / "test.sh")], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        wait_until(lambda: len(list(root.glob("*.runs"))) == 2)
        if number is signal.SIGINT:
            # as a terminal does
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        report = running.stdout.read()
        assert running.wait(60) == status
    assert [line.split(",")[0] for line in report.splitlines()] == ["report of waiting", "report of computing"]
    assert {path.name for path in root.glob("*.interrupted")} == {"waiting.interrupted", "computing.interrupted"}
