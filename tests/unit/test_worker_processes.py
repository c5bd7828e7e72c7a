import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr
from rushes_core.settings import ContentDelivery, Settings
from rushes_worker.child import environment_without_secrets, how_it_ended, settings_environment
from rushes_worker.hints import POOL
from rushes_worker.launcher import check_pipeline


def loaded_modules(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `statement`."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


@pytest.mark.parametrize("module", ["launcher", "supervisor", "rank", "devices"])
def test_no_process_loads_torch_before_a_rank_needs_it(module: str) -> None:
    assert "torch" not in loaded_modules(f"import rushes_worker.{module}")


def test_hints_are_not_consumed_in_forked_children() -> None:
    assert POOL == "threads"


def test_child_reads_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        database_url="postgresql+psycopg://user:p%40ss@127.0.0.1/rushes",
        redis_url="redis://:secret@127.0.0.1/0",
        s3_bucket="clips",
        s3_access_key_id="worker",
        s3_secret_access_key=SecretStr("secret"),
        checkpoint=Path("/models/fasth3"),
        lease_seconds=7,
        heartbeat_seconds=1.25,
        content_delivery=ContentDelivery.REDIRECT,
        log_json=False,
    )
    monkeypatch.setenv("RUSHES_POOL", "another")
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings  # pyright: ignore[reportCallIssue]


def test_ranks_inherit_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUSHES_S3_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    env = environment_without_secrets()
    assert "hush" not in env.values()
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exited with status 0"), (3, "exited with status 3"), (-9, "was killed by SIGKILL"), (-64, "SIGRTMAX")],
)
def test_end_of_a_process_is_told_in_words(returncode: int, words: str) -> None:
    assert words in how_it_ended(returncode)


@pytest.mark.parametrize(
    "pipeline",
    [
        "rushes_worker.pipeline.fasth3:FastH3Pipeline",
        # imported there, not made there
        "rushes_worker.pipeline.fasth3:Loader",
        "rushes_worker.loading:LoadWatcher",
    ],
)
def test_pipeline_that_can_be_imported_is_taken(pipeline: str) -> None:
    check_pipeline(pipeline)


@pytest.mark.parametrize(
    ("pipeline", "problem"),
    [
        ("FastH3Pipeline", "is no module:callable"),
        ("rushes_worker.pipeline.fasth3:", "is no module:callable"),
        ("rushes_worker.pipeline.fast:FastH3Pipeline", "no module rushes_worker.pipeline.fast"),
        ("rushes_wonker.pipeline:FastH3Pipeline", "No module named 'rushes_wonker'"),
        ("rushes_worker.pipeline.fasth3:FastH4Pipeline", "fasth3.py names no FastH4Pipeline"),
    ],
)
def test_pipeline_that_no_rank_could_import_is_refused(pipeline: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_pipeline(pipeline)


def test_module_of_a_pipeline_that_is_no_python_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_pipeline.py").write_text("class Pipeline:\n    def render(self:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"own_pipeline:Pipeline cannot be imported: .*own_pipeline\.py, line 2: "):
        check_pipeline("own_pipeline:Pipeline")


def test_pipeline_is_checked_without_loading_torch() -> None:
    check = "check_pipeline('rushes_worker.pipeline.fasth3:FastH3Pipeline')"
    assert "torch" not in loaded_modules(f"from rushes_worker.launcher import check_pipeline\n{check}")
