"""One running Rushes with the tiny checkpoint, one clip that it rendered, and one with the scripted pipeline for what
does not depend on the picture. Tests leave either ready."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api import API_KEY
from support.checkpoints import tiny_checkpoint
from support.service import CALM, Rendered, Service
from support.stack import SharedStack
from support.webhooks import LOCAL
from support.worker import SCRIPTED


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def shared_service(stack: SharedStack, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    settings = stack.settings(
        checkpoint=checkpoint, api_key=API_KEY, scratch=folder / "scratch", provenance="off", **CALM
    )
    with Service(settings, folder) as service:
        yield service


@pytest.fixture(scope="session")
def shared_quick_service(
    stack: SharedStack, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("quick")
    settings = stack.settings(
        checkpoint=checkpoint,
        api_key=API_KEY,
        scratch=folder / "scratch",
        provenance="off",
        pipeline=SCRIPTED,
        **CALM,
        **LOCAL,
    )
    with Service(settings, folder) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The shared service, ready and idle."""
    shared_service.wait_ready()
    return shared_service


@pytest.fixture
def quick_service(shared_quick_service: Service) -> Service:
    """The one with the scripted pipeline, ready and idle."""
    shared_quick_service.wait_ready()
    return shared_quick_service


@pytest.fixture(scope="session")
def reference(shared_service: Service) -> Rendered:
    """The clip of `REQUEST`, rendered in peace and watched while it was."""
    return shared_service.render(watched=True)
