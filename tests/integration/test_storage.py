"""The object store: written once, verified, read by range, reachable under the public name."""

import hashlib
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from botocore import auth
from botocore.exceptions import BotoCoreError
from pydantic import SecretStr
from rushes_core import store_clients, store_faults
from rushes_core.errors import BucketMissing, ObjectMissing, StorageError, StorageRefused
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import PART_BYTES
from support.faults.proxy import Request, Rule, S3Fault, S3Proxy
from support.media import file_sha256
from support.proxy import FreezableProxy
from support.stack import SharedStack, s3_client, settings_of


@pytest.fixture(scope="module")
def store(settings: Settings) -> ObjectStore:
    return ObjectStore(settings)


@pytest.fixture
def proxy(settings: Settings) -> Iterator[S3Proxy]:
    internal = urlsplit(settings.s3_endpoint_url)
    assert internal.hostname is not None
    assert internal.port is not None
    with S3Proxy(internal.hostname, internal.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(settings: Settings, proxy: S3Proxy, tmp_path: Path) -> ObjectStore:
    """The store as it is through `proxy`."""
    return ObjectStore(settings.model_copy(update={"s3_endpoint_url": proxy.url, "scratch": tmp_path}))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def _striking(fault: S3Fault, method: str, part: str, *, times: int = 1_000) -> Rule:
    """Strikes the first requests of this method whose target has this part."""
    left = [times]

    def rule(request: Request) -> S3Fault:
        if request.method != method or part not in request.target or not left[0]:
            return S3Fault.PASS
        left[0] -= 1
        return fault

    return rule


def _put(store: ObjectStore, key: str, path: Path) -> None:
    store.put_file(key, path, content_type="video/mp4", sha256=file_sha256(path))


def test_what_is_stored_can_be_read_by_range(store: ObjectStore, clip: Path) -> None:
    _put(store, "results/a", clip)
    assert b"".join(store.read("results/a", 0, 10_239)) == clip.read_bytes()
    assert b"".join(store.read("results/a", 5, 9)) == clip.read_bytes()[5:10]


def test_the_same_put_twice_is_one_object(store: ObjectStore, clip: Path) -> None:
    _put(store, "results/twice", clip)
    _put(store, "results/twice", clip)


def test_a_key_that_holds_other_bytes_is_never_overwritten(store: ObjectStore, clip: Path, tmp_path: Path) -> None:
    _put(store, "results/mine", clip)
    other = tmp_path / "other"
    other.write_bytes(b"other bytes")
    with pytest.raises(StorageError, match="expected 11 bytes"):
        _put(store, "results/mine", other)
    assert b"".join(store.read("results/mine", 0, 10_239)) == clip.read_bytes()


def test_a_checksum_that_does_not_fit_the_bytes_stores_nothing(store: ObjectStore, clip: Path) -> None:
    with pytest.raises(StorageError):
        store.put_file("results/wrong", clip, content_type="video/mp4", sha256="0" * 64)
    assert store.head("results/wrong") is None


def test_head_of_nothing_is_none(store: ObjectStore) -> None:
    assert store.head("results/nothing") is None


def test_a_missing_bucket_is_an_error(stack: SharedStack) -> None:
    with pytest.raises(StorageError, match="absent"):
        ObjectStore(settings_of(stack.env(), s3_bucket="absent")).check()


def test_a_store_that_is_down_is_an_error_and_not_an_absence(stack: SharedStack) -> None:
    down = ObjectStore(settings_of(stack.env(), s3_endpoint_url="http://127.0.0.1:9"))
    with pytest.raises(StorageError):
        down.head("results/a")


def test_presigned_url_gives_the_file_under_a_name(store: ObjectStore, clip: Path) -> None:
    _put(store, "results/signed", clip)
    url = store.presigned_url("results/signed", filename='a "b"\r\nc é.mp4', content_type="video/mp4", seconds=60)
    answer = httpx.get(url, timeout=60)
    assert answer.content == clip.read_bytes()
    assert answer.headers["content-type"] == "video/mp4"
    assert "filename=" in answer.headers["content-disposition"]


def test_presigned_url_is_signed_for_the_public_endpoint_with_version_4(stack: SharedStack) -> None:
    store = ObjectStore(settings_of(stack.env(), s3_public_endpoint_url="https://media.example.test"))
    parts = urlsplit(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60))
    assert parts.hostname == "media.example.test"
    assert parse_qs(parts.query)["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]


def test_a_url_for_the_public_host_opens_what_was_stored_through_the_internal_one(
    stack: SharedStack, clip: Path
) -> None:
    settings = settings_of(stack.env(), s3_public_endpoint_url="https://media.example.test")
    store = ObjectStore(settings)
    _put(store, "k", clip)
    url = httpx.URL(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60))
    # what a reverse proxy of the store receives: the signature covers the name that the client used
    internal = httpx.URL(settings.s3_endpoint_url)
    arrived = url.copy_with(scheme="http", host=internal.host, port=internal.port)
    assert httpx.get(arrived, timeout=60, headers={"Host": "media.example.test"}).content == clip.read_bytes()
    assert httpx.get(arrived, timeout=60, headers={"Host": "other.example.test"}).status_code == 403


def test_no_access_control_list_is_ever_sent(stack: SharedStack, clip: Path) -> None:
    env = stack.env()
    internal = urlsplit(env["RUSHES_S3_ENDPOINT_URL"])
    assert internal.hostname is not None
    assert internal.port is not None

    def refuse_lists(request: Request) -> S3Fault:
        lists = any(name.startswith(("x-amz-acl", "x-amz-grant-")) for name in request.headers)
        return S3Fault.REFUSE if lists else S3Fault.PASS

    with S3Proxy(internal.hostname, internal.port) as proxy:
        proxy.rule = refuse_lists
        env |= {"RUSHES_S3_ENDPOINT_URL": proxy.url}
        _put(ObjectStore(settings_of(env)), "k", clip)
        assert proxy.strikes == 0
        with pytest.raises(BotoCoreError):
            s3_client(env).put_object(Bucket=env["RUSHES_S3_BUCKET"], Key="l", Body=b"", ACL="public-read")


def test_presigned_url_names_the_region_when_there_is_no_endpoint(stack: SharedStack) -> None:
    store = ObjectStore(settings_of(stack.env(), s3_endpoint_url="", s3_region="eu-north-1", s3_bucket="clips"))
    url = urlsplit(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60))
    assert url.hostname == "clips.s3.eu-north-1.amazonaws.com"
    query = parse_qs(url.query)
    assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
    assert "/eu-north-1/s3/" in query["X-Amz-Credential"][0]


@pytest.mark.parametrize("bucket", ["clips", "clips.eu-1"])
def test_a_custom_endpoint_is_addressed_by_path(stack: SharedStack, bucket: str, clip: Path) -> None:
    env = stack.env()
    s3_client(env).create_bucket(Bucket=bucket)
    store = ObjectStore(settings_of(env, s3_bucket=bucket))
    _put(store, "k", clip)
    url = store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60)
    assert urlsplit(url).path == f"/{bucket}/k"
    assert httpx.get(url, timeout=60).content == clip.read_bytes()


def test_another_bucket_of_the_store_is_one_of_its_own(stack: SharedStack, clip: Path) -> None:
    env = stack.env()
    s3_client(env).create_bucket(Bucket="second")
    store = ObjectStore(settings_of(env, s3_output_buckets=f" second ,{env['RUSHES_S3_BUCKET']},"))
    assert [one.bucket for one in store.buckets] == [store.bucket, "second"]
    second = store.in_bucket("second")
    _put(second, "k", clip)
    assert second.head("k") is not None
    assert store.head("k") is None
    assert "/second/k?" in second.presigned_url("k", filename="a", content_type="video/mp4", seconds=60)
    assert second.delete_prefix("k") == 1
    assert store.in_bucket(None) is store


def test_a_store_that_falls_silent_in_the_middle_of_an_object_is_given_up(
    stack: SharedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = stack.env()
    internal = urlsplit(env["RUSHES_S3_ENDPOINT_URL"])
    assert internal.hostname is not None
    assert internal.port is not None
    big = tmp_path / "big"
    # more than the sockets on the way hold
    big.write_bytes(bytes(32_000_000))
    _put(ObjectStore(settings_of(env)), "k", big)
    monkeypatch.setattr(store_clients, "_READ_TIMEOUT_SECONDS", 1)
    with FreezableProxy(internal.hostname, internal.port) as proxy:
        store = ObjectStore(settings_of(env, s3_endpoint_url=f"http://127.0.0.1:{proxy.port}"))
        pieces = store.read("k", 0, 31_999_999)
        next(pieces)
        proxy.freeze()
        with pytest.raises(StorageError, match="k: "):
            list(pieces)


def test_a_store_that_stalls_while_it_takes_an_object_is_not_sent_it_anew(
    proxied: ObjectStore, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_clients, "_CONNECT_SECONDS", 0.2)
    big = tmp_path / "big"
    # more than the sockets on the way hold
    big.write_bytes(bytes(16_000_000))

    def stall(request: Request) -> S3Fault:
        if request.method == "PUT":
            # the client waits for a second to be told to go on, and then sends
            time.sleep(1.5)
        return S3Fault.PASS

    proxy.rule = stall
    _put(proxied, "results/stalled", big)
    assert [method for method, _, _ in proxy.seen] == ["PUT", "HEAD"]


def test_a_connection_that_breaks_in_the_middle_of_an_object_is_followed_by_another(
    store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    big.write_bytes(random.Random(3).randbytes(2_000_001))
    _put(store, "results/broken", big)
    proxy.rule = _striking(S3Fault.TRUNCATE_REPLY, "GET", "results/broken", times=2)
    assert b"".join(proxied.read("results/broken", 5, 2_000_000)) == big.read_bytes()[5:]
    assert len(proxy.seen) == 3


def test_an_object_of_which_every_connection_brings_nothing_is_given_up(
    store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy, clip: Path
) -> None:
    _put(store, "results/always", clip)
    proxy.rule = _striking(S3Fault.TRUNCATE_REPLY, "GET", "results/always")
    with pytest.raises(StorageError, match="results/always: "):
        list(proxied.read("results/always", 0, 10_239))


def test_other_bytes_than_were_asked_for_are_not_taken(
    store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy, clip: Path
) -> None:
    _put(store, "results/range", clip)
    with pytest.raises(StorageError, match="asked for bytes 0-10240, got bytes 0-10239/10240"):
        store.read("results/range", 0, 10_240)
    proxy.rule = _striking(S3Fault.NO_RANGE, "GET", "results/range")
    with pytest.raises(StorageError, match="asked for bytes 5-9, got bytes 0-4/"):
        proxied.read("results/range", 5, 9)
    # whoever gives the whole need not say so
    assert b"".join(proxied.read("results/range", 0, 10_239)) == clip.read_bytes()


def test_what_was_in_a_bucket_that_is_gone_is_lost_unless_the_bucket_is_to_be_there(settings: Settings) -> None:
    store = ObjectStore(settings)
    with pytest.raises(ObjectMissing):
        store.in_bucket("retired-bucket").read("k", 0, 1)
    missing = ObjectStore(settings.model_copy(update={"s3_output_buckets": "retired-bucket"}))
    with pytest.raises(BucketMissing):
        missing.in_bucket("retired-bucket").read("k", 0, 1)


def test_an_endpoint_that_leads_elsewhere_is_told(proxied: ObjectStore, proxy: S3Proxy, clip: Path) -> None:
    proxy.rule = lambda _: S3Fault.MOVED
    uses: list[Callable[[], object]] = [
        proxied.check,
        lambda: proxied.head("k"),
        lambda: proxied.read("k", 0, 1),
        lambda: _put(proxied, "k", clip),
        lambda: proxied.delete_prefix("k"),
    ]
    for use in uses:
        with pytest.raises(StorageError, match="the store's endpoint answers 301 and leads to nowhere"):
            use()
    assert len(proxy.seen) == len(uses)


def test_a_part_is_not_held_against_the_checksum_of_the_whole(
    store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy, clip: Path
) -> None:
    _put(store, "results/part", clip)
    proxy.rule = _striking(S3Fault.WHOLE_CHECKSUM, "GET", "results/part")
    assert b"".join(proxied.read("results/part", 5, 9)) == clip.read_bytes()[5:10]


def test_what_a_store_without_checksums_holds_is_read_to_see_that_it_is_right(
    proxied: ObjectStore, proxy: S3Proxy, clip: Path
) -> None:
    proxy.rule = _striking(S3Fault.NO_CHECKSUMS, "HEAD", "results/unchecked")
    _put(proxied, "results/unchecked", clip)
    assert [method for method, _, _ in proxy.seen] == ["PUT", "HEAD", "GET"]
    other = clip.with_name("other")
    other.write_bytes(clip.read_bytes()[::-1])
    with pytest.raises(StorageError, match=f"expected 10240 bytes with SHA-256 {file_sha256(other)}"):
        _put(proxied, "results/unchecked", other)


def test_objects_are_removed_from_a_store_that_wants_an_md5_of_the_list(
    store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy, clip: Path
) -> None:
    def insist(request: Request) -> S3Fault:
        wants = request.method == "POST" and "content-md5" not in request.headers
        return S3Fault.REFUSE if wants else S3Fault.PASS

    proxy.rule = insist
    _put(store, "results/removed/a", clip)
    assert proxied.delete_prefix("results/removed/") == 1
    assert store.head("results/removed/a") is None


def test_credentials_that_nobody_has_yet_are_looked_for_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("rushes_core.store_clients._LOOK_SECONDS", 0.0)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    later = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(later))
    store = ObjectStore(settings.model_copy(update={"s3_access_key_id": "", "s3_secret_access_key": SecretStr("")}))
    with pytest.raises(StorageError, match="credentials"):
        store.head("k")
    with pytest.raises(StorageError, match="credentials"):
        list(store.list_pages("k"))
    with pytest.raises(StorageError, match="credentials"):
        store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60)
    upload = store.begin("k", max_bytes=1)
    upload.write(b"x")
    with pytest.raises(StorageError, match="credentials"):
        upload.complete()
    later.write_text(
        f"[default]\naws_access_key_id = {settings.s3_access_key_id}\n"
        f"aws_secret_access_key = {settings.s3_secret_access_key.get_secret_value()}\n"
    )
    upload.complete()
    upload.close()
    url = store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60)
    assert httpx.get(url, timeout=60).content == b"x"


class TestUpload:
    def test_has_parts_of_one_size_however_it_comes(
        self, store: ObjectStore, proxied: ObjectStore, proxy: S3Proxy
    ) -> None:
        sizes: list[int] = []

        def note(request: Request) -> S3Fault:
            if "partNumber=" in request.target:
                sizes.append(int(request.headers["content-length"]))
            return S3Fault.PASS

        proxy.rule = note
        data = random.Random(5).randbytes(2 * PART_BYTES + 9)
        upload = proxied.begin("files/p/parts", max_bytes=len(data))
        step = 1_000_003
        for start in range(0, len(data), step):
            upload.write(data[start : start + step])
        upload.complete()
        upload.close()
        assert sizes == [PART_BYTES, PART_BYTES, 9]
        assert upload.sha256 == hashlib.sha256(data).hexdigest()
        assert b"".join(store.read("files/p/parts", 0, len(data) - 1)) == data

    def test_is_complete_though_the_store_forgot_that_it_said_so(self, proxied: ObjectStore, proxy: S3Proxy) -> None:
        def forget(request: Request) -> S3Fault:
            if request.method != "POST" or "uploadId=" not in request.target:
                return S3Fault.PASS
            is_first = not any("uploadId=" in target for method, target, _ in proxy.seen if method == "POST")
            return S3Fault.REPLY_LOST if is_first else S3Fault.NO_UPLOAD

        proxy.rule = forget
        upload = proxied.begin("files/p/forgotten", max_bytes=PART_BYTES + 1)
        upload.write(bytes(PART_BYTES + 1))
        upload.complete()
        upload.close()
        found = proxied.head("files/p/forgotten")
        assert found is not None
        assert found.num_bytes == PART_BYTES + 1

    def test_that_the_store_knows_nothing_of_is_not_complete(self, proxied: ObjectStore, proxy: S3Proxy) -> None:
        proxy.rule = _striking(S3Fault.NO_UPLOAD, "POST", "uploadId=")
        upload = proxied.begin("files/p/unknown", max_bytes=PART_BYTES + 1)
        upload.write(bytes(PART_BYTES + 1))
        with pytest.raises(StorageError, match="files/p/unknown"):
            upload.complete()
        upload.discard()
        upload.close()

    @pytest.mark.parametrize("num_bytes", [3_000, 300_000])
    def test_on_a_full_disk_says_so_at_once(self, store: ObjectStore, num_bytes: int) -> None:
        upload = store.begin("files/p/full", max_bytes=num_bytes)
        _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        try:
            with pytest.raises(StorageError, match="does not take a part of files/p/full"):
                upload.write(bytes(num_bytes))
            upload.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_refusal_for_a_clock_that_is_off_is_none_of_the_credentials_and_says_so(
    store: ObjectStore, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = timedelta(hours=1)

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + hour

    store.check()
    signed_at = auth.get_current_datetime
    monkeypatch.setattr(auth, "get_current_datetime", lambda: signed_at() + hour)
    monkeypatch.setattr(store_faults, "datetime", Ahead)
    said = r"this machine's clock is \+3[56]\d\d seconds from that of the store"
    with pytest.raises(StorageError, match=said) as refusal:
        store.check()
    assert not isinstance(refusal.value, StorageRefused)
    with pytest.raises(StorageError, match=f"RequestTimeTooSkewed.*{said}"):
        _put(store, "results/skewed", clip)


def test_a_refusal_by_a_store_with_the_same_clock_is_one(settings: Settings) -> None:
    stranger = settings.model_copy(update={"s3_secret_access_key": SecretStr("wrong")})
    with pytest.raises(StorageRefused):
        ObjectStore(stranger).check()
