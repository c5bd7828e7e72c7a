"""Bodies of requests for a clip, resolved or refused."""

from typing import Any

import pytest
from rushes_core.errors import InvalidRequest
from rushes_core.request import ResolvedRequest, resolve
from rushes_core.served_model import ServedModel


def resolved(model: ServedModel, /, **body: Any) -> ResolvedRequest:
    """What a body resolves to that says no more than it must."""
    return resolve({"prompt": "a dog", **body}, model)


def refused(model: ServedModel, /, **body: Any) -> InvalidRequest:
    """Why such a body is refused."""
    with pytest.raises(InvalidRequest) as caught:
        resolved(model, **body)
    str(caught.value).encode()
    assert caught.value.param is None or caught.value.param.isascii()
    return caught.value
