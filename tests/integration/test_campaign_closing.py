"""Campaigns that are cancelled, that expire, that are retried and deleted: every job ends once, and is counted once."""

import threading

import pytest
from rushes_core import claims, jobs
from rushes_core.campaigns import closing, statements
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker.campaigns.ender import Ender
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("closing")))


def loaded(campaigns: Campaigns, count: int) -> str:
    return campaigns.loaded(jsonl(*map(openai_line, range(1, count + 1))))


class TestCancel:
    def test_what_waits_and_what_runs_is_cancelled(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(closing, "CLOSED_AT_ONCE", 3)
        campaign_id = loaded(campaigns, 10)
        campaigns.run(campaign_id, 1)
        campaigns.open(campaign_id, 2)
        running = campaigns.start(2)
        campaigns.open(campaign_id, 3, 4)
        campaigns.stop(campaign_id)
        assert campaigns.read(campaign_id).state == "cancelling"
        # what was open is claimed no more from then on
        assert campaigns.jobs.run(claims.claim(model=campaigns.model.name, owner="w", lease_seconds=9)) is None
        campaigns.end()
        # the replica still holds one
        assert campaigns.read(campaign_id).state == "cancelling"
        assert campaigns.counts(campaign_id).keys() == {"completed", "cancelled", "in_progress", "remaining_cost"}
        assert running.fence is not None
        assert campaigns.jobs.run(jobs.complete(running.id, fence=running.fence, result={}, timings={})) is None
        campaigns.jobs.run(jobs.confirm_cancel(running.id, fence=running.fence))
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "cancelled"
        assert campaign.cancelling_at is not None
        assert campaign.cancelled_at is not None
        assert campaigns.counts(campaign_id) == {"completed": 1, "cancelled": 9}
        assert campaigns.events(campaign_id) == ["batch.cancelled"]
        error = campaigns.items(campaign_id)[-1].error
        assert error == jobs.CANCELLED_BY_USER

    def test_what_was_being_claimed_in_that_moment_is_cancelled_too(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 2)
        campaigns.open(campaign_id, 1)
        with Session(campaigns.engine, expire_on_commit=False) as session, session.begin():
            claim = claims.claim(model=campaigns.model.name, owner="worker", lease_seconds=60)
            claimed = session.execute(claim).scalar_one()
            # the row is locked, and passed over
            stop = threading.Thread(target=campaigns.stop, args=(campaign_id,))
            stop.start()
            stop.join(20)
            assert not stop.is_alive()
        campaigns.end()
        job = campaigns.jobs.read(claimed.id)
        assert job.cancel_requested_at is not None
        assert campaigns.jobs.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=9)) is None

    def test_one_that_has_ended_is_not_cancelled(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 1)
        campaigns.run(campaign_id, 1)
        campaigns.end()
        campaigns.stop(campaign_id)
        assert campaigns.read(campaign_id).state == "completed"
        assert campaigns.counts(campaign_id) == {"completed": 1}

    def test_several_processes_close_one_campaign(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(closing, "CLOSED_AT_ONCE", 20)
        campaign_id = loaded(campaigns, 400)
        campaigns.stop(campaign_id)

        def end(owner: str) -> None:
            ender = Ender(campaigns.settings, campaigns.model, campaigns.engine, owner=owner)
            while campaigns.read(campaign_id).state != "cancelled":
                ender.turn()

        threads = [threading.Thread(target=end, args=(f"ender-{number}",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert campaigns.counts(campaign_id) == {"cancelled": 400}
        assert campaigns.events(campaign_id) == ["batch.cancelled"]
        ended = campaigns.execute("SELECT count(*) FROM job_events WHERE new_state = 'cancelled'")
        assert ended[0].count == 400


class TestExpiry:
    def test_what_waits_expires_and_what_runs_may_finish(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 4)
        campaigns.run(campaign_id, 1)
        campaigns.open(campaign_id, 2)
        running = campaigns.start(2)
        campaigns.execute("UPDATE campaigns SET expires_at = now()")
        campaigns.end()
        assert campaigns.read(campaign_id).state == "in_progress"
        assert campaigns.states(campaign_id)[JobState.EXPIRED] == [3, 4]
        assert running.fence is not None
        result = {"bucket": "b", "key": "k", "bytes": 1, "sha256": "0" * 64}
        campaigns.jobs.run(jobs.complete(running.id, fence=running.fence, result=result, timings={}))
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "expired"
        assert campaign.expired_at is not None
        assert campaigns.counts(campaign_id) == {"completed": 2, "expired": 2}
        assert campaigns.events(campaign_id) == ["batch.expired"]
        assert campaigns.items(campaign_id)[3].error == closing.EXPIRED

    def test_one_that_was_done_in_time_is_completed(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 1)
        campaigns.run(campaign_id, 1)
        campaigns.execute("UPDATE campaigns SET expires_at = now()")
        campaigns.end()
        assert campaigns.read(campaign_id).state == "completed"


class TestRetry:
    def ask(self, campaigns: Campaigns, campaign_id: str, **wanted: object) -> None:
        now = campaigns.execute("SELECT extract(epoch FROM clock_timestamp())::float AS now")[0].now
        values = {"codes": None, "include_cancelled": False, "new_seeds": False, "before": now} | wanted
        with Session(campaigns.engine) as session, session.begin():
            session.execute(statements.ask_retry(campaign_id, **values))  # pyright: ignore[reportArgumentType]

    def test_failed_jobs_of_some_codes_run_again(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statements, "CHANGED_AT_ONCE", 2)
        campaign_id = loaded(campaigns, 6)
        for line, code in ((1, None), (2, "worker_lost"), (3, "worker_lost"), (4, "media_failed"), (5, "worker_lost")):
            campaigns.run(campaign_id, line, code=code)
        campaigns.open(campaign_id, 6)
        campaigns.jobs.run(jobs.cancel(campaigns.items(campaign_id)[5].id, project="default"))
        campaigns.end()
        assert campaigns.read(campaign_id).state == "completed"
        seeds = [job.seed for job in campaigns.items(campaign_id)]
        self.ask(campaigns, campaign_id, codes=["worker_lost"])
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert (campaign.state, campaign.retry) == ("in_progress", None)
        assert campaigns.states(campaign_id)[JobState.QUEUED] == [2, 3, 5]
        items = campaigns.items(campaign_id)
        assert [job.generation for job in items] == [1, 2, 2, 1, 2, 1]
        assert [job.hold for job in items] == [None, "campaign", "campaign", None, "campaign", None]
        assert [job.seed for job in items] == seeds
        campaigns.counts(campaign_id)
        self.ask(campaigns, campaign_id, include_cancelled=True, new_seeds=True)
        campaigns.end()
        assert campaigns.states(campaign_id)[JobState.QUEUED] == [2, 3, 4, 5, 6]
        assert [job.seed == seed for job, seed in zip(campaigns.items(campaign_id), seeds, strict=True)] == [
            True,
            True,
            True,
            False,
            True,
            False,
        ]
        campaigns.counts(campaign_id)

    def test_each_part_goes_on_where_the_last_one_ended(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statements, "CHANGED_AT_ONCE", 2)
        campaign_id = loaded(campaigns, 6)
        for line in range(1, 6):
            campaigns.run(campaign_id, line, code="worker_lost")
        campaigns.open(campaign_id, 6)
        campaigns.jobs.run(jobs.cancel(campaigns.items(campaign_id)[5].id, project="default"))
        self.ask(campaigns, campaign_id, include_cancelled=True)
        ender = Ender(campaigns.settings, campaigns.model, campaigns.engine, owner="test")
        with campaigns.engine.begin() as connection:
            # passed over, and not forgotten
            connection.execute(text("SELECT FROM jobs WHERE line = 1 FOR UPDATE"))
            for reached in ([2, 3], [2, 3, 4, 5]):
                ender.turn()
                assert campaigns.states(campaign_id)[JobState.QUEUED] == reached
                retry = campaigns.read(campaign_id).retry
                assert retry is not None
                assert retry["reached"] == reached[-1]
        campaigns.end()
        assert campaigns.states(campaign_id) == {JobState.QUEUED: [1, 2, 3, 4, 5, 6]}
        assert campaigns.read(campaign_id).retry is None
        campaigns.counts(campaign_id)

    def test_what_fails_again_meanwhile_is_not_meant(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statements, "CHANGED_AT_ONCE", 1)
        campaign_id = loaded(campaigns, 2)
        for line in (1, 2):
            campaigns.run(campaign_id, line, code="worker_lost")
        self.ask(campaigns, campaign_id)
        ender = Ender(campaigns.settings, campaigns.model, campaigns.engine, owner="test")
        ender.turn()
        campaigns.run(campaign_id, 1, code="worker_lost")
        campaigns.end()
        assert [job.generation for job in campaigns.items(campaign_id)] == [2, 2]
        assert campaigns.states(campaign_id) == {JobState.FAILED: [1], JobState.QUEUED: [2]}

    def test_a_campaign_does_not_end_before_its_retry_is_done(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = loaded(campaigns, 1)
        campaigns.run(campaign_id, 1, code="worker_lost")
        self.ask(campaigns, campaign_id)
        monkeypatch.setattr(Ender, "_retry", lambda self: False)
        campaigns.end()
        assert campaigns.read(campaign_id).state == "in_progress"
        assert campaigns.events(campaign_id) == []

    def test_one_that_was_cancelled_while_it_was_read_is_read_no_further(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 2)
        campaigns.execute("UPDATE campaigns SET loaded_at = NULL, loaded_lines = 1")
        campaigns.stop(campaign_id)
        campaigns.end()
        assert campaigns.read(campaign_id).state == "cancelled"
        self.ask(campaigns, campaign_id, include_cancelled=True)
        campaigns.end()
        campaigns.load()
        campaign = campaigns.read(campaign_id)
        assert (campaign.state, campaign.loaded_lines) == ("in_progress", 1)
        assert campaigns.counts(campaign_id)["queued"] == 2


class TestDelete:
    def test_everything_goes_with_a_campaign(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statements, "CHANGED_AT_ONCE", 2)
        campaign_id = loaded(campaigns, 5)
        campaigns.run(campaign_id, 1)
        campaigns.stop(campaign_id)
        campaigns.jobs.run(statements.delete(campaign_id))
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "cancelled"
        assert campaign.purged_at is not None
        assert all(job.deleted_at is not None for job in campaigns.items(campaign_id))
        assert campaigns.counts(campaign_id) == {"completed": 1, "cancelled": 4}
        # nobody can read what nobody can see
        assert (campaign.output_file_id, campaign.error_file_id) == (None, None)
        assert campaigns.events(campaign_id) == []

    def test_a_job_that_somebody_holds_is_deleted_when_it_is_free(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 3)
        campaigns.stop(campaign_id)
        campaigns.end()
        campaigns.jobs.run(statements.delete(campaign_id))
        with campaigns.engine.begin() as connection:
            connection.exec_driver_sql("SELECT FROM jobs WHERE line = 2 FOR UPDATE")
            campaigns.end()
            assert campaigns.read(campaign_id).purged_at is None
            assert [job.deleted_at is not None for job in campaigns.items(campaign_id)] == [True, False, True]
        campaigns.end()
        assert campaigns.read(campaign_id).purged_at is not None
        assert all(job.deleted_at is not None for job in campaigns.items(campaign_id))

    def test_its_jobs_are_not_retried_and_do_not_bring_it_back(self, campaigns: Campaigns) -> None:
        campaign_id = loaded(campaigns, 2)
        campaigns.stop(campaign_id)
        campaigns.end()
        campaigns.jobs.run(statements.delete(campaign_id))
        job = campaigns.items(campaign_id)[0]
        assert campaigns.jobs.run(jobs.retry(job.id, project="default")) is None
        assert campaigns.read(campaign_id).state == "cancelled"
