"""Files that are only read, and strict ones, which are read before any job is made."""

import pytest
from rushes_core import replicas
from rushes_core.models import MeasuredTime
from rushes_core.sweeper import Sweeper
from rushes_worker.campaigns import chunks
from sqlalchemy.orm import Session
from support.campaigns import COST, Campaigns, jsonl, openai_line


class TestOnlyReading:
    def test_a_dry_run_reports_and_makes_nothing(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        replica = replicas.upsert_replica(
            "gpu#1",
            pool="default",
            layout="r1s4",
            model=campaigns.model.name,
            device="cuda",
            state="ready",
            epoch=1,
        )
        with Session(campaigns.engine) as session, session.begin():
            session.execute(replica)
            session.add(
                MeasuredTime(
                    model=campaigns.model.name,
                    width=480,
                    height=480,
                    num_frames=107,
                    num_jobs=50,
                    run_p50=10.0,
                    run_p80=12.0,
                    run_p90=13.0,
                    phases={},
                )
            )
        rows = [openai_line(1), openai_line(2), b"{", openai_line(1), openai_line(5, seconds="5")]
        days = ["mo", "tu", "we", "th", "fr", "sa", "su"]
        window = {"timezone": "UTC", "days": days, "start": "00:00", "end": "24:00", "on_close": "stop"}
        campaign_id = campaigns.loaded(jsonl(*rows), dry_run=True, window=window)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "completed"
        assert campaign.report is not None
        report = dict(campaign.report)
        errors = report.pop("errors")
        assert report.pop("completes_at") < report.pop("completes_at_latest")
        # the shape that was not measured takes its part by frames, and each replica has four GPUs
        seconds = pytest.approx(4 * 10.0 * (2 + 124 / 107), abs=0.1)
        assert report == {
            "lines": 5,
            "valid": 3,
            "invalid": 2,
            "frames": 2 * 107 + 124,
            "gpu_seconds": seconds,
            "basis": "last 50 clips",
            "fits_window": True,
        }
        assert [(error["line"], error["code"]) for error in errors] == [
            (3, "invalid_line"),
            (4, "duplicate_custom_id"),
        ]
        assert campaigns.items(campaign_id) == []
        assert campaigns.counts(campaign_id) == {}
        assert campaigns.bad_lines(campaign_id) == {}

    def test_a_dry_run_is_forgotten_a_day_after_its_end(self, campaigns: Campaigns) -> None:
        data = jsonl(openai_line(1))
        old, unread, late, real = (
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data),
        )
        for one, hours in ((old, 25), (unread, 25), (late, 23), (real, 25)):
            ended = "UPDATE campaigns SET completed_at = now() - make_interval(hours => :hours) WHERE id = :id"
            campaigns.execute(ended, id=one, hours=hours)
        campaigns.execute("UPDATE campaigns SET state = 'validating', loaded_at = NULL WHERE id = :id", id=unread)
        campaigns.execute("UPDATE campaigns SET state = 'completed' WHERE id = :id", id=real)
        sweeper = Sweeper(campaigns.settings)
        sweeper.tidy()
        sweeper.close()
        gone = {one for one in (old, unread, late, real) if campaigns.read(one).deleted_at is not None}
        assert gone == {old}
        assert campaigns.read(old).purged_at is not None

    def test_a_dry_run_tells_the_first_thousand_bad_lines(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(b"{\n" * 1_500, dry_run=True)
        report = campaigns.read(campaign_id).report
        assert report is not None
        assert (report["invalid"], len(report["errors"]), report["errors"][-1]["line"]) == (1_500, 1_000, 1_000)

    def test_one_bad_line_fails_a_strict_campaign_before_any_job_is_made(self, campaigns: Campaigns) -> None:
        bad = jsonl(openai_line(1), openai_line(2, seconds="long"), openai_line(3), openai_line(1))
        campaign_id = campaigns.loaded(bad, strict=True)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "failed"
        assert campaign.errors is not None
        assert [(error["line"], error["code"], error["param"]) for error in campaign.errors["data"]] == [
            (2, "invalid_value", "seconds"),
            (4, "duplicate_custom_id", "custom_id"),
        ]
        assert campaigns.items(campaign_id) == []
        assert campaigns.execute("SELECT id FROM job_events") == []

    def test_a_strict_campaign_without_bad_lines_is_loaded(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(*map(openai_line, range(3))), strict=True)
        assert campaigns.counts(campaign_id) == {"queued": 3, "remaining_cost": 3 * COST}
