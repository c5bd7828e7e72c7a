"""The API, and whoever loads what it takes, with the same settings."""

import pytest
from rushes_core.settings import Settings
from support.campaigns_api import campaign_settings
from support.stack import SharedStack


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return campaign_settings(stack, tmp_path_factory.mktemp("campaigns"))


@pytest.fixture(scope="module")
def settings(api_settings: Settings) -> Settings:
    return api_settings
