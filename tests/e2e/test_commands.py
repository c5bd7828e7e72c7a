"""`rushes demo` and `rushes up` as an operator sees them."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rushes_worker.media.validate import validate_clip
from support.commands import RUSHES, Up, clean_environment, descendants, processes_of, run
from support.waiting import wait_until
from support.worker import SCRIPTED

TESTS = Path(__file__).parents[1]
PLACES = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
REQUEST = {"prompt": "A paper boat drifts down a rain gutter", "seconds": "4", "size": "480x480"}


class Runs:
    """Runs of `rushes up` on one state directory, one after another, so that it is cold only once and that tests share
    a run until one of them ends it."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._last: Up | None = None

    def running(self) -> Up:
        """The last one, or the next where that has ended."""
        if self._last is None or self._last.popen.poll() is not None:
            self.end()
            self._last = Up(self._state_dir, env=scripted(SCRIPTED))
        return self._last

    def end(self) -> Path:
        """The state directory, which nothing runs on."""
        if self._last is not None:
            self._last.__exit__()
            self._last = None
        return self._state_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("e2e") / "state")
    yield runs
    runs.end()


@pytest.fixture
def state(runs: Runs) -> Path:
    """A state directory that nothing runs on; tests use it one after another."""
    return runs.end()


@pytest.fixture
def up(runs: Runs) -> Up:
    """A run that is ready. A test may end it."""
    return runs.running()


def scripted(pipeline: str) -> dict[str, str]:
    """Variables of a pipeline of `support`, for what does not depend on what is rendered."""
    return {
        "RUSHES_PIPELINE": pipeline,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *PLACES]),
        "RUSHES_SHUTDOWN_GRACE_SECONDS": "1",
    }


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_demo_renders_a_clip_and_says_what_it_is(state: Path) -> None:
    cwd = state.parent
    done = run("demo", "--state", state, "--seconds", "4", "--size", "480x480", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    (clip,) = (cwd / "out").iterdir()
    facts = validate_clip(clip, width=480, height=480, num_frames=107)
    for said in (
        r"denoising step \d/8",
        rf"{clip.name} \({facts.bytes:,} bytes\)",
        r"107 frames of 480x480 at 24 fps, 4\.458 s",
        r"aac, 2 channels, 32000 Hz",
        rf"s3://rushes/results/\S*{clip.stem}\S*\.mp4 \({facts.bytes:,} bytes",
        r"random weights, so the picture is noise",
        r"everything is stopped",
    ):
        assert re.search(said, done.stdout), (said, done.stdout)
    assert processes_of(state) == []


@pytest.mark.long
def test_demo_that_fails_says_why_and_stops_everything(state: Path) -> None:
    done = run("demo", "--state", state, "--size", "480x480", "--prompt", "a " * 20_000, cwd=state.parent)
    assert done.returncode == 1
    assert re.search(r"rushes demo: POST /v1/videos answered 400: prompt ", done.stderr), done.stderr
    assert processes_of(state) == []


@pytest.mark.parametrize(
    ("command", "pipeline", "message"),
    [
        (
            "up",
            "DyingPipeline",
            r"worker renders nothing: its ranks ended [2-9] times one after another; last lines of ",
        ),
        ("demo", "DyingAtWork", r"video_\w+ failed: .*crashed.*\nlast lines of "),
    ],
)
def test_worker_that_ends_again_and_again_ends_the_run_with_its_last_words(
    state: Path, command: str, pipeline: str, message: str
) -> None:
    clip = ["--seconds", "4", "--size", "480x480"] if command == "demo" else []
    env = scripted(f"support.dying_pipeline:{pipeline}")
    ended = run(command, "--state", state, "--device", "cpu", *clip, cwd=state.parent, env=env)
    assert ended.returncode == 1, ended.stdout
    assert re.search(rf"rushes {command}: {message}\S+/worker\.log:\n", ended.stderr), ended.stderr
    assert "  | last words of a rank" in ended.stderr
    assert processes_of(state) == []


@pytest.mark.parametrize(
    ("command", "name", "value", "message"),
    [
        ("up", "RUSHES_ENCODER_CRF", "99", "settings: RUSHES_ENCODER_CRF: Input should be less than or equal to 51"),
        ("demo", "RUSHES_ENCODER_PRESET", "placebo", "RUSHES_ENCODER_PRESET='placebo' is not one of libx264's: "),
        ("up", "RUSHES_PIPELINE", "nowhere:Pipeline", "RUSHES_PIPELINE=nowhere:Pipeline cannot be imported"),
        (
            "demo",
            "RUSHES_PIPELINE_OPTIONS",
            "attention=x",
            "RUSHES_PIPELINE_OPTIONS=attention=x: attention must be one of ",
        ),
    ],
)
def test_wrong_settings_are_named_before_anything_is_started(
    tmp_path: Path, command: str, name: str, value: str, message: str
) -> None:
    done = run(command, "--state", tmp_path / "state", cwd=tmp_path, env={name: value})
    assert done.returncode == 2
    assert f"rushes {command}: {message}" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --size 31x17", "rushes demo: size must be one of .*31x17"),
        ("demo --seconds 99", "rushes demo: seconds must be between 4 and 15, got 99"),
        ("demo --layout r1s3", "rushes demo: layout 'r1s3': s must be one of"),
        ("up --layout 4", "rushes up: layout '4': expected rRsS"),
    ],
)
def test_arguments_that_cannot_be_served_are_named_before_anything_is_started(
    tmp_path: Path, words: str, message: str
) -> None:
    done = run(*words.split(), "--state", tmp_path / "state", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(message, done.stderr), done.stderr
    assert not list(tmp_path.iterdir())


def test_stopped_run_gives_its_job_back_and_the_next_run_finishes_it(runs: Runs) -> None:
    first = runs.running()
    # longer than a run that ends waits for it
    wanted = REQUEST | {"prompt": "A paper boat [step 0.7]"}
    video = first.client.post("/videos", json=wanted).raise_for_status().json()
    wait_until(lambda: first.video(video["id"])["status"] == "in_progress")
    processes = descendants(first.popen.pid)
    assert first.end(signal.SIGINT) == 0
    assert not any(map(is_alive, processes))
    assert first.output().endswith("stopping ...\nstopped\n")
    second = runs.running()
    wait_until(lambda: second.video(video["id"])["status"] == "completed", timeout_seconds=120)
    content = second.client.get(f"/videos/{video['id']}/content", follow_redirects=True).raise_for_status().content
    assert content[4:8] == b"ftyp"


def test_second_run_on_the_same_state_is_refused(up: Up) -> None:
    refused = run("up", "--state", up.state_dir, cwd=up.state_dir.parent)
    assert refused.returncode == 1
    assert f"{up.state_dir} is in use by process {up.popen.pid}; stop it" in refused.stderr
    assert up.client.get("/models").status_code == 200


def test_taken_port_is_named(up: Up) -> None:
    port, elsewhere = up.client.base_url.port, up.state_dir.with_name("other")
    refused = run("up", "--state", elsewhere, "--port", str(port), cwd=elsewhere.parent)
    assert refused.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in refused.stderr


def test_printed_address_of_the_database_opens_it_for_operators(up: Up) -> None:
    address = re.search(r"export RUSHES_DATABASE_URL='(\S+)'", up.output())
    assert address is not None
    env = clean_environment() | {"RUSHES_DATABASE_URL": address[1]}
    done = subprocess.run([*RUSHES, "projects", "list"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].startswith("default ")


def test_killed_run_leaves_no_process(up: Up) -> None:
    wanted = REQUEST | {"prompt": "A paper boat [step 0.7]"}
    video = up.client.post("/videos", json=wanted).raise_for_status().json()
    wait_until(lambda: up.video(video["id"])["status"] == "in_progress")
    parts = {"postgres", "valkey", "seaweedfs", "api", "dispatcher", "deliver", "loader", "worker"}
    assert parts <= {process.name for process in processes_of(up.state_dir)}
    processes = descendants(up.popen.pid)
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, processes)))


def test_part_that_dies_ends_the_run_with_its_name_and_log(up: Up) -> None:
    dispatcher = next(process for process in processes_of(up.state_dir) if process.name == "dispatcher")
    os.kill(dispatcher.pid, signal.SIGKILL)
    assert up.popen.wait(60) == 1
    assert re.search(r"rushes up: dispatcher ended with status -9; last lines of .*dispatcher\.log:", up.output())
    assert processes_of(up.state_dir) == []


def test_checkpoint_that_cannot_be_served_is_named_before_anything_is_started(tmp_path: Path) -> None:
    missing = tmp_path / "no-checkpoint"
    failed = run("up", "--state", tmp_path / "state", "--checkpoint", missing, cwd=tmp_path)
    assert failed.returncode == 1
    assert f"rushes up: {missing}: no such directory" in failed.stderr
    assert not list(tmp_path.iterdir())
