from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton was loaded as an interpreter: it cannot become one later."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            # it starts with the first task, while the variable is set
            pool.submit(int).result()
            environment.undo()
            yield pool
