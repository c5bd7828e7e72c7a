"""How a process of Rushes starts. `python -m rushes_core.starting MODULE arguments...` imports the module and calls its
`main` with a list of the arguments; its status is what that returns."""

import gc
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def importing() -> Generator[None]:
    """Import within it what a process keeps. The garbage collector stays away meanwhile: it would go through all of
    that again and again, a fifth of the time that a process takes to start. Nor does it look at it afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def main(words: Sequence[str]) -> int:
    with importing():
        module = import_module(words[0])
    status: int = module.main(list(words[1:]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
