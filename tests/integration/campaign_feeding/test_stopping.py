"""What pauses, cancels and ends of windows close, whatever feeders do at that moment."""

import threading

from rushes_core import jobs
from rushes_core.campaigns import feeder
from rushes_core.campaigns.opening import MIN_OPEN
from rushes_core.states import JobState
from sqlalchemy import text
from support.campaign_feeding import AGO, change_and_close
from support.campaign_rows import CampaignRows
from support.job_rows import ERROR
from support.waiting import wait_until


class TestStop:
    def test_a_pause_holds_from_the_next_claim_on(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        running = rows.claim_and_start()
        change_and_close(rows, campaign, paused_at="now()")
        assert rows.claim() is None
        rows.feed()
        assert rows.claim() is None
        assert rows.of(campaign).hold_reason == "paused"
        rows.complete(running)

    def test_a_pause_holds_whatever_feeders_do_at_that_moment(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(2_000)
        stop = threading.Event()

        def feed() -> None:
            feeder_of_thread = rows.another_feeder()
            while not stop.is_set():
                feeder_of_thread.feed()

        threads = [threading.Thread(target=feed) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(25):
                wait_until(lambda: rows.open_lines(campaign))
                change_and_close(rows, campaign, paused_at="now()")
                assert rows.claim() is None
                rows.run(feeder.resume(campaign))
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def test_what_was_claimed_in_the_moment_of_a_pause_goes_back(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        held = rows.claim()
        assert held is not None
        rows.change(campaign, paused_at=text("now()"), hold_reason="paused")
        rows.feed()
        assert rows.start(held) is None

    def test_a_resume_goes_on_where_it_was(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        change_and_close(rows, campaign, paused_at="now()")
        rows.feed()
        rows.run(feeder.resume(campaign))
        rows.feed()
        assert rows.open_lines(campaign) == [1, 2, 3, 4]
        assert rows.of(campaign).hold_reason is None

    def test_what_a_replica_holds_but_has_not_started_goes_back(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        held = rows.claim()
        assert held is not None
        change_and_close(rows, campaign, paused_at="now()")
        assert rows.start(held) is None
        assert rows.run(jobs.watch(held.id, fence=held.fence or 0)) is True
        back = rows.run(jobs.confirm_cancel(held.id, fence=held.fence or 0))
        assert (back.state, back.hold, back.attempt, back.start_by) == (JobState.QUEUED, "campaign", 0, None)

    def test_a_running_attempt_is_given_back_when_that_was_asked_for(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        running = rows.claim_and_start()
        change_and_close(rows, campaign, paused_at="now()")
        assert rows.run(jobs.renew(running.id, fence=running.fence or 0, lease_seconds=30)) is False
        with rows.engine.begin() as connection:
            connection.execute(feeder.stop_running(campaign))
        assert rows.run(jobs.renew(running.id, fence=running.fence or 0, lease_seconds=30)) is True
        back = rows.run(jobs.confirm_cancel(running.id, fence=running.fence or 0))
        assert (back.state, back.hold, back.attempt, back.error) == (JobState.QUEUED, "campaign", 0, None)

    def test_a_cancel_wins_over_a_pause(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        held = rows.claim()
        assert held is not None
        change_and_close(rows, campaign, paused_at="now()")
        rows.run(jobs.cancel(held.id, project="default"))
        assert rows.run(jobs.confirm_cancel(held.id, fence=held.fence or 0)).state is JobState.CANCELLED

    def test_nothing_of_a_campaign_that_is_cancelled_is_opened(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        change_and_close(rows, campaign, state="'cancelling'")
        rows.feed()
        assert rows.claim() is None

    def test_what_was_left_open_of_a_cancelled_campaign_is_closed(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        rows.change(campaign, state="cancelling")
        rows.feed()
        assert rows.claim() is None

    def test_nothing_is_opened_after_the_completion_window(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(expires_at=text("now() + interval '1 hour'"))
        rows.feed()
        assert len(rows.open_lines(campaign)) == MIN_OPEN
        rows.change(campaign, expires_at=text("now()"))
        rows.feed()
        assert rows.claim() is None

    def test_an_attempt_that_is_lost_waits_for_its_campaign_again(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(1)
        rows.feed()
        running = rows.claim_and_start()
        back = rows.run(jobs.retry_or_fail(running.id, fence=running.fence or 0, error=ERROR, crashed=False))
        assert (back.state, back.hold, back.attempt) == (JobState.QUEUED, "campaign", 1)
        change_and_close(rows, campaign, paused_at="now()")
        with rows.engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET run_at = now()"))
        rows.feed()
        assert rows.claim() is None
        rows.run(feeder.resume(campaign))
        rows.feed()
        assert rows.claim() is not None

    def test_a_retried_job_waits_for_its_campaign(self, rows: CampaignRows) -> None:
        rows.campaign(1)
        rows.feed()
        running = rows.claim_and_start()
        rows.fail(running)
        retried = rows.run(jobs.retry(running.id, project="default"))
        assert (retried.state, retried.hold, retried.generation) == (JobState.QUEUED, "campaign", 2)
        rows.feed()
        assert rows.claim() is not None

    def test_not_before_is_waited_for(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(not_before=text("now() + interval '1 hour'"))
        rows.feed()
        assert (rows.claim(), rows.of(campaign).hold_reason) == (None, "not_before")
        rows.change(campaign, not_before=AGO)
        rows.feed()
        assert rows.claim() is not None
        assert rows.of(campaign).hold_reason is None
