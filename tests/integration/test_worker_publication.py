"""A clip and what lies beside it on the way into a store that breaks: the clip arrives, and nothing is left astray."""

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from rushes_core import store_clients
from rushes_core.errors import StorageError
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.variants import BY_PRODUCTS
from rushes_worker import publication
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.publication import Publication
from support.faults.proxy import Request, S3Fault, S3Proxy
from support.media import moving_frames, tone, write_units
from support.waiting import wait_until

NAMES = tuple(variant.name for variant in BY_PRODUCTS)
FILES = {"video.mp4", *(variant.filename for variant in BY_PRODUCTS)}
NUM_FRAMES = 24


@pytest.fixture(scope="module")
def media() -> Iterator[MediaProcess]:
    # small clips: a slow store takes one before its client gives up
    with MediaProcess(EncoderSettings(crf=45)) as process:
        yield process


@pytest.fixture(autouse=True)
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_BY_PRODUCT_SECONDS", 60.0)
    monkeypatch.setattr(publication, "_FIRST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(store_clients, "_READ_TIMEOUT_SECONDS", 1)


@pytest.fixture
def proxy(settings: Settings) -> Iterator[S3Proxy]:
    parts = urlsplit(settings.s3_endpoint_url)
    assert parts.hostname is not None
    assert parts.port is not None
    with S3Proxy(parts.hostname, parts.port) as proxy:
        yield proxy


@pytest.fixture
def stored(settings: Settings) -> Iterator[Callable[[], set[str]]]:
    """Names of what lies in the store."""
    store = ObjectStore(settings)
    yield lambda: {item.key.rpartition("/")[2] for page in store.list_pages("") for item in page}
    store.delete_prefix("")


@pytest.fixture
def publish(
    settings: Settings, media: MediaProcess, proxy: S3Proxy, tmp_path: Path
) -> Iterator[Callable[..., Publication]]:
    """Starts the publication of a clip through the proxy."""
    started: list[Publication] = []

    def start(*, upload_seconds: float = 60) -> Publication:
        frames = moving_frames(NUM_FRAMES)
        (unit,) = write_units(tmp_path, frames, [NUM_FRAMES])
        sound = tmp_path / "sound.npy"
        np.save(sound, tone(NUM_FRAMES))
        media.start_clip(ClipSpec(tmp_path / "video.mp4", 64, 64, NUM_FRAMES, by_products=NAMES))
        media.add_unit(0, unit, NUM_FRAMES)
        media.set_audio(sound)
        store = ObjectStore(settings.model_copy(update={"s3_endpoint_url": proxy.url}))
        one = Publication(
            media,
            store,
            path=tmp_path / "video.mp4",
            key="results/default/video_x/1-1/video.mp4",
            enter=lambda phase: None,
            on_encoded=lambda made: None,
            finish_seconds=60,
            upload_seconds=upload_seconds,
        )
        started.append(one)
        one.start()
        return one

    yield start
    assert all(one.wait(60) for one in started)


def is_put_of(request: Request, name: str) -> bool:
    return request.method == "PUT" and name in request.target


def test_everything_is_stored_and_described(
    publish: Callable[..., Publication], stored: Callable[[], set[str]], settings: Settings
) -> None:
    one = publish()
    assert one.wait(60)
    published = one.result()
    assert published.warnings == []
    assert set(published.variants) == set(NAMES)
    assert stored() == FILES
    for variant in published.variants.values():
        found = ObjectStore(settings).head(variant["key"])
        assert found is not None
        assert (found.num_bytes, found.sha256) == (variant["bytes"], variant["sha256"])


def test_one_that_the_store_refuses_is_left_out(
    publish: Callable[..., Publication],
    proxy: S3Proxy,
    stored: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "_BY_PRODUCT_SECONDS", 4.0)
    proxy.rule = lambda request: S3Fault.REFUSE if is_put_of(request, "thumbnail.jpg") else S3Fault.PASS
    one = publish()
    assert one.wait(60)
    published = one.result()
    assert set(published.variants) == {"spritesheet", "audio"}
    assert published.warnings == [
        {"code": "thumbnail_missing", "message": "The thumbnail was not taken by the object store."}
    ]
    assert stored() == FILES - {"thumbnail.jpg"}


def test_one_that_is_stored_too_late_is_removed_again(
    publish: Callable[..., Publication],
    proxy: S3Proxy,
    stored: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "_BY_PRODUCT_SECONDS", 4.0)
    monkeypatch.setattr(store_clients, "_READ_TIMEOUT_SECONDS", 60)
    # the store has the object, and the client hears nothing for longer than the job waits
    proxy.rule = lambda request: S3Fault.HANG_AFTER_BODY if is_put_of(request, "audio.m4a") else S3Fault.PASS
    one = publish()
    assert one.wait(60)
    assert set(one.result().variants) == {"thumbnail", "spritesheet"}
    proxy.heal()
    wait_until(lambda: stored() == FILES - {"audio.m4a"})


def test_other_bytes_than_were_sent_are_never_described(
    publish: Callable[..., Publication], proxy: S3Proxy, stored: Callable[[], set[str]]
) -> None:
    left = ["thumbnail.jpg", "audio.m4a"]

    def flip_once(request: Request) -> S3Fault:
        for name in left:
            if is_put_of(request, name):
                left.remove(name)
                return S3Fault.FLIP
        return S3Fault.PASS

    proxy.rule = flip_once
    one = publish()
    assert one.wait(60)
    assert set(one.result().variants) == set(NAMES)
    assert left == []
    assert stored() == FILES


def test_all_of_them_wait_for_a_store_that_comes_back(
    publish: Callable[..., Publication], proxy: S3Proxy, stored: Callable[[], set[str]]
) -> None:
    proxy.rule = lambda request: S3Fault.REFUSE
    one = publish()
    wait_until(lambda: proxy.strikes >= 8)
    assert not one.wait(0)
    proxy.heal()
    assert one.wait(60)
    assert one.result().warnings == []
    assert stored() == FILES


def test_nothing_is_left_when_the_store_does_not_take_the_clip(
    publish: Callable[..., Publication], proxy: S3Proxy, stored: Callable[[], set[str]]
) -> None:
    proxy.rule = lambda request: S3Fault.REFUSE if is_put_of(request, "video.mp4") else S3Fault.PASS
    one = publish(upload_seconds=0.1)
    assert one.wait(60)
    with pytest.raises(StorageError):
        one.result()
    proxy.heal()
    wait_until(lambda: stored() == set())


def test_nothing_is_left_of_a_clip_that_nobody_wants_any_more(
    publish: Callable[..., Publication],
    proxy: S3Proxy,
    stored: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what the store takes after its client gave up is for the sweeper
    monkeypatch.setattr(store_clients, "_READ_TIMEOUT_SECONDS", 60)

    def hold(request: Request) -> S3Fault:
        return S3Fault.SLOW if is_put_of(request, "video.mp4") else S3Fault.PASS

    proxy.rule = hold
    one = publish()
    wait_until(lambda: any("audio.m4a" in target for _, target, _ in proxy.seen))
    one.give_up()
    assert one.wait(60)
    proxy.heal()
    wait_until(lambda: stored() == set())
