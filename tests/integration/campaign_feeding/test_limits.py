"""Campaigns that stop themselves: budgets, failures and proofs."""

from rushes_core import jobs
from rushes_core.campaigns import closing, feeder
from rushes_core.models import Job
from rushes_core.states import JobState
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from support.campaign_feeding import change_and_close
from support.campaign_rows import CampaignRows
from support.job_rows import ERROR


class TestBudget:
    def test_what_is_open_or_runs_is_counted_as_long_as_most_clips_take(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        rows.replica(layout="r1s2")
        campaign = rows.campaign(budget_gpu_seconds=65)
        rows.feed()
        assert len(rows.open_lines(campaign)) == 3

    def test_clips_that_took_less_leave_room_for_others(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        campaign = rows.campaign(budget_gpu_seconds=26)
        completed = 0
        for _ in range(10):
            rows.feed()
            while (job := rows.claim()) is not None:
                started = rows.start(job)
                assert started is not None
                rows.complete(rows.take(5, started))
                completed += 1
        assert completed == 4
        assert rows.of(campaign).hold_reason == "budget"
        assert rows.events() == ["batch.budget_reached"]

    def test_a_larger_budget_goes_on(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        campaign = rows.campaign(budget_gpu_seconds=5)
        rows.feed()
        assert (rows.claim(), rows.of(campaign).hold_reason) == (None, "budget")
        change_and_close(rows, campaign, budget_gpu_seconds=15)
        rows.feed()
        assert rows.open_lines(campaign) == [1]
        assert rows.of(campaign).hold_reason is None

    def test_while_nothing_is_known_of_a_clip_one_runs_at_a_time(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(budget_gpu_seconds=100)
        rows.feed()
        assert rows.open_lines(campaign) == [1]

    def test_what_is_left_is_cancelled_if_that_was_asked_for(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        campaign = rows.campaign(budget_gpu_seconds=15, on_budget="cancel")
        rows.feed()
        rows.complete(rows.take(9, rows.claim_and_start()))
        rows.feed()
        stopped = rows.of(campaign)
        assert stopped.state == "cancelling"
        assert stopped.errors is not None
        (error,) = stopped.errors["data"]
        assert (error["code"], error["param"]) == ("budget_reached", "budget.gpu_seconds")
        assert "budget of 15 GPU seconds 9" in error["message"]
        assert rows.events() == ["batch.budget_reached"]

    def test_one_that_is_too_small_for_the_first_clip_waits_for_another(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        campaign = rows.campaign(budget_gpu_seconds=8, on_budget="cancel")
        rows.feed()
        rows.another_feeder().feed()
        assert (rows.of(campaign).state, rows.of(campaign).hold_reason) == ("in_progress", "budget")
        change_and_close(rows, campaign, budget_gpu_seconds=15)
        rows.feed()
        assert rows.open_lines(campaign) == [1]

    def test_what_may_take_too_much_is_not_cancelled_before_it_has(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        campaign = rows.campaign(budget_gpu_seconds=15, on_budget="cancel")
        rows.feed()
        job = rows.take(16, rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).state == "in_progress"
        rows.complete(job)
        rows.another_feeder().feed()
        assert rows.of(campaign).state == "cancelling"

    def test_what_is_cancelled_for_it_says_so(self, rows: CampaignRows) -> None:
        rows.measure(p50=3, p90=3)
        campaign = rows.campaign(budget_gpu_seconds=8, on_budget="cancel")
        rows.feed()
        first, second = rows.claim_and_start(), rows.claim_and_start()
        rows.complete(rows.take(9, first))
        rows.another_feeder().feed()
        assert second.fence is not None
        with Session(rows.engine, expire_on_commit=False) as session, session.begin():
            cancelled = session.execute(jobs.confirm_cancel(second.id, fence=second.fence)).scalar_one()
            found = session.execute(closing.to_close()).one()
            session.execute(closing.close_some(found.id, found.target, found.why))
            waited = session.scalars(
                select(Job).where(Job.campaign_id == campaign, Job.state == JobState.CANCELLED)
            ).all()
        errors = [cancelled.error, *(job.error for job in waited)]
        assert len(errors) > 2
        for error in errors:
            assert error is not None
            assert error.keys() == {"code", "message"}
            assert error["code"] == "budget_reached"
            assert "of 8 GPU seconds 9" in error["message"]


class TestFailures:
    def test_too_many_pause_it(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_failures=2)
        rows.feed()
        for _ in range(2):
            rows.fail(rows.claim_and_start())
        rows.feed()
        paused = rows.of(campaign)
        assert (paused.pause_reason, paused.hold_reason) == ("failures", "paused")
        assert paused.paused_at is not None
        assert rows.claim() is None
        assert rows.events() == ["batch.paused"]

    def test_after_a_resume_they_are_counted_anew(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_failures=2)
        rows.feed()
        for _ in range(2):
            rows.fail(rows.claim_and_start())
        rows.feed()
        rows.run(feeder.resume(campaign))
        rows.feed()
        rows.fail(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).paused_at is None
        rows.fail(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).paused_at is not None

    def test_those_that_were_retried_are_not_excused_again(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_failures=2)
        rows.feed()
        failed = [rows.claim_and_start() for _ in range(2)]
        for job in failed:
            rows.fail(job)
        rows.feed()
        for job in failed:
            rows.run(jobs.retry(job.id, project="default"))
        rows.run(feeder.resume(campaign))
        rows.feed()
        for _ in range(2):
            rows.fail(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).pause_reason == "failures"

    def test_too_many_cancel_it_if_that_was_asked_for(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_failures=1, on_failure="cancel")
        rows.feed()
        running = rows.claim_and_start()
        rows.fail(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).state == "cancelling"
        assert rows.read(running.id).cancel_requested_at is not None
        assert rows.claim() is None

    def test_what_is_cancelled_for_them_says_so(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_failures=1, on_failure="cancel")
        rows.feed()
        running = rows.claim_and_start()
        rows.fail(rows.claim_and_start())
        rows.feed()
        cancelled = rows.run(jobs.confirm_cancel(running.id, fence=running.fence or 0))
        with Session(rows.engine) as session, session.begin():
            found = session.execute(closing.to_close()).one()
        message = "Of the campaign's jobs 1 failed, and its max_failures is 1."
        assert cancelled.error == found.why == {"code": "max_failures_reached", "message": message}
        errors = rows.of(campaign).errors
        assert errors is not None
        assert errors["data"] == [found.why | {"param": "max_failures", "line": None}]


class TestProof:
    def test_only_the_first_items_run_and_the_others_wait_for_approval(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(20, proof_count=3, proof_state="running")
        rows.feed()
        assert rows.open_lines(campaign) == [1, 2, 3]
        for _ in range(3):
            rows.complete(rows.claim_and_start())
            rows.feed()
        waiting = rows.of(campaign)
        assert (waiting.proof_state, waiting.hold_reason) == ("awaiting_approval", "approval")
        assert rows.claim() is None
        rows.feed()
        assert rows.events() == ["batch.awaiting_approval"]
        rows.change(campaign, proof_state="approved")
        rows.feed()
        assert rows.open_lines(campaign) == [4, 5, 6, 7]
        assert rows.of(campaign).hold_reason is None

    def test_a_proof_is_not_done_while_one_of_it_is_tried_again(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(20, proof_count=1)
        rows.feed()
        running = rows.claim_and_start()
        rows.run(jobs.retry_or_fail(running.id, fence=running.fence or 0, error=ERROR, crashed=False))
        rows.feed()
        assert rows.of(campaign).proof_state == "running"

    def test_it_goes_on_by_itself_after_the_time_that_was_asked_for(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(20, proof_count=1, proof_continue_seconds=1_800)
        rows.feed()
        rows.complete(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).proof_state == "awaiting_approval"
        rows.change(campaign, proof_done_at=text("now() - interval '31 minutes'"))
        rows.feed()
        assert rows.of(campaign).proof_state == "approved"
        assert rows.open_lines(campaign) == [2, 3, 4, 5]

    def test_a_proof_of_everything_needs_no_approval(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(2, proof_count=5)
        rows.feed()
        for _ in range(2):
            rows.complete(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).proof_state == "approved"

    def test_what_is_not_loaded_yet_may_belong_to_the_proof(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(2, proof_count=5, is_loaded=False)
        rows.feed()
        for _ in range(2):
            rows.complete(rows.claim_and_start())
        rows.feed()
        assert rows.of(campaign).proof_state == "running"
