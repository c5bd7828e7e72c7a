"""What the Video object and its documentation say of failures."""

import re
from pathlib import Path

from rushes_core import errors, jobs
from rushes_core.errors import GenerationError
from rushes_core.video import RETRYABLE_ERRORS

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_failure_is_documented_with_whether_a_retry_may_help() -> None:
    table = DOCS.read_text().partition("## Why a job has no clip")[2]
    documented: dict[str, bool] = {}
    for codes, retryable in re.findall(r"^\| (`.*?`) \| \w+ \| (yes|no) \|", table, re.MULTILINE):
        documented |= dict.fromkeys(re.findall("`(.*?)`", codes), retryable == "yes")
    assert documented == RETRYABLE_ERRORS


def test_every_code_that_a_job_is_given_is_known() -> None:
    ended = {value["code"] for value in vars(jobs).values() if isinstance(value, dict) and "code" in value}
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, GenerationError)]
    assert ended | {kind.code for kind in kinds} <= RETRYABLE_ERRORS.keys()
    assert len(ended) > 1
    assert len(kinds) > 1
