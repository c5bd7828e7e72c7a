from pathlib import Path

import pytest
from support.checkpoints import copy_checkpoint, tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that no test changes."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it for this test alone."""
    return copy_checkpoint(tiny, tmp_path / "copy")
