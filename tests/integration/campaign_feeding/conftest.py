"""Rows of campaigns that several feeders may change at once, and whose counters are right after every test."""

from collections.abc import Iterator

import pytest
from rushes_core.database import create_sync_engine
from rushes_core.settings import Settings
from sqlalchemy import Engine
from support.campaign_feeding import campaigns
from support.campaign_rows import CampaignRows


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[Engine]:
    engine = create_sync_engine(settings, pool_size=12)
    yield engine
    engine.dispose()


@pytest.fixture
def rows(engine: Engine) -> Iterator[CampaignRows]:
    rows = CampaignRows(engine)
    rows.clear()
    yield rows
    for campaign in campaigns(engine):
        rows.check_counts(campaign)
