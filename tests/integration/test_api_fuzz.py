"""Requests that nobody would think of, made from the OpenAPI document: see `support.fuzz`; `make fuzz` makes more."""

import re
from pathlib import Path

import pytest
from pydantic import SecretStr
from rushes_core.settings import Settings
from support.api import ApiProcess
from support.fuzz import OPTIONS, WEBHOOK_KEY, fuzz, populate


# minutes, beside others on two cores
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("phases", "examples", "least"),
    [
        ("examples,fuzzing", 10, 600),
        # each bound of each member in turn
        pytest.param("coverage", 1, 5_000, marks=pytest.mark.long),
    ],
)
def test_no_request_breaks_what_the_document_says(
    api_settings: Settings, tmp_path: Path, phases: str, examples: int, least: int
) -> None:
    settings = api_settings.model_copy(update=OPTIONS | {"webhook_key": SecretStr(WEBHOOK_KEY)})
    with ApiProcess(settings, tmp_path / "api.log") as api:
        ids = populate(settings, api.url, tmp_path)
        done = fuzz(api.url, ids, tmp_path, examples=examples, seed=1, phases=phases)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None
    assert int(found[1]) >= least
    assert "request_crashed" not in (tmp_path / "api.log").read_text()
