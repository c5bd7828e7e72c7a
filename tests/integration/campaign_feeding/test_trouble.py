"""What goes wrong with one campaign holds up no other."""

from datetime import UTC, datetime

import pytest
from rushes_core.campaigns import feeding
from rushes_core.campaigns.opening import MIN_OPEN
from rushes_core.campaigns.windows import DAYS
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.campaign_feeding import change_and_close
from support.campaign_rows import CampaignRows


class TestTrouble:
    def test_a_window_that_nobody_understands_holds_up_no_other_campaign(self, rows: CampaignRows) -> None:
        strange = rows.campaign(window={"timezone": "Mars/Base", "start": "00:00", "end": "24:00"})
        other = rows.campaign()
        rows.feed()
        assert rows.of(strange).hold_reason == "window"
        assert rows.claim_and_start().campaign_id == other

    def test_a_campaign_that_somebody_holds_holds_up_no_other(self, rows: CampaignRows) -> None:
        held, other = rows.campaign(), rows.campaign(project="other")
        with rows.engine.begin() as connection:
            connection.execute(text("SELECT FROM campaigns WHERE id = :id FOR UPDATE"), {"id": held})
            rows.feed()
            assert len(rows.open_lines(other)) == MIN_OPEN
        rows.feed()
        assert len(rows.open_lines(held)) == MIN_OPEN

    def test_a_job_that_somebody_holds_holds_up_no_other_campaign(self, rows: CampaignRows) -> None:
        held, other = rows.campaign(max_parallel=3), rows.campaign(project="other")
        rows.feed()
        job = rows.claimed_of("default")
        assert job.campaign_id == held
        assert rows.start(job) is not None
        today = datetime.now(UTC).weekday()
        days = [DAYS[today], DAYS[(today + 1) % 7]]
        change_and_close(rows, held, max_parallel=3)
        rows.change(
            held, window={"timezone": "UTC", "start": "00:00", "end": "24:00", "days": days, "on_close": "stop"}
        )
        with rows.engine.begin() as connection:
            connection.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": job.id})
            rows.feed()
            assert len(rows.open_lines(other)) == MIN_OPEN
            assert rows.open_lines(held) == []
        rows.another_feeder().feed()
        assert len(rows.open_lines(held)) == 2

    def test_a_fault_that_one_campaign_meets_holds_up_no_other(
        self, rows: CampaignRows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken, other = rows.campaign(), rows.campaign(project="other")
        tend = feeding._Tending.tend

        def meet(tending: feeding._Tending, session: Session, campaign_id: str) -> int | None:
            if campaign_id == broken:
                raise KeyError(campaign_id)
            return tend(tending, session, campaign_id)

        monkeypatch.setattr(feeding._Tending, "tend", meet)
        rows.feed()
        assert (rows.open_lines(broken), len(rows.open_lines(other))) == ([], MIN_OPEN)

    def test_an_outage_is_told(self, rows: CampaignRows, monkeypatch: pytest.MonkeyPatch) -> None:
        rows.campaign()

        def lose(tending: feeding._Tending, session: Session, campaign_id: str) -> None:
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

        monkeypatch.setattr(feeding._Tending, "tend", lose)
        with pytest.raises(DBAPIError):
            rows.feed()
