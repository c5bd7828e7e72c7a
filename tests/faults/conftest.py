"""The servers of this tier: its tests kill, freeze and restart them."""

from collections.abc import Iterator

import pytest
from support.faults.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("fault-servers")) as servers:
        yield servers
