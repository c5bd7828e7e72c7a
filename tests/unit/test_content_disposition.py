"""The header by which a browser names what it saves."""

import pytest
from rushes_core.content_disposition import content_disposition


@pytest.mark.parametrize("name", ['x"; evil="1', "a\r\nSet-Cookie: b", "雪.mp4", "", "😀", "../..", "\u202etxt.exe"])
def test_content_disposition_is_one_safe_line(name: str) -> None:
    value = content_disposition(name)
    assert value.isascii()
    assert not any(c in value for c in "\r\n")
    assert value.count('"') == 2
