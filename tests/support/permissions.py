"""Files that may not be read, whoever runs the tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65_534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Within, permissions count for root, too. Folders of pytest's own are then out of reach."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
