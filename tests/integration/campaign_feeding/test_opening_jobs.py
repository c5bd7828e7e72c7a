"""Which jobs of campaigns may be claimed, on real Postgres."""

import threading

import pytest
from rushes_core.campaigns import feeding
from rushes_core.campaigns.opening import FIRST_ITEMS, MAX_OPEN, MIN_OPEN
from rushes_core.models import ApiKey
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.campaign_feeding import change_and_close, num_live
from support.campaign_rows import LARGE, SMALL, CampaignRows
from support.plans import generic_plan, scans
from support.waiting import wait_until


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


@pytest.mark.usefixtures("one_day")
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
            wait_until(lambda: [num_live(rows.engine, campaign) for campaign in most] == [3, 3])
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
