"""What docs/operations.md tells operators to look for and to run exists under that name."""

import ast
import re
from pathlib import Path

import pytest
from rushes_cli.main import main
from rushes_core.models import Base
from rushes_core.settings import Settings
from rushes_worker import launcher

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "operations.md").read_text()
PUBLIC = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "campaigns", "webhooks"))
LEVELS = {"debug", "info", "warning", "error", "exception"}

_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_NAME = re.compile(r"[a-z]+(?:_[a-z0-9]+)+")


def events() -> set[str]:
    """Every event that some process may log, by the calls in the code."""
    found: set[str] = set()
    for folder in ("api", "cli", "core", "worker"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    found.add(str(node.args[0].value))
    return found


def test_events_that_it_names_are_logged() -> None:
    named = set(re.findall(rf"`({_NAME.pattern})`", _BLOCK.sub("", GUIDE)))
    columns = {column.name for table in Base.metadata.tables.values() for column in table.columns}
    in_blocks = set(_NAME.findall("".join(_BLOCK.findall(GUIDE))))
    known = events()
    assert named - known - columns - in_blocks - set(_NAME.findall(PUBLIC)) == set()
    assert {"replica_drained", "scratch_full", "upload_failed"} <= named & known


@pytest.mark.parametrize("command", sorted(set(re.findall(r"(?:`|^|; )rushes ([a-z]+)", GUIDE, re.MULTILINE))))
def test_commands_that_it_names_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rushes {command}")


def test_a_worker_gets_as_long_to_stop_as_it_may_take() -> None:
    (unit,) = (block for block in _BLOCK.findall(GUIDE) if "TimeoutStopSec" in block)
    given = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    grace = Settings.model_fields["shutdown_grace_seconds"].default
    assert given > grace + launcher._STOP_MARGIN_SECONDS  # pyright: ignore[reportPrivateUsage]
