"""Whose clips are rendered next, by GPU-seconds, weights and how long they have waited, on real Postgres."""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from rushes_core import backlog, claims, jobs, measured
from rushes_core.campaigns.feeder import close_open
from rushes_core.campaigns.means import capacities
from rushes_core.models import Job, ProjectShare
from rushes_core.settings import Settings
from rushes_core.shares import MOST_LAG_SECONDS
from rushes_worker.ledger import Ledger
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from support.campaign_rows import LARGE, SMALL, CampaignRows
from support.job_rows import MODEL
from support.plans import generic_plan, scans

SECONDS = {SMALL: 10.0, LARGE: 45.0}
"""What clips take here, which is not in proportion to their frames and pixels."""
HOUR_AGO = text("now() - interval '1 hour'")


@pytest.fixture
def rows(engine: Engine) -> CampaignRows:
    rows = CampaignRows(engine)
    rows.clear()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM projects WHERE name <> 'default'"))
    return rows


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = Ledger(settings, replica_id="worker-r0#1", model=MODEL)
    yield ledger
    ledger.close()


def weigh(rows: CampaignRows, weights: Mapping[str, float]) -> None:
    with rows.engine.begin() as connection:
        for name, weight in weights.items():
            values = {"name": name, "weight": weight}
            connection.execute(text("INSERT INTO projects (name, weight) VALUES (:name, :weight)"), values)


class Play:
    """Replicas that render, and a dispatcher that passes, by the clock of the play: what a clip took is put into its
    row as it completes. Each replica claims one job ahead.

    Args:
        pass_seconds: between two passes of the feeder.
    """

    def __init__(self, rows: CampaignRows, *, num_replicas: int, pass_seconds: float) -> None:
        self._rows = rows
        self._replicas = range(num_replicas)
        self._pass_seconds = pass_seconds
        self._draw = random.Random(7)
        self._ahead: dict[int, Job] = {}
        self._rendering: dict[int, tuple[float, Job]] = {}
        self._idle: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._num_done = 0
        self._spent: dict[str, float] = defaultdict(float)

    def gpu_seconds(self, num_jobs: int) -> dict[str, float]:
        """Of each project when so many jobs have completed, those of clips that are being rendered included."""
        self._pass()
        self._at(measured.MEASURE_SECONDS, self._measure)
        for replica in self._replicas:
            self._at(0, lambda replica=replica: self._turn(replica))
        while self._num_done < num_jobs:
            self._now, _, action = heapq.heappop(self._due)
            action()
        for began, job in self._rendering.values():
            self._spent[job.project] += self._now - began
        return self._spent

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (self._now + seconds, self._number, action))

    def _pass(self) -> None:
        self._rows.feed()
        self._rows.settle_shares()
        for replica in sorted(self._idle):
            self._at(0, lambda replica=replica: self._turn(replica))
        self._idle.clear()
        self._at(self._pass_seconds, self._pass)

    def _measure(self) -> None:
        self._rows.measure_completed()
        self._at(measured.MEASURE_SECONDS, self._measure)

    def _turn(self, replica: int) -> None:
        held = self._ahead.pop(replica, None) or self._rows.claim()
        if held is None:
            self._idle.add(replica)
            return
        job = self._rows.start(held)
        assert job is not None
        seconds = SECONDS[job.width, job.height, job.num_frames] * self._draw.uniform(0.8, 1.3)
        self._rendering[replica] = self._now, job
        self._at(seconds, lambda: self._end(replica, job, seconds))
        if (ahead := self._rows.claim()) is not None:
            self._ahead[replica] = ahead

    def _end(self, replica: int, job: Job, seconds: float) -> None:
        del self._rendering[replica]
        self._rows.complete_after(seconds, job)
        self._spent[job.project] += seconds
        self._num_done += 1
        self._turn(replica)


def virtual_time(rows: CampaignRows, project: str) -> float:
    with Session(rows.engine) as session:
        return session.get_one(ProjectShare, project).virtual_time


class TestShares:
    @pytest.mark.parametrize(
        ("num_replicas", "known", "pass_seconds", "num_jobs"),
        [
            pytest.param(1, 1.0, 60, 200, id="of_one_replica"),
            pytest.param(12, 1.0, 5, 200, id="of_twelve_replicas"),
            pytest.param(12, None, 5, 200, id="while_nothing_was_measured"),
            # more jobs: what the first passes open is far from the weights
            pytest.param(12, 1.0, 90, 300, id="of_clips_shorter_than_a_pass"),
            pytest.param(12, 3.0, 5, 200, id="of_clips_that_take_a_third_of_what_they_took_before"),
        ],
    )
    def test_projects_have_gpu_seconds_by_their_weights(
        self, rows: CampaignRows, num_replicas: int, known: float | None, pass_seconds: float, num_jobs: int
    ) -> None:
        weights = {"one": 1.0, "another": 1.0, "double": 2.0}
        weigh(rows, weights)
        if known is not None:
            for shape, seconds in SECONDS.items():
                rows.measure(shape, p50=known * seconds, p90=1.3 * known * seconds)
        for number in range(num_replicas):
            rows.replica(f"worker-r{number}#1")
        shapes = {"one": (SMALL,), "another": (LARGE,), "double": (SMALL, LARGE, SMALL)}
        campaigns = [rows.campaign(400, project=project, shapes=shapes[project]) for project in weights]
        spent = Play(rows, num_replicas=num_replicas, pass_seconds=pass_seconds).gpu_seconds(num_jobs)
        shares = {project: spent[project] / sum(spent.values()) for project in weights}
        assert shares == {project: pytest.approx(weight / 4, rel=0.05) for project, weight in weights.items()}
        for campaign in campaigns:
            rows.check_counts(campaign)

    def test_a_project_is_owed_what_others_had_while_none_of_its_waiting_jobs_was_open(
        self, rows: CampaignRows
    ) -> None:
        rows.measure(SMALL, p50=10, p90=12)
        mine, other = rows.campaign(project="mine"), rows.campaign(project="other")
        rows.feed()
        assert {job.project for job in (rows.claim(), rows.claim()) if job is not None} == {"mine", "other"}
        with rows.engine.begin() as connection:
            connection.execute(close_open(mine))
        assert [job.campaign_id for job in (rows.claim(), rows.claim()) if job is not None] == [other, other]
        assert virtual_time(rows, "other") == 30
        rows.settle_shares()
        rows.feed()
        assert [job.campaign_id for job in (rows.claim(), rows.claim()) if job is not None] == [mine, mine]

    @pytest.mark.parametrize("limit", [{"paused_at": text("now()"), "hold_reason": "paused"}, {"max_parallel": 1}])
    def test_a_campaign_that_may_not_go_on_is_owed_nothing(self, rows: CampaignRows, limit: dict[str, Any]) -> None:
        rows.measure(SMALL, p50=10, p90=12)
        mine, _ = rows.campaign(project="mine"), rows.campaign(project="other")
        rows.feed()
        claimed = [rows.claim() for _ in range(2)]
        assert {job.project for job in claimed if job is not None} == {"mine", "other"}
        with rows.engine.begin() as connection:
            connection.execute(close_open(mine))
        rows.change(mine, **limit)
        for _ in range(2):
            rows.claim()
        rows.settle_shares()
        rows.change(mine, paused_at=None, hold_reason=None, max_parallel=None)
        rows.feed()
        assert rows.claimed_of("mine").campaign_id == mine
        assert virtual_time(rows, "mine") == virtual_time(rows, "other") == 30

    def test_a_project_is_owed_no_more_than_all_gpus_do_in_minutes(self, rows: CampaignRows) -> None:
        rows.replica(layout="r1s2")
        for name in ("stopped", "silent", "starting"):
            rows.replica(name, layout="r1s8")
        for project in ("late", "early"):
            rows.add(project=project)
        with rows.engine.begin() as connection:
            connection.execute(text("UPDATE replicas SET state = id WHERE id IN ('stopped', 'starting')"))
            silent = "UPDATE replicas SET last_seen = now() - interval '5 min' WHERE id = 'silent'"
            connection.execute(text(silent))
            connection.execute(text("UPDATE project_shares SET virtual_time = 1 WHERE project = 'late'"))
            ahead = "UPDATE project_shares SET virtual_time = 5001, last_start = 5000 WHERE project = 'early'"
            connection.execute(text(ahead))
        rows.settle_shares()
        assert virtual_time(rows, "late") == 5000 - 2 * MOST_LAG_SECONDS
        assert virtual_time(rows, "early") == 5001

    def test_a_claim_charges_the_seconds_that_such_clips_took_by_the_weight(self, rows: CampaignRows) -> None:
        weigh(rows, {"double": 2})
        rows.measure(SMALL, p50=10, p90=12)
        rows.replica(layout="r1s4")
        rows.add(project="other")
        rows.add(project="double")
        assert rows.claimed_of("double").charged == 10 * 4 / 2
        assert virtual_time(rows, "double") == 20

    def test_a_shape_that_was_not_measured_is_charged_as_others_in_proportion(self, rows: CampaignRows) -> None:
        rows.measure(SMALL, p50=10, p90=12)
        rows.add(project="other")
        rows.add(project="long", num_frames=2 * SMALL[2])
        assert rows.claimed_of("long").charged == pytest.approx(20)

    def test_the_end_of_an_attempt_puts_right_what_it_took(self, rows: CampaignRows) -> None:
        weigh(rows, {"double": 2})
        rows.measure(SMALL, p50=10, p90=12)
        for _ in range(2):
            rows.add(project="other")
            rows.add(project="double")
        job = rows.claimed_of("double")
        started = rows.start(job)
        assert started is not None
        rows.complete(rows.take(60, started))
        assert virtual_time(rows, "double") == pytest.approx(30, abs=0.5)

    def test_what_was_given_back_unstarted_costs_nothing(self, rows: CampaignRows) -> None:
        rows.measure(SMALL, p50=10, p90=12)
        rows.add(project="other")
        rows.add(project="mine")
        job = rows.claimed_of("mine")
        assert virtual_time(rows, "mine") == 10
        rows.run(jobs.release(job.id, fence=job.fence or 0))
        assert virtual_time(rows, "mine") == 0

    def test_a_forecast_counts_on_the_share_of_the_project(self, rows: CampaignRows) -> None:
        weigh(rows, {"one": 1, "triple": 3})
        for number in range(2):
            rows.replica(f"worker-r{number}#1", layout="r2s4")
        campaigns = [rows.campaign(project=project) for project in ("one", "triple", "triple")]
        rows.feed()
        with rows.engine.begin() as connection:
            found = connection.execute(capacities(campaigns, seen_within_seconds=60)).all()
        shares = {campaign: share for campaign, _, _, share in found}
        assert [shares[campaign] for campaign in campaigns] == [0.25, 0.375, 0.375]
        assert {(replicas, gpus) for _, replicas, gpus, _ in found} == {(2, 4.0)}
        rows.run(backlog.pause_queue("triple"))
        with rows.engine.begin() as connection:
            found = connection.execute(capacities(campaigns[:2], seen_within_seconds=60)).all()
        assert {campaign: share for campaign, _, _, share in found} == {campaigns[0]: 1.0, campaigns[1]: 0.0}


class TestPatience:
    def claimed(self, ledger: Ledger, count: int) -> list[str]:
        claims = [ledger.claim(()) for _ in range(count)]
        return [claim.job.id for claim in claims if claim is not None]

    def test_bulk_is_not_starved_by_normal_work_without_end(self, rows: CampaignRows, ledger: Ledger) -> None:
        bulk = [rows.add(project="patient", priority=2, run_at=HOUR_AGO).id for _ in range(3)]
        for _ in range(60):
            rows.add(project="endless", priority=1)
        claims = [ledger.claim(()) for _ in range(60)]
        assert [claim.job.id for claim in claims if claim is not None and claim.is_overdue] == bulk
        assert [number for number, claim in enumerate(claims) if claim is not None and claim.is_overdue] == [19, 39, 59]

    def test_a_campaign_that_is_passed_over_has_one_claim_in_twenty(self, rows: CampaignRows, ledger: Ledger) -> None:
        campaign = rows.campaign(100, project="patient")
        rows.feed()
        with rows.engine.begin() as connection:
            connection.execute(text("UPDATE jobs SET run_at = now() - interval '1 hour' WHERE hold IS NULL"))
        for _ in range(200):
            rows.add(project="endless", priority=1)
        claimed: list[str | None] = []
        for _ in range(20):
            rows.feed()
            claimed += [rows.read(job).campaign_id for job in self.claimed(ledger, 10)]
        assert [number for number, of in enumerate(claimed) if of == campaign] == list(range(19, 200, 20))

    def test_what_overtakes_is_never_one_that_has_waited(self, rows: CampaignRows, ledger: Ledger) -> None:
        bulk = rows.add(project="patient", priority=2, run_at=HOUR_AGO).id
        for _ in range(30):
            rows.add(project="endless", priority=1)
        claims = [ledger.claim((), by_class=True) for _ in range(30)]
        assert bulk not in [claim.job.id for claim in claims if claim is not None]
        assert ledger.more_urgent_waits(2) is False

    def test_something_more_urgent_waits_only_where_it_could_be_claimed(
        self, rows: CampaignRows, ledger: Ledger
    ) -> None:
        rows.add(project="soon", priority=0, run_at=text("now() + interval '1 hour'"))
        rows.add(project="paused", priority=0)
        rows.run(backlog.pause_queue("paused"))
        rows.add(priority=1)
        assert [ledger.more_urgent_waits(priority) for priority in (0, 1, 2)] == [False, False, True]

    def test_what_has_not_waited_for_long_waits_for_its_class(self, rows: CampaignRows, ledger: Ledger) -> None:
        bulk = rows.add(priority=2, run_at=text("now() - interval '9 minutes'")).id
        for _ in range(25):
            rows.add(priority=1)
        assert bulk not in self.claimed(ledger, 25)

    def test_an_interactive_job_overtakes_at_the_next_claim(self, rows: CampaignRows, ledger: Ledger) -> None:
        campaign = rows.campaign(100)
        rows.feed()
        assert [rows.read(job).campaign_id for job in self.claimed(ledger, 2)] == [campaign, campaign]
        urgent = rows.add(project="urgent", priority=0).id
        assert self.claimed(ledger, 1) == [urgent]

    def test_the_one_that_has_waited_longest_of_all_projects_comes_first(self, rows: CampaignRows) -> None:
        rows.add(project="late", priority=2, run_at=text("now() - interval '20 minutes'"))
        oldest = rows.add(project="early", priority=1, run_at=HOUR_AGO)
        rows.add(project="urgent", priority=0, run_at=text("now() - interval '2 hours'"))
        overdue = claims.claim(model=MODEL, owner="worker", lease_seconds=30, patience_seconds=600)
        assert rows.run(overdue).id == oldest.id
        rows.run(backlog.pause_queue("late"))
        assert rows.run(overdue) is None

    def test_looking_for_it_reads_no_table_from_end_to_end(self, rows: CampaignRows) -> None:
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(_MANY), {"model": MODEL})
            connection.execute(text("ANALYZE jobs, project_shares"))
            overdue = claims.claim(model=MODEL, owner="worker", lease_seconds=30, patience_seconds=600)
            nodes = list(scans(generic_plan(connection, overdue)))
            assert "ix_jobs_claimable" in {node.get("Index Name") for node in nodes}
            assert not [node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "jobs"]


_MANY = """
INSERT INTO jobs (id, project, model, priority, prompt, seed, width, height, num_frames, request, max_attempts)
SELECT 'video_' || i, 'project-' || i % 50, :model, i % 3, 'x', 1, 480, 480, 107, '{}', 3
FROM generate_series(1, 8000) AS i
"""
