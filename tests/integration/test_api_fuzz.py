"""Requests that nobody would think of, made from the OpenAPI document: see `support.fuzz`; `make fuzz` makes more."""

import re
from pathlib import Path

import pytest
from pydantic import SecretStr
from rushes_core.settings import Settings
from support.api import ApiProcess
from support.fuzz import OPTIONS, WEBHOOK_KEY, fuzz, populate

LEAST = 600


# minutes, beside others on two cores
@pytest.mark.timeout(900)
def test_no_request_breaks_what_the_document_says(api_settings: Settings, tmp_path: Path) -> None:
    settings = api_settings.model_copy(update=OPTIONS | {"webhook_key": SecretStr(WEBHOOK_KEY)})
    with ApiProcess(settings, tmp_path / "api.log") as api:
        done = fuzz(api.url, populate(settings, api.url, tmp_path), tmp_path, examples=2, seed=1)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None
    assert int(found[1]) >= LEAST
    assert "request_crashed" not in (tmp_path / "api.log").read_text()
