"""Forecasts of campaigns in the database: brought up to date, and kept to be compared with what came."""

from collections.abc import Iterator
from typing import Any

import pytest
from rushes_core.campaigns import foresight
from rushes_core.campaigns.foresight import Foresight
from rushes_core.campaigns.means import means_of
from rushes_core.campaigns.tables import CampaignForecast
from rushes_core.database import create_sync_engine
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from support.campaign_rows import LARGE, SMALL, CampaignRows
from support.stack import SharedStack


@pytest.fixture(scope="module")
def shared(stack: SharedStack) -> Iterator[CampaignRows]:
    engine = create_sync_engine(stack.settings())
    yield CampaignRows(engine)
    engine.dispose()


@pytest.fixture
def rows(shared: CampaignRows) -> CampaignRows:
    shared.clear()
    return shared


def look(rows: CampaignRows, *, seconds_later: float = 0) -> None:
    """A pass, so long after the last one."""
    execute(rows, "UPDATE campaign_forecasts SET made_at = made_at - make_interval(secs => :s)", s=seconds_later)
    Foresight(rows.engine, seen_within_seconds=60).look()


def execute(rows: CampaignRows, statement: str, **values: Any) -> Any:
    with rows.engine.begin() as connection:
        found = connection.execute(text(statement), values)
        return found.all() if found.returns_rows else None


def of(rows: CampaignRows, campaign: str) -> CampaignForecast:
    with Session(rows.engine) as session:
        return session.execute(select(CampaignForecast).where(CampaignForecast.campaign_id == campaign)).scalar_one()


def finish(rows: CampaignRows, campaign: str, *, state: str = "completed") -> None:
    execute(
        rows,
        f"UPDATE campaigns SET state = '{state}', {state}_at = now() WHERE id = :id",
        id=campaign,
    )


def run(rows: CampaignRows, num_jobs: int) -> None:
    for _ in range(num_jobs):
        rows.feed()
        rows.complete(rows.claim_and_start())


@pytest.fixture
def campaign(rows: CampaignRows) -> str:
    """A hundred clips of ten seconds on one replica, foreseen."""
    rows.replica()
    rows.measure(p50=10, p90=10)
    campaign = rows.campaign(100)
    look(rows)
    return campaign


def test_it_is_foreseen_from_what_was_measured(rows: CampaignRows, campaign: str) -> None:
    found = of(rows, campaign)
    assert (found.seconds_p50, found.gpu_seconds, found.basis) == (
        pytest.approx(1_000, rel=1e-3),
        pytest.approx(1_000, rel=1e-3),
        "last 50 clips",
    )
    assert found.seconds_p90 is not None
    assert 1_200 < found.seconds_p90 < 1_500
    assert (found.may_run, found.told, found.ended_at) == (True, {}, None)


def test_it_follows_what_is_done(rows: CampaignRows, campaign: str) -> None:
    run(rows, 10)
    look(rows, seconds_later=50)
    fast = of(rows, campaign).seconds_p50 or 0
    # ninety clips are left, of which ten took half as long as was foreseen
    assert 450 < fast < 890
    look(rows, seconds_later=50)
    assert (of(rows, campaign).seconds_p50 or 0) > fast


def test_what_a_running_clip_has_done_is_done(rows: CampaignRows, campaign: str) -> None:
    rows.feed()
    job = rows.claim_and_start()
    execute(rows, "UPDATE jobs SET progress = 50 WHERE id = :id", id=job.id)
    look(rows)
    assert of(rows, campaign).gpu_seconds == pytest.approx(995, rel=1e-3)


def test_shapes_of_what_waits_are_looked_at(rows: CampaignRows) -> None:
    rows.replica()
    rows.measure(SMALL, p50=10, p90=10)
    # more than in proportion
    rows.measure(LARGE, p50=100, p90=100)
    mixed, large = rows.campaign(63, shapes=(SMALL, LARGE)), rows.campaign(100, shapes=(LARGE,))
    look(rows)
    assert of(rows, large).gpu_seconds == pytest.approx(10_000, rel=0.01)
    assert of(rows, mixed).gpu_seconds == pytest.approx(32 * 10 + 31 * 100, rel=0.1)


def test_nothing_is_said_while_nothing_is_known(rows: CampaignRows) -> None:
    campaign, unread = rows.campaign(10), rows.campaign(10, is_loaded=False)
    rows.measure(p50=10, p90=10)
    look(rows)
    assert (of(rows, campaign).seconds_p50, of(rows, campaign).gpu_seconds) == (None, pytest.approx(100, rel=1e-3))
    assert execute(rows, "SELECT FROM campaign_forecasts WHERE campaign_id = :id", id=unread) == []


def test_a_pause_teaches_nothing(rows: CampaignRows, campaign: str) -> None:
    before = of(rows, campaign).pace
    rows.change(campaign, paused_at=text("now()"), hold_reason="paused")
    look(rows, seconds_later=30)
    look(rows, seconds_later=30)
    rows.change(campaign, paused_at=None, hold_reason=None)
    look(rows, seconds_later=30)
    assert of(rows, campaign).pace == before
    look(rows, seconds_later=30)
    assert of(rows, campaign).pace != before


def test_of_two_that_look_at_once_the_first_to_write_counts(
    rows: CampaignRows, campaign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[CampaignForecast] = []

    def meanwhile(*arguments: Any, **values: Any) -> Any:
        monkeypatch.setattr("rushes_core.campaigns.foresight.means_of", means_of)
        look(rows)
        written.append(of(rows, campaign))
        return means_of(*arguments, **values)

    monkeypatch.setattr("rushes_core.campaigns.foresight.means_of", meanwhile)
    look(rows, seconds_later=50)
    assert [one.made_at for one in written] == [of(rows, campaign).made_at]


class TestFulfilled:
    def test_what_was_foreseen_is_kept_until_it_came(self, rows: CampaignRows, campaign: str) -> None:
        run(rows, 12)
        look(rows, seconds_later=120)
        told = of(rows, campaign).told
        assert told.keys() == {"10"}
        assert told["10"]["at"] < told["10"]["p50"] < told["10"]["p90"]
        look(rows, seconds_later=20)
        assert of(rows, campaign).told == told
        run(rows, 40)
        look(rows, seconds_later=20)
        assert of(rows, campaign).told.keys() == {"10", "50"}
        assert of(rows, campaign).told["10"] == told["10"]
        finish(rows, campaign)
        look(rows)
        with Session(rows.engine) as session:
            ((kept, ended_at),) = session.execute(foresight.fulfilled(10)).all()
        assert kept.keys() == {"10", "50"}
        assert ended_at == rows.of(campaign).completed_at

    def test_what_was_held_meanwhile_tells_nothing(self, rows: CampaignRows, campaign: str) -> None:
        run(rows, 12)
        look(rows)
        rows.change(campaign, paused_at=text("now()"), hold_reason="paused")
        look(rows)
        assert of(rows, campaign).told == {}

    def test_what_was_missed_is_not_told_afterwards(self, rows: CampaignRows, campaign: str) -> None:
        run(rows, 52)
        look(rows)
        assert of(rows, campaign).told.keys() == {"50"}

    @pytest.mark.parametrize("state", ["cancelled", "expired", "failed"])
    def test_nothing_is_kept_of_one_that_ended_otherwise(self, rows: CampaignRows, campaign: str, state: str) -> None:
        run(rows, 12)
        look(rows)
        finish(rows, campaign, state=state)
        look(rows)
        assert execute(rows, "SELECT FROM campaign_forecasts") == []

    def test_a_campaign_that_goes_on_again_is_foreseen_anew(self, rows: CampaignRows, campaign: str) -> None:
        run(rows, 12)
        look(rows)
        finish(rows, campaign)
        look(rows)
        rows.change(campaign, state="in_progress")
        look(rows)
        assert (of(rows, campaign).ended_at, of(rows, campaign).told.keys()) == (None, {"10"})

    def test_it_is_forgotten_after_a_month(self, rows: CampaignRows, campaign: str) -> None:
        run(rows, 12)
        look(rows)
        finish(rows, campaign)
        look(rows)
        execute(rows, "UPDATE campaign_forecasts SET ended_at = now() - interval '29 days'")
        look(rows)
        assert len(execute(rows, "SELECT FROM campaign_forecasts")) == 1
        execute(rows, "UPDATE campaign_forecasts SET ended_at = now() - interval '31 days'")
        look(rows)
        assert execute(rows, "SELECT FROM campaign_forecasts") == []
