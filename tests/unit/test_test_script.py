"""`scripts/test.sh` with a stand-in for pytest: what runs beside what, what is shown, and what a signal ends."""

import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PARTS = ("waiting", "workers", "computing")
# waits until all run, so that a run one after the other would not end
PYTEST = """\
#!{python}
import os, pathlib, signal, sys, time
beside = "no:cacheprovider" in sys.argv
name = "waiting" if not beside else "workers" if "tests/faults" in sys.argv else "computing"
pathlib.Path(name).write_text(" ".join(sys.argv[1:]))
if beside or "--ignore" in sys.argv:
    while not all(os.path.exists(one) for one in {parts}):
        time.sleep(0.01)
try:
    print(f"report of {{name}}, nice {{os.nice(0)}}", flush=True)
    if "STATUS_" + name in os.environ:
        print(f"FAILED tests/test_{{name}}.py::test_it", flush=True)
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
    path.write_text(PYTEST.format(python=sys.executable, seconds=seconds, parts=PARTS))
    path.chmod(0o755)


def run(root: Path, *arguments: str, **statuses: int) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | {f"STATUS_{name}": str(status) for name, status in statuses.items()}
    command = [str(root / "scripts" / "test.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


def test_all_parts_run_at_once_and_are_shown_whole(root: Path) -> None:
    done = run(root)
    assert done.returncode == 0, done.stderr
    here = os.nice(0)
    levels = {"waiting": here, "workers": here, "computing": min(19, here + 10)}
    expected = [f"report of {name}, nice {levels[name]}" for name in PARTS]
    assert done.stdout.splitlines() == expected


def test_what_failed_in_any_part_is_named_at_the_end(root: Path) -> None:
    done = run(root, waiting=1, workers=1)
    failed = [f"FAILED tests/test_{name}.py::test_it" for name in ("waiting", "workers")]
    assert done.stdout.splitlines()[-3:] == [*failed, "make test: the tests named above failed"]


def test_every_test_is_in_one_part(root: Path) -> None:
    """By the tests that pytest finds, whatever folders there are."""
    (root / "tests").symlink_to(ROOT / "tests")
    run(root)
    given: list[str] = []
    ignored: list[str] = []
    for name in PARTS:
        words = (root / name).read_text().split()
        assert words[words.index("-m") + 1 :][:2] == ["not", "long"]
        for before, word in pairwise(words):
            if word.startswith("tests/"):
                (ignored if before == "--ignore" else given).append(word)
    assert len(set(given)) == len(given)
    # what one part leaves out another has
    assert set(ignored) <= set(given)
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    for file in files:
        holders = [one for one in given if file.is_relative_to(one)]
        left_out = sum(file.is_relative_to(one) and one != "tests/faults" for one in ignored)
        assert len(holders) - left_out == 1, (file, holders)


@pytest.mark.parametrize(("statuses", "status"), [((0, 0, 1), 1), ((0, 2, 0), 2), ((1, 0, 0), 1), ((3, 1, 1), 3)])
def test_the_failure_of_any_part_is_one(root: Path, statuses: tuple[int, ...], status: int) -> None:
    done = run(root, **dict(zip(PARTS, statuses, strict=True)))
    assert done.returncode == status
    assert "report of computing" in done.stdout


def test_arguments_go_to_one_pytest(root: Path) -> None:
    done = run(root, "tests/unit", "-k", "canvas", waiting=5)
    assert done.returncode == 5
    assert (root / "waiting").read_text() == "tests/unit -k canvas"
    assert not (root / "computing").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_parts(root: Path, number: signal.Signals, status: int) -> None:
    stand_in(root, seconds=600)
    with subprocess.Popen(
        [str(root / "scripts" / "test.sh")], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        wait_until(lambda: len(list(root.glob("*.runs"))) == 3)
        if number is signal.SIGINT:
            # as a terminal does
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        report = running.stdout.read()
        assert running.wait(60) == status
    assert [line.split(",")[0] for line in report.splitlines()] == [f"report of {name}" for name in PARTS]
    assert {path.name for path in root.glob("*.interrupted")} == {f"{name}.interrupted" for name in PARTS}
