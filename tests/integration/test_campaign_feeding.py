"""Which jobs of campaigns may be claimed, on real Postgres."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from rushes_core import jobs
from rushes_core.campaigns import closing, feeder, feeding
from rushes_core.campaigns.opening import FIRST_ITEMS, MAX_OPEN, MIN_OPEN
from rushes_core.campaigns.windows import DAYS
from rushes_core.database import create_sync_engine
from rushes_core.models import ApiKey, Job
from rushes_core.settings import Settings
from rushes_core.states import JobState
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.campaign_rows import LARGE, SMALL, CampaignRows
from support.job_rows import ERROR
from support.plans import generic_plan, scans
from support.waiting import wait_until

AGO = func.now() - text("interval '1 minute'")


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


def campaigns(engine: Engine) -> list[str]:
    with engine.begin() as connection:
        return list(connection.execute(text("SELECT id FROM campaigns")).scalars())


def num_live(engine: Engine, campaign: str) -> int:
    found = select(func.count()).where(
        Job.campaign_id == campaign,
        Job.state.in_(("queued", "claimed", "running")),
        Job.hold.is_distinct_from("campaign"),
    )
    with Session(engine) as session:
        return session.scalars(found).one()


def change_and_close(rows: CampaignRows, campaign: str, **values: Any) -> None:
    """What a request does that pauses or changes a campaign."""
    with rows.engine.begin() as connection:
        sets = ", ".join(f"{name} = {value}" for name, value in values.items())
        connection.execute(text(f"UPDATE campaigns SET {sets} WHERE id = :id"), {"id": campaign})
        connection.execute(feeder.close_open(campaign))


class TestOpening:
    def test_nothing_of_a_campaign_is_claimed_before_it_is_opened(self, rows: CampaignRows) -> None:
        rows.campaign()
        assert rows.claim() is None
        rows.feed()
        assert rows.claim() is not None

    def test_a_few_are_open_whatever_the_size_of_the_campaign(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(1_000)
        rows.feed()
        assert rows.open_lines(campaign) == list(range(1, MIN_OPEN + 1))
        rows.feed()
        assert len(rows.open_lines(campaign)) == MIN_OPEN

    def test_more_are_open_the_faster_they_are_claimed(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(1_000)
        for _ in range(5):
            rows.feed()
            while rows.claim() is not None:
                pass
        rows.feed()
        assert len(rows.open_lines(campaign)) == MAX_OPEN

    def test_every_replica_has_something_to_claim(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(100)
        for number in range(12):
            rows.replica(f"worker-r{number}#1")
        rows.feed()
        assert len(rows.open_lines(campaign)) == 24

    def test_clips_of_one_shape_follow_each_other(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(40, shapes=(SMALL, LARGE))
        for number in range(20):
            rows.replica(f"worker-r{number}#1")
        rows.feed()
        assert rows.open_lines(campaign) == [*range(1, 40, 2), *range(2, 41, 2)]

    def test_lines_come_in_their_order_otherwise(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(12)
        claimed: list[int | None] = []
        for _ in range(6):
            rows.feed()
            claimed += [job.line for job in (rows.claim(), rows.claim()) if job is not None]
        assert claimed == list(range(1, 13))
        assert rows.open_lines(campaign) == []

    def test_first_items_of_a_new_campaign_come_before_the_others_of_its_project(self, rows: CampaignRows) -> None:
        old = rows.campaign(1_000)
        for _ in range(4):
            rows.feed()
            for _ in range(4):
                rows.complete(rows.claim_and_start())
        rows.feed()
        new = rows.campaign(1_000)
        rows.feed()
        claimed = [rows.claim_and_start().campaign_id for _ in range(FIRST_ITEMS + 1)]
        assert claimed == [new] * FIRST_ITEMS + [old]

    def test_campaigns_of_a_project_take_turns_by_the_work_of_their_clips(self, rows: CampaignRows) -> None:
        cost = {SMALL: 107 * 480 * 480, LARGE: 141 * 832 * 480}
        small, large = rows.campaign(400), rows.campaign(400, shapes=(LARGE,))
        work = {small: 0, large: 0}
        for number in range(160):
            if number % 4 == 0:
                rows.feed()
            job = rows.claim_and_start()
            rows.complete(job)
            assert job.campaign_id is not None
            work[job.campaign_id] += cost[job.width, job.height, job.num_frames]
        assert 0.7 < work[small] / work[large] < 1.4

    def test_a_key_with_max_running_keeps_to_it(self, rows: CampaignRows) -> None:
        with Session(rows.engine) as session, session.begin():
            session.execute(text("INSERT INTO projects (name) VALUES ('default') ON CONFLICT DO NOTHING"))
            names = {"id": "key_limited", "project": "default", "name": "limited", "hint": "abcd", "digest": b"limited"}
            session.add(ApiKey(**names, scopes=[], priorities=[], max_running=2))
        campaign = rows.campaign(10, api_key="key_limited")
        rows.feed()
        assert len(rows.open_lines(campaign)) == 2
        assert num_live(rows.engine, campaign) == MIN_OPEN

    def test_a_change_of_class_holds_for_what_is_opened_from_then_on(self, rows: CampaignRows) -> None:
        campaign = rows.campaign()
        rows.feed()
        change_and_close(rows, campaign, priority=0, overrides_priority=True)
        rows.add(priority=1)
        rows.feed()
        assert rows.claim_and_start().campaign_id == campaign

    def test_a_pass_reads_no_table_of_jobs_from_end_to_end(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(20_000)
        rows.feed()
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE jobs, campaigns, campaign_counts"))
            waiting = feeding.WAITING.bindparams(campaign=campaign, last_line=9, count=64)
            for statement, index in (
                (feeding.standings(), "ix_jobs_campaign_open"),
                (waiting, "ix_jobs_campaign_state"),
            ):
                nodes = list(scans(generic_plan(connection, statement)))
                assert index in {node.get("Index Name") for node in nodes}
                assert not [
                    node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "jobs"
                ]


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


class TestDay:
    """A key has used its GPU seconds of the day."""

    def limited(self, rows: CampaignRows) -> str:
        with Session(rows.engine) as session, session.begin():
            session.execute(text("INSERT INTO projects (name) VALUES ('default') ON CONFLICT DO NOTHING"))
            names = {"id": "key_day", "project": "default", "name": "day", "hint": "abcd", "digest": b"day"}
            session.add(ApiKey(**names, scopes=[], priorities=[], daily_gpu_seconds=100))
        return "key_day"

    def test_nothing_of_its_campaigns_starts_until_the_next_day(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(10, api_key=self.limited(rows))
        other = rows.campaign(10, project="other")
        rows.feed()
        assert len(rows.open_lines(campaign)) == MIN_OPEN
        running = rows.take(101, rows.claim_and_start())
        rows.feed()
        if running.campaign_id != campaign:
            running = rows.take(101, rows.claim_and_start())
        assert running.campaign_id == campaign
        rows.complete(running)
        rows.feed()
        assert (rows.open_lines(campaign), rows.of(campaign).hold_reason) == ([], "quota")
        assert rows.open_lines(other) != []
        assert rows.events() == []
        with rows.engine.begin() as connection:
            connection.execute(text("UPDATE api_key_usage SET day = day - 1"))
        rows.feed()
        assert (len(rows.open_lines(campaign)), rows.of(campaign).hold_reason) == (MIN_OPEN, None)

    def test_a_larger_limit_goes_on_at_once(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(10, api_key=self.limited(rows))
        with rows.engine.begin() as connection:
            today = "(now() AT TIME ZONE 'UTC')::date"
            connection.execute(text(f"INSERT INTO api_key_usage VALUES ('key_day', {today}, 100, 1)"))
        rows.feed()
        assert (rows.open_lines(campaign), rows.of(campaign).hold_reason) == ([], "quota")
        with rows.engine.begin() as connection:
            connection.execute(text("UPDATE api_keys SET daily_gpu_seconds = 101"))
        rows.feed()
        assert len(rows.open_lines(campaign)) == MIN_OPEN


class TestMaxParallel:
    def test_no_more_than_that_run_or_may_be_claimed(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_parallel=3)
        rows.feed()
        first = rows.claim_and_start()
        rows.feed()
        assert num_live(rows.engine, campaign) == 3
        rows.complete(first)
        rows.feed()
        assert num_live(rows.engine, campaign) == 3

    def test_a_smaller_one_closes_what_is_too_much(self, rows: CampaignRows) -> None:
        campaign = rows.campaign(max_parallel=4)
        rows.feed()
        rows.claim_and_start()
        rows.change(campaign, max_parallel=2)
        rows.feed()
        assert rows.open_lines(campaign) == [2]

    def test_feeders_at_once_do_not_exceed_limits(self, rows: CampaignRows) -> None:
        rows.measure(p50=8, p90=10)
        parallel = rows.campaign(300, max_parallel=3)
        budgeted = rows.campaign(300, project="other", budget_gpu_seconds=35)
        stop = threading.Event()
        most = {parallel: 0, budgeted: 0}

        def feed() -> None:
            feeder_of_thread = rows.another_feeder()
            while not stop.is_set():
                feeder_of_thread.feed()

        threads = [threading.Thread(target=feed) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: num_live(rows.engine, parallel) == 3)
            for number in range(40):
                job = rows.claim()
                for campaign in most:
                    most[campaign] = max(most[campaign], num_live(rows.engine, campaign))
                if job is not None and number % 3:
                    started = rows.start(job)
                    assert started is not None
                    if started.campaign_id == parallel:
                        rows.complete(started)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert most == {parallel: 3, budgeted: 3}


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
