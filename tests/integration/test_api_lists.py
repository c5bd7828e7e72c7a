"""Lists of videos: filters, positions, and pages that hold still while jobs come and go."""

import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from rushes_core.ids import new_video_id
from starlette.testclient import TestClient
from support.api import JobDriver


def create(client: TestClient, **body: Any) -> str:
    response = client.post("/v1/videos", json={"prompt": "a dog", **body})
    assert response.status_code == 200, response.text
    video_id: str = response.json()["id"]
    return video_id


def listed(client: TestClient, **query: Any) -> list[str]:
    response = client.get("/v1/videos", params={"limit": 100, **query})
    assert response.status_code == 200, response.text
    return [video["id"] for video in response.json()["data"]]


class TestFilters:
    def test_by_one_status_or_several(self, client: TestClient, driver: JobDriver) -> None:
        tag = {"test": "status"}
        waiting, failed, running = (create(client, metadata=tag) for _ in range(3))
        driver.fail(failed, code="generation_failed", message="no")
        driver.start(running)
        mine = {"metadata[test]": "status"}
        assert listed(client, status="queued", **mine) == [waiting]
        assert listed(client, status="in_progress", **mine) == [running]
        assert listed(client, status="failed,in_progress", **mine) == [running, failed]
        assert listed(client, status="failed,failed,queued", order="asc", **mine) == [waiting, failed]
        assert listed(client, status="expired", **mine) == []

    def test_by_metadata_all_of_it(self, client: TestClient) -> None:
        first = create(client, metadata={"client": "acme", "take": "1", 'odd "key" [x]&=': "ü"})
        second = create(client, metadata={"client": "acme", "take": "2"})
        create(client, metadata={"client": "other", "take": "1"})
        assert listed(client, **{"metadata[client]": "acme"}) == [second, first]
        assert listed(client, **{"metadata[client]": "acme", "metadata[take]": "1"}) == [first]
        assert listed(client, **{'metadata[odd "key" [x]&=]': "ü"}) == [first]
        assert listed(client, **{"metadata[take]": "3"}) == []

    def test_by_model(self, client: TestClient) -> None:
        video_id = create(client)
        model = client.get(f"/v1/videos/{video_id}").json()["model"]
        assert listed(client, model=model, limit=1) == [video_id]
        assert listed(client, model="sora-2") == []

    def test_by_time_in_the_seconds_that_videos_show(self, client: TestClient) -> None:
        video_id = create(client, metadata={"test": "time"})
        created = client.get(f"/v1/videos/{video_id}").json()["created_at"]
        mine = {"metadata[test]": "time"}
        iso = datetime.fromtimestamp(created - 1, UTC).isoformat()
        assert listed(client, created_after=created - 1, **mine) == [video_id]
        assert listed(client, created_after=iso, created_before=created + 1, **mine) == [video_id]
        assert listed(client, created_after=created, **mine) == []
        assert listed(client, created_before=created, **mine) == []

    @pytest.mark.parametrize("last", ["253402300799", "9999-12-31T23:59:59Z"])
    def test_any_time_that_there_is_will_do(self, client: TestClient, last: str) -> None:
        video_id = create(client)
        assert listed(client, created_after="0", created_before=last, limit=1) == [video_id]
        assert listed(client, created_after="1970-01-01T00:00:00+14:00", limit=1) == [video_id]

    @pytest.mark.parametrize(
        ("query", "param", "reason"),
        [
            ("status=queued,", "status", "queued, in_progress"),
            ("status=queued,canceled", "status", "got 'canceled'"),
            ("status=", "status", "must be one of"),
            ("created_after=yesterday", "created_after", "ISO 8601"),
            ("created_before=2026-12-01", "created_before", "ISO 8601"),
            ("created_after=-1", "created_after", "ISO 8601"),
            ("created_before=999999999999", "created_before", "no time that there is"),
            ("model=%00", "model", "name of a model"),
            ("metadata=x", "metadata", "unknown query parameter"),
            ("metadata[a]=%00", "metadata", "NUL"),
            (f"metadata[{'a' * 65}]=b", "metadata", "at most 64 characters"),
            (f"metadata[a]={'b' * 513}", "metadata", "at most 512 characters"),
            ("&".join(f"metadata[{i}]=x" for i in range(17)), "metadata", "at most 16 pairs"),
            ("metadata[a]=b&metadata[a]=c", "metadata[a]", "given twice"),
            ("metadatas[a]=b", "metadatas[a]", "unknown query parameter"),
            ("campaign_id=batch_1", "campaign_id", "id of a campaign"),
            ("custom_id=%00", "custom_id", "no NUL"),
            ("compat=azure", "compat", "must be one of openai"),
        ],
        ids=lambda value: value[:30],
    )
    def test_a_wrong_one_is_named(self, client: TestClient, query: str, param: str, reason: str) -> None:
        response = client.get(f"/v1/videos?{quote(query, safe='=&,%')}")
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert reason in error["message"]


class TestPosition:
    @pytest.mark.parametrize(
        "after",
        ["", "x", "video_", "attempt_1", f"key_{new_video_id()[6:]}", new_video_id().lower(), "video_" + "Z" * 26],
    )
    def test_what_is_no_id_of_a_video_is_refused(self, client: TestClient, after: str) -> None:
        response = client.get(f"/v1/videos?{urlencode({'after': after})}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "after")

    def test_any_id_of_a_video_is_one(self, client: TestClient) -> None:
        older = create(client)
        deleted = create(client)
        client.delete(f"/v1/videos/{deleted}")
        never = new_video_id()
        newer = create(client)
        assert listed(client, after=newer, limit=1) == [older]
        assert listed(client, after=never, limit=1) == [older]
        assert listed(client, after=deleted, limit=1) == [older]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("query", ["", "status=queued,cancelled", "metadata[test]=pages"])
def test_pages_hold_what_was_there_while_jobs_come_and_go(client: TestClient, order: str, query: str) -> None:
    there = [create(client, metadata={"test": "pages"}, priority="bulk") for _ in range(7)]
    gone = there[3]
    found: list[str] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = f"&after={found[-1]}" if found else ""
        page = client.get(f"/v1/videos?limit=2&order={order}{after}&{query}").json()
        ids = [video["id"] for video in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        found += ids
        # one that was listed goes, and so does one that was not; another one comes
        client.delete(f"/v1/videos/{found[-1]}")
        if len(found) == 2:
            client.delete(f"/v1/videos/{gone}")
        if len(found) <= 8:
            create(client, metadata={"test": "pages"}, priority="bulk")
    assert len(found) == len(set(found))
    assert set(there) - {gone} <= set(found)
    assert found == sorted(found, reverse=order == "desc")


def test_the_last_page_says_so(client: TestClient) -> None:
    tag = f"{time.time()}"
    ids = [create(client, metadata={"tag": tag}) for _ in range(4)]
    pages = [client.get("/v1/videos", params={"limit": n, "metadata[tag]": tag}).json() for n in (3, 4, 5)]
    assert [page["has_more"] for page in pages] == [True, False, False]
    assert [page["last_id"] for page in pages] == [ids[1], ids[0], ids[0]]
