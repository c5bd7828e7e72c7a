"""Where objects lie."""

from typing import Any

import pytest
from rushes_core.object_keys import Destination, result_key


@pytest.mark.parametrize(
    ("request_", "prefix"),
    [
        ({}, "results/p/j/"),
        ({"output": None}, "results/p/j/"),
        ({"output": {"key_prefix": "a/b"}}, "results/p/a/b/j/"),
        ({"output": {"key_prefix": "/a//b/"}}, "results/p/a/b/j/"),
    ],
)
def test_where_objects_lie_follows_from_the_request(request_: dict[str, Any], prefix: str) -> None:
    assert Destination.of(request_).prefix("p", "j") == prefix


def test_two_attempts_never_share_a_key() -> None:
    assert result_key("p", "j", 1, 7) != result_key("p", "j", 1, 8)
