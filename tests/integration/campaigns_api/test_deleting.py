"""Campaigns are deleted over HTTP, and what would go is told first."""

from pathlib import Path

import pytest
from rushes_core.campaigns import statements
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import JobDriver
from support.campaigns import Campaigns, jsonl, openai_line
from support.campaigns_api import CLIP, LINES, get, made, refused, upload
from support.plans import generic_plan, scans


class TestDeleting:
    def test_a_file_that_came_with_it_goes_with_it_unless_another_one_is_read_from_it(
        self, client: TestClient, campaigns: Campaigns
    ) -> None:
        first = made(client.post("/v1/campaigns", json={"requests": [{"prompt": "a dog"}]}))
        second = made(client.post("/v1/campaigns", json={"requests": [{"prompt": "a cat"}]}))
        named = made(client.post("/v1/campaigns", json={"input_file_id": upload(client)}))
        reader = made(client.post("/v1/campaigns", json={"input_file_id": second["input_file_id"]}))
        for one in (first, second, named):
            made(client.delete(f"/v1/campaigns/{one['id']}"))
        kept = {one["id"] for one in made(client.get("/v1/files"))["data"]}
        assert kept == {second["input_file_id"], named["input_file_id"]}
        campaigns.load()
        assert get(client, reader["id"])["request_counts"]["total"] == 1

    def test_what_would_go_is_told_first(
        self, client: TestClient, campaigns: Campaigns, api_settings: Settings, tmp_path: Path
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        driver = JobDriver(api_settings)
        job = campaigns.items(campaign_id)[0]
        campaigns.open(campaign_id, 1)
        driver.complete(job.id, CLIP, tmp_path)
        driver.close()
        told = made(client.delete(f"/v1/campaigns/{campaign_id}?dry_run=1"))
        assert told == {
            "id": campaign_id,
            "object": "batch.deleted",
            "deleted": False,
            "jobs": 3,
            "clips": 1,
            "bytes": len(CLIP),
            "estimated": False,
        }
        assert get(client, campaign_id)["status"] == "in_progress"

    def test_of_many_it_is_told_by_some_of_them(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statements, "COUNTED_AT_ONCE", 2)
        campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, 9))))
        path = f"/v1/campaigns/{campaign_id}?dry_run=1"
        told = made(client.delete(path))
        assert (told["jobs"], told["clips"], told["bytes"], told["estimated"]) == (8, 0, 0, True)
        for line in (1, 2, 4, 7):
            campaigns.run(campaign_id, line)
        campaigns.run(campaign_id, 8, code="not_finite")
        campaigns.execute("""UPDATE jobs SET result = result || '{"bytes": 1000}' WHERE state = 'completed'""")
        told = made(client.delete(path))
        assert (told["jobs"], told["clips"], told["bytes"]) == (8, 4, 4_000)
        # a clip whose retention ended, and one that was deleted by itself
        gone = """UPDATE jobs SET result = result || '{"deleted_at": "2026-12-01T00:00:00Z"}' WHERE line = 2"""
        campaigns.execute(gone)
        campaigns.execute("UPDATE jobs SET deleted_at = now() WHERE line = 7")
        told = made(client.delete(path))
        assert told["clips"] in (1, 2, 3)
        assert told["bytes"] == pytest.approx(told["clips"] * 1_000, abs=500)

    def test_what_would_go_is_read_by_the_index_whatever_there_is(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.execute("ANALYZE jobs")
        with campaigns.engine.connect() as connection:
            connection.exec_driver_sql("SET enable_seqscan = off")
            nodes = list(scans(generic_plan(connection, statements.sample_clips(campaign_id))))
        assert {node.get("Index Name") for node in nodes if node.get("Relation Name") == "jobs"} == {
            "ix_jobs_campaign_state"
        }

    def test_it_goes_with_its_jobs_and_files(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        campaigns.run(campaign_id, 2)
        campaigns.run(campaign_id, 3)
        campaigns.end()
        output = get(client, campaign_id)["output_file_id"]
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        refused(client.get(f"/v1/campaigns/{campaign_id}"), 410, "batch_deleted")
        refused(client.get(f"/v1/files/{output}"), 410, "file_deleted")
        assert made(client.get("/v1/campaigns"))["data"] == []
        campaigns.end()
        assert {job.deleted_at is not None for job in campaigns.items(campaign_id)} == {True}
        assert made(client.get("/v1/videos"))["data"] == []
        assert campaigns.read(campaign_id).purged_at is not None

    def test_one_that_runs_is_cancelled_first(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        assert made(client.delete(f"/v1/campaigns/{campaign_id}"))["deleted"]
        refused(client.delete(f"/v1/campaigns/{campaign_id}?dry_run=1"), 410, "batch_deleted")
        campaigns.end()
        campaigns.end()
        row = campaigns.read(campaign_id)
        assert (row.state, row.purged_at is not None) == ("cancelled", True)
        assert {job.state.value for job in campaigns.items(campaign_id)} == {"cancelled"}
        assert {job.deleted_at is not None for job in campaigns.items(campaign_id)} == {True}
