"""Finished clips on a real store: ranges, preconditions, redirects, and what is answered when there is none."""

import hashlib
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from rushes_api.app import create_app
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, update
from starlette.testclient import TestClient
from support.api import AUTHORIZED, JobDriver, ThreadedApi
from support.faults.proxy import Request as S3Request
from support.faults.proxy import S3Fault, S3Proxy
from support.stack import s3_client, settings_env

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
        assert response.headers["content-disposition"].startswith(f'inline; filename="a-dog-{video_id}.mp4"')
        assert response.headers["x-content-type-options"] == "nosniff"

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

    def test_if_range_with_a_date_gets_the_whole(self, client: TestClient, content: str) -> None:
        # there is no Last-Modified that the date could be compared with
        date = "Sat, 28 Nov 2037 00:00:00 GMT"
        response = client.get(content, headers={"Range": "bytes=0-1", "If-Range": date})
        assert (response.status_code, len(response.content)) == (200, len(CLIP))

    @pytest.mark.parametrize("name", ["If-Modified-Since", "If-Unmodified-Since"])
    def test_dates_without_a_last_modified_are_ignored(self, client: TestClient, content: str, name: str) -> None:
        for date in ("Sat, 28 Nov 2037 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"):
            response = client.get(content, headers={name: date})
            assert response.status_code == 200
            assert "last-modified" not in response.headers

    def test_tags_may_come_in_several_lines(self, client: TestClient, content: str) -> None:
        lines = [*client.headers.items(), ("If-None-Match", '"other", "another"'), ("If-None-Match", ETAG)]
        assert client.get(content, headers=httpx.Headers(lines)).status_code == 304
        lines = [*client.headers.items(), ("If-Match", '"other"'), ("If-Match", f'"a,b", {ETAG}')]
        assert client.get(content, headers=httpx.Headers(lines)).status_code == 200

    @pytest.mark.parametrize(("tag", "status"), [(ETAG, 304), (f"W/{ETAG}", 304), ("*", 304), ('"other"', 200)])
    def test_if_none_match(self, client: TestClient, content: str, tag: str, status: int) -> None:
        response = client.get(content, headers={"If-None-Match": tag, "Range": "bytes=0-1"})
        assert response.status_code == (206 if status == 200 else status)
        if status == 304:
            assert response.content == b""
            assert response.headers["etag"] == ETAG

    def test_if_match(self, client: TestClient, content: str) -> None:
        assert client.get(content, headers={"If-Match": ETAG}).status_code == 200
        assert client.get(content, headers={"If-Match": f"W/{ETAG}"}).status_code == 412
        response = client.get(content, headers={"If-Match": '"other"'})
        assert response.status_code == 412
        assert response.json()["error"]["param"] == "If-Match"
        assert response.json()["error"]["code"] == "precondition_failed"


class TestOtherOrigins:
    def test_a_page_may_read_every_header_that_playing_needs(self, api_settings: Settings, content: str) -> None:
        settings = api_settings.model_copy(update={"cors_origins": "https://app.example"})
        needed = {"Accept-Ranges", "Content-Range", "Content-Length", "Content-Disposition", "ETag", "Retry-After"}
        origin = {"Origin": "https://app.example"}
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            answers = [
                client.get(content, headers=origin | {"Range": "bytes=0-1"}),
                client.get(content, headers=origin | {"Range": f"bytes={len(CLIP)}-"}),
                client.get(f"{content}?variant=audio", headers=origin),
                client.head(content, headers=origin),
            ]
            assert [answer.status_code for answer in answers] == [206, 416, 404, 200]
            for answer in answers:
                assert answer.headers["access-control-allow-origin"] == "https://app.example"
                exposed = answer.headers["access-control-expose-headers"]
                assert needed <= {name.strip() for name in exposed.split(",")}
            asked = origin | {
                "Access-Control-Request-Method": "GET",
                "Access-Control-Request-Headers": "authorization, range, if-range",
            }
            preflight = client.options(content, headers=asked)
            assert preflight.status_code in (200, 204)
            allowed = preflight.headers["access-control-allow-headers"].lower()
            assert all(name in allowed for name in ("authorization", "range", "if-range"))


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

    def test_deleted(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)
        driver.complete(video_id, b"clip", tmp_path)
        client.delete(f"/v1/videos/{video_id}")
        response = client.get(f"/v1/videos/{video_id}/content")
        assert response.status_code == 410
        assert response.json()["error"]["code"] == "video_deleted"

    def test_unknown(self, client: TestClient) -> None:
        for name in (new_video_id(), "video_1", "x" * 300):
            response = client.get(f"/v1/videos/{name}/content?variant=thumbnail")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "video_not_found"

    def test_paths_and_hosts_in_the_error_of_a_failed_job_are_not_told(
        self, client: TestClient, driver: JobDriver
    ) -> None:
        video_id = create(client)
        driver.fail(video_id, code="media_failed", message="/mnt/scratch/a/video.mp4 at http://10.0.0.7:9000/x is full")
        message = client.get(f"/v1/videos/{video_id}/content").json()["error"]["message"]
        assert "is full" in message
        assert not any(inside in message for inside in ("/mnt", "10.0.0.7"))

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


BESIDE = {
    "thumbnail": b"\xff\xd8 a picture",
    "spritesheet": b"\xff\xd8" + bytes(range(256)) * 1_000,
    "audio": b"    ftypM4A sound",
}
TYPES = {"thumbnail": "image/jpeg", "spritesheet": "image/jpeg", "audio": "audio/mp4"}
EXTENSIONS = {"thumbnail": "-thumbnail.jpg", "spritesheet": "-spritesheet.jpg", "audio": ".m4a"}


@pytest.fixture(scope="module")
def rich(client: TestClient, driver: JobDriver, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the content of a finished job with everything beside its clip."""
    video_id = create(client)
    driver.complete(video_id, CLIP, tmp_path_factory.mktemp("rich"), variants=BESIDE)
    return f"/v1/videos/{video_id}/content"


@pytest.mark.parametrize("name", BESIDE)
class TestVariant:
    def test_is_served_as_the_clip_is(self, client: TestClient, rich: str, name: str) -> None:
        data = BESIDE[name]
        response = client.get(rich, params={"variant": name})
        assert (response.status_code, response.content) == (200, data)
        assert response.headers["content-type"] == TYPES[name]
        assert response.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert response.headers["accept-ranges"] == "bytes"
        assert response.headers["content-disposition"].split('"')[1].endswith(EXTENSIONS[name])
        head = client.head(rich, params={"variant": name})
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(data))

    def test_has_ranges_and_preconditions(self, client: TestClient, rich: str, name: str) -> None:
        data = BESIDE[name]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        part = client.get(rich, params={"variant": name}, headers={"Range": "bytes=-5", "If-Range": etag})
        assert (part.status_code, part.content) == (206, data[-5:])
        assert part.headers["content-range"] == f"bytes {len(data) - 5}-{len(data) - 1}/{len(data)}"
        beyond = client.get(rich, params={"variant": name}, headers={"Range": f"bytes={len(data)}-"})
        assert beyond.headers["content-range"] == f"bytes */{len(data)}"
        assert client.get(rich, params={"variant": name}, headers={"If-None-Match": etag}).status_code == 304
        assert client.get(rich, params={"variant": name}, headers={"If-None-Match": ETAG}).status_code == 200

    def test_a_redirect_leads_to_it(self, redirecting: TestClient, rich: str, name: str) -> None:
        response = redirecting.get(rich, params={"variant": name})
        assert response.status_code == 302
        with httpx.Client(timeout=60) as anybody:
            answer = anybody.get(response.headers["location"])
        assert answer.content == BESIDE[name]
        assert answer.headers["content-type"] == TYPES[name]
        assert answer.headers["content-disposition"].split('"')[1].endswith(EXTENSIONS[name])

    def test_is_not_there_for_a_clip_of_the_previous_release(self, client: TestClient, content: str, name: str) -> None:
        response = client.get(content, params={"variant": name})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("variant_not_available", "variant")
        assert "made by a release that stored the clip only" in error["message"]
        assert client.head(content, params={"variant": name}).status_code == 404

    def test_waits_for_the_job(self, client: TestClient, name: str) -> None:
        response = client.get(f"/v1/videos/{create(client)}/content", params={"variant": name})
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "video_not_ready"


class TestVariants:
    def test_the_video_lists_them_with_where_they_are(self, client: TestClient, rich: str) -> None:
        video = client.get(rich.removesuffix("/content")).json()
        variants = video["output"]["variants"]
        assert [one["name"] for one in variants] == ["video", *BESIDE]
        assert variants[0]["url"] == video["output"]["content_url"]
        for one in variants:
            response = client.get(one["url"])
            assert response.headers["content-type"] == one["content_type"]
            assert len(response.content) == one["bytes"]

    def test_a_video_without_a_clip_lists_none(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)
        assert client.get(f"/v1/videos/{video_id}").json()["output"]["variants"] == []
        driver.complete(video_id, b"clip", tmp_path)
        variants = client.get(f"/v1/videos/{video_id}").json()["output"]["variants"]
        assert [one["name"] for one in variants] == ["video"]

    def test_one_that_is_missing_says_why(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)
        driver.complete(video_id, b"clip", tmp_path, variants={"audio": b"sound"})
        response = client.get(f"/v1/videos/{video_id}/content?variant=thumbnail")
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert "could not be made" in message
        assert "variant may be video, audio" in message

    def test_pictures_that_nobody_wanted(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        posted = client.post("/v1/videos", json={"prompt": "a dog", "output": {"thumbnail": False}})
        video_id = posted.json()["id"]
        driver.complete(video_id, b"clip", tmp_path, variants={"audio": b"sound"})
        for name in ("thumbnail", "spritesheet"):
            response = client.get(f"/v1/videos/{video_id}/content?variant={name}")
            assert response.status_code == 404
            assert "output.thumbnail was false" in response.json()["error"]["message"]
        assert client.get(f"/v1/videos/{video_id}/content?variant=audio").content == b"sound"

    @pytest.mark.parametrize("variant", ["poster", "", "Video", "video.mp4", "../video"])
    def test_an_unknown_one_is_refused_with_the_list(self, client: TestClient, content: str, variant: str) -> None:
        assert client.get(f"{content}?variant=video").status_code == 200
        response = client.get(content, params={"variant": variant})
        assert response.status_code == 400
        assert "must be one of video, thumbnail, spritesheet, audio" in response.json()["error"]["message"]

    def test_one_that_was_lost(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)
        driver.complete(video_id, b"clip", tmp_path, variants=BESIDE, is_stored=False)
        response = client.get(f"/v1/videos/{video_id}/content?variant=audio")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "video_content_missing"

    def test_none_is_left_when_retention_removed_the_clip(
        self, client: TestClient, driver: JobDriver, api_settings: Settings, tmp_path: Path
    ) -> None:
        video_id = create(client)
        job = driver.complete(video_id, b"clip", tmp_path, variants=BESIDE)
        assert job.result is not None
        with driver.engine.begin() as connection:
            long_ago = func.now() - timedelta(days=40)
            connection.execute(update(Job).where(Job.id == video_id).values(finished_at=long_ago))
        sweeper = Sweeper(api_settings.model_copy(update={"retention_days": 30}))
        sweeper.tidy()
        sweeper.close()
        for name in ("video", *BESIDE):
            response = client.get(f"/v1/videos/{video_id}/content?variant={name}")
            assert response.status_code == 410
            assert response.json()["error"]["code"] == "video_expired"
        assert not any(driver.store.head(one["key"]) for one in job.result["variants"].values())


@pytest.mark.parametrize("delivery", ["proxy", "redirect"])
def test_content_comes_from_the_bucket_and_prefix_that_the_request_named(
    api_settings: Settings, driver: JobDriver, tmp_path: Path, delivery: str
) -> None:
    bucket = f"other-{delivery}"
    s3_client(settings_env(api_settings)).create_bucket(Bucket=bucket)
    changes = {"s3_output_buckets": bucket, "content_delivery": delivery}
    settings = Settings(**(api_settings.model_dump() | changes))
    with TestClient(create_app(settings), headers=AUTHORIZED, follow_redirects=False) as client:
        output = {"bucket": bucket, "key_prefix": "acme/spring"}
        posted = client.post("/v1/videos", json={"prompt": "a dog", "output": output})
        assert posted.status_code == 200, posted.text
        video_id = posted.json()["id"]
        driver.complete(video_id, b"clip", tmp_path, variants=BESIDE)
        keys = [item.key for page in driver.store.in_bucket(bucket).list_pages("") for item in page]
        assert len(keys) == 1 + len(BESIDE)
        assert all(key.startswith(f"results/default/acme/spring/{video_id}/") for key in keys)
        for name, data in {"video": b"clip", **BESIDE}.items():
            response = client.get(f"/v1/videos/{video_id}/content", params={"variant": name})
            if delivery == "redirect":
                response = httpx.get(response.headers["location"], timeout=60)
            assert response.content == data
    # a bucket that is taken off the list keeps what it has
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
        assert client.get(f"/v1/videos/{video_id}/content").content == b"clip"


def prompted(client: TestClient, driver: JobDriver, tmp_path: Path, prompt: str) -> str:
    """A finished job with this prompt, whether or not the API would take it; its id."""
    video_id = create(client)
    with driver.engine.begin() as connection:
        connection.execute(update(Job).where(Job.id == video_id).values(prompt=prompt))
    driver.complete(video_id, b"clip", tmp_path)
    return video_id


class TestFilename:
    @pytest.mark.parametrize(
        ("prompt", "plain", "full"),
        [
            ("A dog, <d>Good boy!</d>", "A-dog-Good-boy-", None),
            ('say "hi"; filename=x.exe\r\nSet-Cookie: a=b', "say-hi-filename-x-exe-Set-Cookie-a-b-", None),
            ("../../etc/passwd\\..\\x", "etc-passwd-x-", None),
            (".hidden", "hidden-", None),
            ("CON", "CON-", None),
            ("雪の中の犬", "", "雪の中の犬-"),
            ("\u202egnp.exe \u200bdog", "gnp-exe-dog-", None),
            ("😀 happy 👨\u200d👩\u200d👧", "happy-", "😀-happy-👨-👩-👧-"),
            ("%2e%2e%2fx %00", "2e-2e-2fx-00-", None),
            ("Łódź café ½", "odz-cafe-12-", "Łódź-café-½-"),
            ("\u0301\u0301 mark", "mark-", None),
            ("?!… ***", "", ""),
            ("word " * 13_000, "word-" * 12, None),
            ("é" * 60_000, "e" * 60 + "-", "é" * 60 + "-"),
            ("雪" * 20_000, "", "雪" * 53 + "-"),
        ],
        ids=lambda value: ascii(value)[:24],
    )
    def test_is_safe_for_any_prompt(
        self, client: TestClient, driver: JobDriver, tmp_path: Path, prompt: str, plain: str, full: str | None
    ) -> None:
        video_id = prompted(client, driver, tmp_path, prompt)
        value = client.get(f"/v1/videos/{video_id}/content").headers["content-disposition"]
        assert value.isascii()
        match = re.fullmatch(r"inline; filename=\"([A-Za-z0-9._ -]+)\"; filename\*=UTF-8''([A-Za-z0-9._~%-]+)", value)
        assert match is not None, value
        assert match[1] == f"{plain}{video_id}.mp4"
        name = unquote(match[2])
        assert name == f"{plain if full is None else full}{video_id}.mp4"
        assert len(name.encode()) <= 255

    def test_is_the_same_at_the_store(
        self, redirecting: TestClient, client: TestClient, driver: JobDriver, tmp_path: Path
    ) -> None:
        video_id = prompted(client, driver, tmp_path, '雪 "quoted"\n../x')
        url = redirecting.get(f"/v1/videos/{video_id}/content").headers["location"]
        with httpx.Client(timeout=60) as anybody:
            at_store = anybody.get(url).headers["content-disposition"]
        assert at_store == client.get(f"/v1/videos/{video_id}/content").headers["content-disposition"]


@pytest.fixture
def redirecting(api_settings: Settings) -> Iterator[TestClient]:
    redirect = {"content_delivery": "redirect", "presigned_url_seconds": 120}
    settings = Settings(**(api_settings.model_dump() | redirect))
    with TestClient(create_app(settings), headers=AUTHORIZED, follow_redirects=False) as client:
        yield client


class TestRedirect:
    def test_it_leads_to_the_clip_without_the_key(self, redirecting: TestClient, content: str) -> None:
        response = redirecting.get(content)
        assert response.status_code == 302
        assert response.headers["cache-control"] == "no-store"
        with httpx.Client(timeout=60) as anybody:
            part = anybody.get(response.headers["location"], headers={"Range": "bytes=10-19"})
            assert (part.status_code, part.content) == (206, CLIP[10:20])
            assert part.headers["content-type"] == "video/mp4"
            video_id = content.split("/")[3]
            assert part.headers["content-disposition"].startswith(f'inline; filename="a-dog-{video_id}.mp4"')

    def test_head_is_answered_here_because_the_url_is_signed_for_get(
        self, redirecting: TestClient, content: str
    ) -> None:
        response = redirecting.head(content)
        assert (response.status_code, response.headers["content-length"]) == (200, str(len(CLIP)))
        assert response.headers["etag"] == ETAG

    def test_the_store_is_sent_one_kind_of_credentials(self, api_settings: Settings, content: str) -> None:
        """AWS refuses a signed URL with an Authorization header beside it, so clients must drop that on the way."""
        store = urlsplit(api_settings.s3_endpoint_url)
        assert store.hostname is not None
        assert store.port is not None

        def refuse_two(request: S3Request) -> S3Fault:
            both = "authorization" in request.headers and "X-Amz-Signature=" in request.target
            return S3Fault.REFUSE if both else S3Fault.PASS

        with S3Proxy(store.hostname, store.port) as proxy:
            proxy.rule = refuse_two
            redirect = {"s3_endpoint_url": proxy.url, "content_delivery": "redirect"}
            settings = Settings(**(api_settings.model_dump() | redirect))
            with (
                ThreadedApi(settings) as api,
                httpx.Client(base_url=api.url, headers=AUTHORIZED, follow_redirects=True, timeout=30) as http,
            ):
                assert http.get(content).content == CLIP
                # what curl --location-trusted does: for such clients there is ?redirect=false
                leads_to = http.get(content, follow_redirects=False).headers["location"]
                with pytest.raises(httpx.TransportError):
                    httpx.get(leads_to, headers=AUTHORIZED, timeout=30)
                assert httpx.get(http.get(f"{content}?redirect=false").json()["url"], timeout=30).content == CLIP
            with ThreadedApi(api_settings.model_copy(update={"s3_endpoint_url": proxy.url})) as api:
                # a deployment that streams leads nobody anywhere
                assert httpx.get(f"{api.url}{content}", headers=AUTHORIZED, timeout=30).content == CLIP

    def test_a_page_may_ask_for_the_address(self, redirecting: TestClient, content: str) -> None:
        response = redirecting.get(f"{content}?redirect=false")
        assert response.status_code == 200
        answer = response.json()
        assert answer.keys() == {"url", "expires_at"}
        with httpx.Client(timeout=60) as anybody:
            assert anybody.get(answer["url"]).content == CLIP

    def test_the_parameter_is_checked(self, redirecting: TestClient, client: TestClient, content: str) -> None:
        assert redirecting.get(f"{content}?redirect=no").json()["error"]["param"] == "redirect"
        response = client.get(f"{content}?redirect=maybe").json()
        assert response["error"]["message"] == "redirect must be true or false, got 'maybe'"
        # a deployment that streams may have no store that clients can reach
        assert client.get(f"{content}?redirect=false").json()["error"]["param"] == "redirect"

    def test_there_is_nothing_to_lead_to_before_the_end(self, redirecting: TestClient) -> None:
        assert redirecting.get(f"/v1/videos/{create(redirecting)}/content").status_code == 409
