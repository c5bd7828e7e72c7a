"""What campaigns made is fetched over HTTP: manifests and archives."""

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import JobDriver
from support.campaigns import Campaigns, jsonl, openai_line
from support.campaigns_api import (
    CLIP,
    LINES,
    refused,
)


class TestFetching:
    def test_a_manifest_while_it_runs(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(openai_line(1), openai_line(2), openai_line(3), {"prompt": ""}))
        campaigns.run(campaign_id, 1)
        campaigns.run(campaign_id, 2, code="generation_failed")
        path = f"/v1/campaigns/{campaign_id}/manifest"
        (output,) = (json.loads(line) for line in client.get(f"{path}?part=output").text.splitlines())
        assert (output["custom_id"], output["error"], output["response"]["status_code"]) == ("id-1", None, 200)
        assert output["response"]["body"]["status"] == "completed"
        assert output["response"]["body"]["custom_id"] == "id-1"
        errors = [json.loads(line) for line in client.get(f"{path}?part=errors").text.splitlines()]
        assert [(one["custom_id"], one["error"]["code"], one["error"]["line"]) for one in errors] == [
            ("id-2", "generation_failed", 2),
            (None, "invalid_value", 4),
        ]
        assert {one["response"] for one in errors} == {None}
        every = [json.loads(line) for line in client.get(path).text.splitlines()]
        assert [one["custom_id"] for one in every] == ["id-1", "id-2", "id-3", None]
        assert (every[2]["response"], every[2]["error"]) == (None, None)
        assert len({one["id"] for one in every}) == 4
        response = client.get(f"{path}?format=csv")
        assert response.headers["content-type"].startswith("text/csv")
        assert response.content.startswith(b"\xef\xbb\xbf")
        rows = list(csv.DictReader(io.StringIO(response.content.decode("utf-8-sig"))))
        assert [row["status"] for row in rows] == ["completed", "failed", "queued", "failed"]
        assert [row["error_code"] for row in rows] == ["", "generation_failed", "", "invalid_value"]
        refused(client.get(f"{path}?format=xml"), 400, "invalid_value", "format")
        refused(client.get(f"{path}?part=some"), 400, "invalid_value", "part")

    def test_many_pages_hold_every_line_once(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_api.campaign_pages.PAGE", 4)
        lines = [{"prompt": "x"} if number % 5 else {"prompt": 1} for number in range(1, 60)]
        campaign_id = campaigns.loaded(jsonl(*lines[:20], *[b""] * 3, *[{"prompt": 2}] * 9, *lines[20:]))
        rows = client.get(f"/v1/campaigns/{campaign_id}/manifest?format=csv").content.decode("utf-8-sig")
        numbers = [int(row["line"]) for row in csv.DictReader(io.StringIO(rows))]
        assert numbers == [*range(1, 21), *range(24, 72)]

    def test_cells_are_no_formulas(self, client: TestClient, campaigns: Campaigns) -> None:
        ids = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\nx", "plain", "a=b", 'quo"te', "007"]
        campaign_id = campaigns.loaded(jsonl(*({"prompt": "x", "custom_id": one} for one in ids)))
        text = client.get(f"/v1/campaigns/{campaign_id}/manifest?format=csv").content.decode("utf-8-sig")
        found = [row["custom_id"] for row in csv.DictReader(io.StringIO(text, newline=""))]
        assert found == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\tx", "'\rx", "'\nx", "plain", "a=b", 'quo"te', "007"]
        lines = client.get(f"/v1/campaigns/{campaign_id}/manifest").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == ids

    def test_an_archive_has_every_clip_and_tells_of_those_it_lacks(
        self, client: TestClient, campaigns: Campaigns, api_settings: Settings, tmp_path: Path
    ) -> None:
        ids = ["shot-1", "Shot 1", "../../etc/passwd", "CON", "con", "manifest", None, "shot-2", "é", "lost", "e" * 200]
        lines = [{"prompt": "x"} | ({} if one is None else {"custom_id": one}) for one in [*ids, "waiting"]]
        campaign_id = campaigns.loaded(jsonl(*lines))
        driver = JobDriver(api_settings)
        items = campaigns.items(campaign_id)
        for number, job in enumerate(items[:-1]):
            with Session(campaigns.engine) as session, session.begin():
                session.execute(update(Job).where(Job.id == job.id).values(hold=None))
            driver.complete(job.id, CLIP + bytes([number]), tmp_path, is_stored=job.custom_id != "lost")
        driver.close()
        response = client.get(f"/v1/campaigns/{campaign_id}/archive")
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/zip"
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert archive.testzip() is None
            names = archive.namelist()
            clips = [name for name in names if name.endswith(".mp4")]
            assert clips[0] == "shot-1.mp4"
            assert clips[1] == "Shot_1~2.mp4"
            assert len({name.lower() for name in clips}) == len(clips) == 10
            assert not any("/" in name or name.startswith(".") or len(name) > 200 for name in names)
            assert [archive.read(name)[-1] for name in clips] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
            assert {archive.getinfo(name).compress_type for name in clips} == {zipfile.ZIP_STORED}
            manifest = list(csv.DictReader(io.StringIO(archive.read("manifest.csv").decode("utf-8-sig"))))
            assert len(manifest) == 12
            assert {row["file"] for row in manifest if row["file"]} == {*clips, "lost.mp4"}
            missing = list(csv.DictReader(io.StringIO(archive.read("missing.csv").decode("utf-8-sig"))))
            assert [(row["custom_id"], row["line"]) for row in missing] == [("lost", "10")]

    def test_an_archive_of_nothing_is_one(self, client: TestClient, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(LINES)
        with zipfile.ZipFile(io.BytesIO(client.get(f"/v1/campaigns/{campaign_id}/archive").content)) as archive:
            assert archive.namelist() == ["manifest.csv"]

    def test_more_clips_than_an_archive_may_have_are_refused(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        campaigns.run(campaign_id, 1)
        monkeypatch.setattr("rushes_api.routers.campaigns.MAX_CLIPS", 0)
        error = refused(client.get(f"/v1/campaigns/{campaign_id}/archive"), 409, "archive_too_large")
        assert f"may have 0 clips, and {campaign_id} has 1" in error["message"]

    @pytest.mark.parametrize("path", ["archive", "manifest", "manifest?format=csv&part=errors"])
    def test_a_head_makes_nothing(
        self, client: TestClient, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        campaign_id = campaigns.loaded(LINES)
        whole = client.get(f"/v1/campaigns/{campaign_id}/{path}")

        async def made(*_: Any, **more: Any) -> Any:
            raise AssertionError("a page was read")

        monkeypatch.setattr("rushes_api.campaign_pages.items", made)
        monkeypatch.setattr("rushes_api.campaign_archive.items", made)
        head = client.head(f"/v1/campaigns/{campaign_id}/{path}")
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "content-disposition"):
            assert head.headers[name] == whole.headers[name]
        assert "content-length" not in head.headers
        refused(client.put(f"/v1/campaigns/{campaign_id}/{path}"), 405, "method_not_allowed")
        assert client.head(f"/v1/campaigns/batch_{'0' * 26}/{path}").status_code == 404
