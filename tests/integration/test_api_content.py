"""Finished clips on a real store: ranges, preconditions, redirects, and what is answered when there is none."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rushes_api.app import create_app
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver

CLIP = random.Random(7).randbytes(700_001)
ETAG = f'"{hashlib.sha256(CLIP).hexdigest()}"'


def create(client: TestClient) -> str:
    video_id: str = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
    return video_id


@pytest.fixture(scope="module")
def content(client: TestClient, driver: JobDriver, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the content of a finished job."""
    video_id = create(client)
    driver.complete(video_id, CLIP, tmp_path_factory.mktemp("clip"))
    return f"/v1/videos/{video_id}/content"


class TestWhole:
    def test_it_is_the_clip(self, client: TestClient, content: str) -> None:
        response = client.get(content)
        assert response.status_code == 200
        assert response.content == CLIP
        assert response.headers["content-type"] == "video/mp4"
        assert response.headers["content-length"] == str(len(CLIP))
        assert response.headers["accept-ranges"] == "bytes"
        assert response.headers["etag"] == ETAG
        video_id = content.split("/")[3]
        assert response.headers["content-disposition"].startswith(f'attachment; filename="{video_id}.mp4"')

    def test_head_has_the_same_headers_and_no_body(self, client: TestClient, content: str) -> None:
        head, get = client.head(content), client.get(content)
        assert head.status_code == 200
        assert head.content == b""
        own = ("date", "x-request-id")
        assert {k: v for k, v in head.headers.items() if k not in own} == {
            k: v for k, v in get.headers.items() if k not in own
        }

    def test_head_ignores_a_range(self, client: TestClient, content: str) -> None:
        response = client.head(content, headers={"Range": "bytes=0-1"})
        assert (response.status_code, response.headers["content-length"]) == (200, str(len(CLIP)))


class TestRange:
    @pytest.mark.parametrize(
        ("header", "first", "last"),
        [
            ("bytes=0-1", 0, 1),
            ("bytes=0-", 0, len(CLIP) - 1),
            ("bytes=-500", len(CLIP) - 500, len(CLIP) - 1),
            ("bytes=300000-600000", 300_000, 600_000),
            (f"bytes={len(CLIP) - 1}-", len(CLIP) - 1, len(CLIP) - 1),
            (f"bytes=5-{10**20}", 5, len(CLIP) - 1),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_a_part_is_sent(self, client: TestClient, content: str, header: str, first: int, last: int) -> None:
        response = client.get(content, headers={"Range": header})
        assert response.status_code == 206
        assert response.content == CLIP[first : last + 1]
        assert response.headers["content-range"] == f"bytes {first}-{last}/{len(CLIP)}"
        assert response.headers["content-length"] == str(last - first + 1)
        assert response.headers["etag"] == ETAG

    def test_parts_make_the_whole(self, client: TestClient, content: str) -> None:
        step = 250_000
        parts = [
            client.get(content, headers={"Range": f"bytes={start}-{start + step - 1}"}).content
            for start in range(0, len(CLIP), step)
        ]
        assert b"".join(parts) == CLIP

    @pytest.mark.parametrize("header", ["items=0-1", "bytes=0-1,4-5"])
    def test_what_is_no_single_range_gets_the_whole(self, client: TestClient, content: str, header: str) -> None:
        response = client.get(content, headers={"Range": header})
        assert (response.status_code, len(response.content)) == (200, len(CLIP))

    @pytest.mark.parametrize("header", [f"bytes={len(CLIP)}-", "bytes=5-4", "bytes=-0", "bytes=x"])
    def test_what_cannot_be_satisfied_is_refused(self, client: TestClient, content: str, header: str) -> None:
        response = client.get(content, headers={"Range": header})
        assert response.status_code == 416
        assert response.headers["content-range"] == f"bytes */{len(CLIP)}"
        assert response.json()["error"]["code"] == "invalid_range"


class TestPreconditions:
    @pytest.mark.parametrize(("tag", "status"), [(ETAG, 206), ('"other"', 200), (f"W/{ETAG}", 200)])
    def test_if_range(self, client: TestClient, content: str, tag: str, status: int) -> None:
        response = client.get(content, headers={"Range": "bytes=0-1", "If-Range": tag})
        assert response.status_code == status

    @pytest.mark.parametrize(("tag", "status"), [(ETAG, 304), (f"W/{ETAG}", 304), ("*", 304), ('"other"', 200)])
    def test_if_none_match(self, client: TestClient, content: str, tag: str, status: int) -> None:
        response = client.get(content, headers={"If-None-Match": tag, "Range": "bytes=0-1"})
        assert response.status_code == (206 if status == 200 else status)
        if status == 304:
            assert response.content == b""
            assert response.headers["etag"] == ETAG

    def test_if_match(self, client: TestClient, content: str) -> None:
        assert client.get(content, headers={"If-Match": ETAG}).status_code == 200
        response = client.get(content, headers={"If-Match": '"other"'})
        assert response.status_code == 412
        assert response.json()["error"]["param"] == "If-Match"
        assert response.json()["error"]["code"] == "precondition_failed"


class TestNoClip:
    def test_not_yet(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)
        for status in ("queued", "in_progress"):
            response = client.get(f"/v1/videos/{video_id}/content")
            assert response.status_code == 409
            error = response.json()["error"]
            assert error["code"] == "video_not_ready"
            assert status in error["message"]
            assert response.headers["x-should-retry"] == "false"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            if status == "queued":
                driver.start(video_id)

    def test_never(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)
        driver.fail(video_id, code="out_of_memory", message="The decoder ran out of memory.")
        response = client.get(f"/v1/videos/{video_id}/content")
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "out_of_memory"
        assert "The decoder ran out of memory." in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"

    def test_lost(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)
        driver.complete(video_id, b"clip", tmp_path, is_stored=False)
        response = client.get(f"/v1/videos/{video_id}/content")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "video_content_missing"

    @pytest.mark.parametrize("variant", ["thumbnail", "", "Video"])
    def test_another_variant(self, client: TestClient, content: str, variant: str) -> None:
        assert client.get(f"{content}?variant=video").status_code == 200
        response = client.get(f"{content}?variant={variant}")
        assert response.status_code == 400
        assert "must be one of video" in response.json()["error"]["message"]

    def test_a_store_that_is_down_stops_only_content(self, api_settings: Settings, content: str) -> None:
        settings = api_settings.model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"})
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            response = client.get(content)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "storage_unavailable"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert client.head(content).status_code == 200
            assert client.get("/v1/videos").status_code == 200
            assert create(client)


class TestRedirect:
    @pytest.fixture
    def redirecting(self, api_settings: Settings) -> Iterator[TestClient]:
        redirect = {"content_delivery": "redirect", "presigned_url_seconds": 120}
        settings = Settings(**(api_settings.model_dump() | redirect))
        with TestClient(create_app(settings), headers=AUTHORIZED, follow_redirects=False) as client:
            yield client

    def test_it_leads_to_the_clip_without_the_key(self, redirecting: TestClient, content: str) -> None:
        response = redirecting.get(content)
        assert response.status_code == 302
        assert response.headers["cache-control"] == "no-store"
        with httpx.Client() as anybody:
            part = anybody.get(response.headers["location"], headers={"Range": "bytes=10-19"})
            assert (part.status_code, part.content) == (206, CLIP[10:20])
            assert part.headers["content-type"] == "video/mp4"
            assert "attachment" in part.headers["content-disposition"]

    def test_head_is_answered_here_because_the_url_is_signed_for_get(
        self, redirecting: TestClient, content: str
    ) -> None:
        response = redirecting.head(content)
        assert (response.status_code, response.headers["content-length"]) == (200, str(len(CLIP)))
        assert response.headers["etag"] == ETAG

    def test_a_page_may_ask_for_the_address(self, redirecting: TestClient, content: str) -> None:
        response = redirecting.get(f"{content}?redirect=false")
        assert response.status_code == 200
        answer = response.json()
        assert answer.keys() == {"url", "expires_at"}
        with httpx.Client() as anybody:
            assert anybody.get(answer["url"]).content == CLIP

    def test_the_parameter_is_checked(self, redirecting: TestClient, client: TestClient, content: str) -> None:
        assert redirecting.get(f"{content}?redirect=no").json()["error"]["param"] == "redirect"
        # a deployment that streams may have no store that clients can reach
        assert client.get(f"{content}?redirect=false").json()["error"]["param"] == "redirect"

    def test_there_is_nothing_to_lead_to_before_the_end(self, redirecting: TestClient) -> None:
        assert redirecting.get(f"/v1/videos/{create(redirecting)}/content").status_code == 409
