"""Who may import whom, and what must not be loaded where."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "triton", "transformers", "diffusers", "rushes_worker", "rushes_kernels"]


@cache
def loaded_by(statement: str) -> frozenset[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    report = f"{statement}\nimport sys\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-P", "-c", report], capture_output=True, text=True, check=True)
    return frozenset(result.stdout.split())


@pytest.mark.parametrize("module", ["rushes_api", "rushes_api.app", "rushes_core.dispatcher", "rushes_cli.main"])
def test_control_plane_loads_nothing_of_the_gpu_plane(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "module", ["rushes_worker.supervisor", "rushes_core.dispatcher", "rushes_worker.webhooks.process"]
)
def test_what_never_migrates_does_not_load_what_migrations_need(module: str) -> None:
    assert "alembic" not in loaded_by(f"import {module}")


def test_measuring_a_service_loads_no_part_of_it() -> None:
    parts = {"torch", "numpy", "fastapi", "sqlalchemy", "boto3", "rushes_api", "rushes_worker"}
    parse = "_parser(['bench']).parse_args(['bench', 'service'])"
    assert loaded_by(f"from rushes_cli.main import _parser; {parse}").isdisjoint(parts)


def test_starting_everything_on_one_machine_loads_no_torch_in_the_starter() -> None:
    assert "torch" not in loaded_by("import rushes_cli.up, rushes_cli.demo, rushes_worker.media.validate")


def test_command_line_answers_without_loading_any_part() -> None:
    parts = {"torch", "fastapi", "sqlalchemy", "celery", "boto3", "rushes_api", "rushes_worker"}
    assert loaded_by("from rushes_cli.main import _parser; _parser([])").isdisjoint(parts)


def test_import_contracts_are_kept() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
