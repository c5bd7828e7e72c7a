"""What the command line says without any server: usage, settings, progress, signals."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.main import main
from rushes_cli.signals import Interrupted, deferred, interruptible
from rushes_cli.terminal import ProgressLine, describe
from rushes_core.settings import get_settings
from support.worker import write_contract

VIDEO: dict[str, Any] = {"status": "in_progress", "phase": "denoising", "progress": 50}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RUSHES_")]:
        monkeypatch.delenv(name)
    get_settings.cache_clear()


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("rushes 0.")


def test_ctrl_c_while_a_command_is_read_in_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rushes_cli.main.import_module", interrupted)
    assert main(["campaign", "list"]) == 130
    assert capsys.readouterr().err == "rushes: interrupted\n"


@pytest.mark.parametrize("lines", [1, 50_000])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(lines: int) -> None:
    program = f"""
import sys
from rushes_cli import main

def run(arguments):
    sys.stdin.read()
    for number in range({lines}):
        print("a line of text")
    return 0

parser = main.Parser()
parser.set_defaults(run=run, command="list")
main._parser = lambda words: parser
sys.exit(main.main([]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdin is not None
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        command.stdin.close()
        said = command.stderr.read()
    assert (command.returncode, said) == (141, b"")


def test_a_command_that_speaks_http_reads_in_no_database() -> None:
    program = "import sys, rushes_cli.campaign; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("command", ["api", "worker", "dispatcher", "sweep", "migrate"])
def test_missing_settings_are_named_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for variable in ("RUSHES_DATABASE_URL", "RUSHES_REDIS_URL", "RUSHES_S3_BUCKET", "RUSHES_CHECKPOINT"):
        assert f"{variable} is missing" in message


def test_wrong_settings_are_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL", "S3_BUCKET", "CHECKPOINT"):
        monkeypatch.setenv(f"RUSHES_{name}", "x")
    monkeypatch.setenv("RUSHES_LEASE_SECONDS", "soon")
    monkeypatch.setenv("RUSHES_ENCODER_CRF", "52")
    monkeypatch.setenv("RUSHES_ENCODER", "x265")
    monkeypatch.setenv("RUSHES_REDIS_URL", "http://user:hush@host")
    assert main(["dispatcher"]) == 2
    message = capsys.readouterr().err
    assert "RUSHES_LEASE_SECONDS: Input should be a valid integer" in message
    assert "got 'soon'" in message
    assert "RUSHES_ENCODER_CRF: Input should be less than or equal to 51, got '52'" in message
    assert "RUSHES_ENCODER: Input should be 'libx264' or 'h264_nvenc', got 'x265'" in message
    assert "RUSHES_REDIS_URL: must be redis:" in message
    assert "got http://[...]@host" in message
    assert "hush" not in message


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of servers that do not answer, and a checkpoint without weights."""
    for name, value in {
        "DATABASE_URL": "postgresql+psycopg://a:b@127.0.0.1:1/c",
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "S3_BUCKET": "bucket",
        "CHECKPOINT": str(write_contract(tmp_path / "checkpoint")),
    }.items():
        monkeypatch.setenv(f"RUSHES_{name}", value)


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--node-rank", "1"], 2, "every node but the first is started with --join HOST"),
        (["--nodes", "3"], 2, "nodes must be 1 or 2, got 3"),
        (["--layout", "r2s4", "--nodes", "2"], 2, "layout r2s4 over 2 nodes: expected one replica"),
        (["--join", "host:port"], 2, "--join takes HOST or HOST:PORT, got 'host:port'"),
        (["--join", "host", "--node-rank", "0"], 2, "--node-rank 0: the node that joins is 1"),
        (["--join", "host", "--nodes", "1"], 2, "--nodes 1: the node that joins is one of 2"),
        (["--join", "host", "--layout", "r1s3"], 2, "layout 'r1s3': s must be one of"),
        (["--join", "host", "--layout", "r2s4"], 2, "layout r2s4 over 2 nodes: expected one replica"),
    ],
)
def test_nodes_that_no_replica_can_have_are_refused(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--device", "cpu", *words]) == status
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("attention=fast", "attention must be one of hopper, triton, torch, got 'fast'"),
        ("graph_bytes=5", "this pipeline takes the options attention=PROVIDER, .*, got graph_bytes=5"),
        ("graph-bytes=many", "graph-bytes must be a whole number, got 'many'"),
        ("weights=random", "weights must be synthetic or synthetic:SEED, got 'random'"),
        ("text-capacities=63", "text capacities must be multiples of 64, got '63'"),
    ],
)
def test_options_that_the_pipeline_does_not_take_are_refused_before_ranks_start(
    options: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSHES_PIPELINE_OPTIONS", options)
    assert main(["worker", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert re.search(f"rushes worker: RUSHES_PIPELINE_OPTIONS={options}: {problem}\n$", told), told


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PIPELINE_OPTIONS", "attention=hopper", ": attention=hopper needs a GPU, and this worker runs on the CPU"),
        ("PIPELINE_OPTIONS", "attention=triton", ": attention=triton needs a GPU, and this worker runs on the CPU"),
        (
            "CAPTURE",
            "1344x768x124",
            " captures graphs of a GPU, and this worker runs on the CPU; leave it empty",
        ),
    ],
)
def test_what_only_gpus_do_is_refused_on_the_cpu_before_ranks_start(
    name: str, value: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RUSHES_{name}", value)
    for command in ("worker", "up"):
        assert main([command, "--device", "cpu"]) == 2
        assert capsys.readouterr().err.endswith(f"rushes {command}: RUSHES_{name}={value}{reason}\n")


@pytest.mark.usefixtures("_served")
def test_synthetic_weights_are_refused_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "draws weights of the released sizes on a GPU, found none"
    assert main(["worker", "--device", "cpu", "--weights", "synthetic:3"]) == 2
    assert f"rushes worker: --weights synthetic:3 {refusal}" in capsys.readouterr().err
    monkeypatch.setenv("RUSHES_PIPELINE_OPTIONS", "weights=synthetic")
    get_settings.cache_clear()
    assert main(["worker", "--device", "cpu"]) == 2
    assert f"rushes worker: RUSHES_PIPELINE_OPTIONS=weights=synthetic {refusal}" in capsys.readouterr().err


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("command", ["api", "worker"])
def test_a_checkpoint_that_is_none_is_named_with_its_variable(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUSHES_CHECKPOINT", str(tmp_path / "nothing"))
    assert main([command]) == 1
    assert f"rushes {command}: RUSHES_CHECKPOINT: {tmp_path}/nothing: no such directory" in capsys.readouterr().err


def test_a_variable_that_is_no_setting_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSHES_POLL_SECOND", "3")
    main(["dispatcher"])
    warning = "RUSHES_POLL_SECOND is no setting and changes nothing; did you mean RUSHES_POLL_SECONDS?"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "nonsense", "up --port 70000", "api --workers 0", "demo --seed x", "checkpoint"])
def test_wrong_usage_ends_with_status_2(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("prompt", "told"), [("", "visible text"), ("x" * 65_537, "at most 65536 characters, got 65537")]
)
def test_a_prompt_that_no_model_may_see_starts_no_demo(
    prompt: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--state", str(tmp_path / "state"), "--prompt", prompt]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_a_host_that_is_empty_is_not_every_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["api", "--host", ""])
    assert ended.value.code == 2
    assert "host must be a name or an address, got ''; 0.0.0.0 is every address" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5y", "9999999d", "tomorrow", "", "99999999999999"])
def test_an_expiry_that_is_no_time_is_told_what_times_look_like(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", "create", "farm", f"--expires={text}"])
    assert ended.value.code == 2
    expected = "a time from now in days, hours, minutes and seconds, as 90d, or a time with its zone"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("words", ["up --lay r1s1", "api --work 2", "keys create farm --proj acme", "sweep --orph"])
def test_options_are_not_taken_by_their_beginnings(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_nothing_is_deleted_by_half_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--delete"]) == 2
    assert "--delete belongs to --orphans" in capsys.readouterr().err


def test_progress_names_phase_and_step() -> None:
    video = VIDEO | {"progress_detail": {"completed_steps": 3, "total_steps": 8}}
    assert describe(video) == "[############------------]  50 %  denoising step 3/8"


def test_progress_of_a_waiting_job_is_its_status() -> None:
    assert describe(VIDEO | {"phase": None, "status": "queued", "progress": 0}).endswith("  0 %  queued")


def test_progress_prints_a_plain_line_per_change_without_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        for progress in (0, 0, 50, 50, 100):
            line.show(VIDEO | {"progress": progress})
    assert stream.getvalue().count("\n") == 3
    assert "\r" not in stream.getvalue()


def test_first_signal_interrupts_and_later_ones_do_not_disturb_cleaning_up() -> None:
    events = []

    def work() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                events.append("cleaned")

    with pytest.raises(Interrupted) as interruption:
        work()
    assert events == ["cleaned"]
    assert interruption.value.signum == signal.SIGTERM


def test_deferred_signal_takes_effect_at_the_end_of_the_block() -> None:
    events = []

    def work() -> None:
        with interruptible(), deferred():
            signal.raise_signal(signal.SIGTERM)
            events.append("reached the end")

    with pytest.raises(Interrupted):
        work()
    assert events == ["reached the end"]


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with interruptible(), deferred():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
