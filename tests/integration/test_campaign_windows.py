"""Campaigns whose jobs may run at some hours only, on real Postgres and its clock."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rushes_core import jobs
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker.ledger import Ledger
from sqlalchemy import Engine, text, update
from support.campaign_rows import LARGE, SMALL, CampaignRows
from support.job_rows import MODEL


@pytest.fixture
def rows(engine: Engine) -> CampaignRows:
    rows = CampaignRows(engine)
    rows.clear()
    return rows


def hours(opens: float, closes: float, on_close: str = "finish_current") -> dict[str, Any]:
    """A window of every day from so many hours from now to so many; by whole minutes, as the clock on the wall."""
    now = datetime.now(UTC)
    start, end = ((now + timedelta(hours=number)).strftime("%H:%M") for number in (opens, closes))
    return {"timezone": "UTC", "start": start, "end": end, "on_close": on_close}


OPEN = (-2, 2)
CLOSED = (2, 4)


def test_nothing_is_opened_while_the_window_is_closed(rows: CampaignRows) -> None:
    campaign = rows.campaign(window=hours(*CLOSED))
    rows.feed()
    assert (rows.claim(), rows.of(campaign).hold_reason) == (None, "window")
    rows.change(campaign, window=hours(*OPEN))
    rows.feed()
    assert rows.claim() is not None
    assert rows.of(campaign).hold_reason is None


@pytest.mark.parametrize("on_close", ["finish_current", "stop"])
def test_a_clip_starts_only_if_nine_of_ten_would_finish_in_time(rows: CampaignRows, on_close: str) -> None:
    rows.measure(SMALL, p50=60, p90=600)
    rows.measure(LARGE, p50=60, p90=7_200)
    campaign = rows.campaign(shapes=(SMALL, LARGE), window=hours(-1, 1, on_close))
    rows.feed()
    assert rows.open_lines(campaign) == [1, 3, 5, 7]
    job = rows.claim_and_start()
    assert job.start_by is not None
    left = job.start_by - datetime.now(UTC)
    assert timedelta(minutes=48) < left < timedelta(minutes=51)


def test_one_that_could_finish_no_clip_says_that_its_window_is_too_short(rows: CampaignRows) -> None:
    rows.measure(p50=60, p90=7_200)
    campaign = rows.campaign(window=hours(-1, 1))
    rows.feed()
    assert (rows.claim(), rows.of(campaign).hold_reason) == (None, "window")


def test_what_was_claimed_ahead_is_not_started_when_the_window_has_closed(
    rows: CampaignRows, settings: Settings
) -> None:
    rows.campaign(window=hours(*OPEN))
    rows.feed()
    ledger = Ledger(settings, replica_id="worker-r0#1", model=MODEL)
    claim = ledger.claim(())
    assert claim is not None
    pass_the_time(rows, claim.job.id, "start_by")
    assert ledger.start(claim.lease) is False
    assert ledger.confirm_cancel(claim.lease) is JobState.QUEUED
    ledger.close()
    back = rows.read(claim.job.id)
    assert (back.hold, back.attempt, back.start_by, back.lease_owner) == ("campaign", 0, None, None)


def test_what_is_open_is_not_claimed_when_its_time_to_start_is_over(rows: CampaignRows) -> None:
    campaign = rows.campaign(window=hours(*OPEN))
    rows.feed()
    with rows.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET start_by = now() WHERE hold IS NULL"))
    assert rows.claim() is None
    rows.feed()
    assert rows.open_lines(campaign) == [1, 2, 3, 4]
    assert rows.claim() is not None


def test_what_runs_at_the_end_finishes(rows: CampaignRows) -> None:
    campaign = rows.campaign(window=hours(*OPEN))
    rows.feed()
    running = rows.claim_and_start()
    assert running.stop_at is None
    rows.change(campaign, window=hours(*CLOSED))
    rows.feed()
    assert rows.run(jobs.renew(running.id, fence=running.fence or 0, lease_seconds=30)) is False
    rows.complete(running)


def test_what_runs_at_the_end_is_given_back_if_that_was_asked_for(rows: CampaignRows) -> None:
    campaign = rows.campaign(window=hours(*OPEN, "stop"))
    rows.feed()
    running = rows.claim_and_start()
    assert running.stop_at is not None
    assert running.stop_at - datetime.now(UTC) > timedelta(minutes=110)
    pass_the_time(rows, running.id, "stop_at")
    assert rows.run(jobs.watch(running.id, fence=running.fence or 0)) is True
    back = rows.run(jobs.confirm_cancel(running.id, fence=running.fence or 0))
    assert (back.state, back.hold, back.attempt, back.stop_at) == (JobState.QUEUED, "campaign", 0, None)
    rows.check_counts(campaign)


def test_a_clip_that_is_done_when_it_is_called_back_is_kept(rows: CampaignRows) -> None:
    rows.campaign(window=hours(*OPEN, "stop"))
    rows.feed()
    running = rows.claim_and_start()
    pass_the_time(rows, running.id, "stop_at")
    rows.complete(running)


def test_a_window_that_is_changed_holds_for_what_runs(rows: CampaignRows) -> None:
    campaign = rows.campaign(window=hours(*OPEN, "stop"))
    rows.feed()
    running = rows.claim_and_start()
    rows.change(campaign, window=hours(-2, 6, "stop"))
    rows.feed()
    stop_at = rows.read(running.id).stop_at
    assert stop_at is not None
    assert stop_at - datetime.now(UTC) > timedelta(hours=5)


def pass_the_time(rows: CampaignRows, job_id: str, column: str) -> None:
    """Have what a job was given time for lie in the past."""
    rows.run(update(Job).where(Job.id == job_id).values({column: text("now()")}).returning(Job))
