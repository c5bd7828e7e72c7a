"""Settings of loaders, which need a checkpoint to read lines by."""

import pytest
from rushes_core.settings import Settings
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("loading")))
