"""The object store: written once, verified, read by range, reachable under the public name."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from rushes_core.errors import StorageError
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore, content_disposition, file_sha256, result_key
from support.stack import SharedStack, settings_of


@pytest.fixture(scope="module")
def store(settings: Settings) -> ObjectStore:
    return ObjectStore(settings)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(range(256)) * 40)
    return path


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
    answer = httpx.get(url)
    assert answer.content == clip.read_bytes()
    assert answer.headers["content-type"] == "video/mp4"
    assert "filename=" in answer.headers["content-disposition"]


def test_presigned_url_is_signed_for_the_public_endpoint_with_version_4(stack: SharedStack) -> None:
    store = ObjectStore(settings_of(stack.env(), s3_public_endpoint_url="https://media.example.test"))
    parts = urlsplit(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60))
    assert parts.hostname == "media.example.test"
    assert parse_qs(parts.query)["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]


def test_presigned_url_names_the_region_when_there_is_no_endpoint(stack: SharedStack) -> None:
    store = ObjectStore(settings_of(stack.env(), s3_endpoint_url="", s3_region="eu-north-1", s3_bucket="clips"))
    host = urlsplit(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60)).hostname
    assert host == "clips.s3.eu-north-1.amazonaws.com"


@pytest.mark.parametrize("bucket", ["clips", "clips.eu-1"])
def test_a_custom_endpoint_is_addressed_by_path(stack: SharedStack, bucket: str) -> None:
    env = stack.env()
    store = ObjectStore(settings_of(env, s3_bucket=bucket))
    parts = urlsplit(store.presigned_url("k", filename="a.mp4", content_type="video/mp4", seconds=60))
    assert parts.path == f"/{bucket}/k"


@pytest.mark.parametrize("name", ['x"; evil="1', "a\r\nSet-Cookie: b", "雪.mp4", "", "😀"])
def test_content_disposition_is_one_safe_line(name: str) -> None:
    value = content_disposition(name)
    assert value.isascii()
    assert not any(c in value for c in "\r\n")
    assert value.count('"') == 2


def test_two_attempts_never_share_a_key() -> None:
    assert result_key("p", "j", 1, 7) != result_key("p", "j", 1, 8)
