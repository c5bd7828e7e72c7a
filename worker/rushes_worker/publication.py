"""From encoded frames to a stored clip: wait for the media process, upload, verify. A thread, so that its owner can
watch the lease meanwhile. By-products are uploaded beside the clip, each in a thread of its own; the clip does not wait
for what the store does not take."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rushes_core.errors import GenerationError, RushesError, StorageError
from rushes_core.log import get_logger
from rushes_core.states import Phase
from rushes_core.storage import ObjectStore
from rushes_core.variants import VIDEO, Variant

from rushes_worker.media.by_products import ByProduct
from rushes_worker.media.process import MadeClip, MediaProcess
from rushes_worker.media.times import Span
from rushes_worker.media.validate import ClipFacts

log = get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 10.0
_BY_PRODUCT_SECONDS = 10.0
"""How much longer than the clip a by-product may take to be stored before the job completes without it."""


@dataclass(frozen=True, slots=True)
class Published:
    """What lies in the store."""

    facts: ClipFacts
    variants: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """By name, what the job's result says of each by-product."""
    warnings: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


class Publication:
    """Finishes the clip at `path` and stores it under `key`.

    Args:
        enter: told of each phase as it begins, from the thread.
        on_encoded: told of the finished files, from the thread; the media process is the owner's again.
        finish_seconds: how long the media process may take after the last frame.
        upload_seconds: how long an upload is tried before it has failed.
    """

    def __init__(
        self,
        media: MediaProcess,
        store: ObjectStore,
        *,
        path: Path,
        key: str,
        enter: Callable[[Phase], None],
        on_encoded: Callable[[MadeClip], None],
        finish_seconds: float,
        upload_seconds: float,
    ) -> None:
        self._media = media
        self._store = store
        self._path = path
        self._key = key
        self._enter = enter
        self._on_encoded = on_encoded
        self._finish_seconds = finish_seconds
        self._upload_seconds = upload_seconds
        self._given_up = threading.Event()
        self._encoded = threading.Event()
        self._needs_media = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._published: Published | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publication", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Whether there is an outcome within `timeout` seconds."""
        return self._ended.wait(timeout)

    def result(self) -> Published:
        """What was stored, once it has ended.

        Raises:
            GenerationError: the clip is not what it must be, or could not be made.
            StorageError: the store did not take it.
        """
        if self._error is not None:
            raise self._error
        assert self._published is not None
        return self._published

    def give_up(self) -> None:
        """Nobody wants the clip any more. An upload that is under way is removed when it ends."""
        with self._lock:
            self._given_up.set()
            ended = self._ended.is_set()
            if not ended and self._needs_media:
                self._media.kill()
        if ended:
            remove_attempt(self._store, self._key)
        # the media process is the owner's again when this returns
        while not self._encoded.is_set() and not self._ended.wait(0.02):
            pass

    def _run(self) -> None:
        try:
            self._enter(Phase.MUXING)
            made = self._media.finish(self._finish_seconds)
            with self._lock:
                self._needs_media = False
            self._on_encoded(made)
            self._encoded.set()
            if not self._given_up.is_set():
                self._enter(Phase.UPLOADING)
                began = time.monotonic()
                self._published = self._upload_all(made)
                spans = [*made.spans, Span("upload", began, time.monotonic())]
                log.debug("clip_timeline", spans=[(span.what, span.began, span.ended) for span in spans])
        except RushesError as error:
            self._error = error
        except Exception as error:
            # whatever it was, the owner waits for an outcome; one that gave up may have removed the file already
            if not self._given_up.is_set():
                log.exception("publication_failed")
            self._error = GenerationError(f"The clip could not be published ({type(error).__name__}).")
        with self._lock:
            self._ended.set()
            given_up = self._given_up.is_set()
        if given_up:
            remove_attempt(self._store, self._key)

    def _upload_all(self, made: MadeClip) -> Published:
        beside = [_Upload(self._store, self._folder, product, self._given_up) for product in made.by_products]
        try:
            self._upload(made.facts)
        except Exception:
            for upload in beside:
                upload.leave_out()
            remove_attempt(self._store, self._key)
            raise
        for upload in beside:
            upload.hurry()
        deadline = time.monotonic() + _BY_PRODUCT_SECONDS
        published = Published(made.facts)
        for flaw in made.facts.flaws:
            log.warning("clip_flawed", flaw=flaw.value)
            published.warnings.append({"code": flaw.value, "message": flaw.message})
        for missing in made.missing:
            log.warning("by_product_missing", variant=missing.variant.name, reason=missing.reason)
            published.warnings.append(_warning(missing.variant, "could not be made"))
        for upload in beside:
            if upload.is_stored(deadline):
                published.variants[upload.product.variant.name] = upload.description()
            else:
                published.warnings.append(_warning(upload.product.variant, "was not taken by the object store"))
        return published

    @property
    def _folder(self) -> str:
        return str(PurePosixPath(self._key).parent)

    def _upload(self, facts: ClipFacts) -> None:
        began = time.monotonic()
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                self._store.put_file(self._key, self._path, content_type=VIDEO.content_type, sha256=facts.sha256)
                return
            except StorageError as error:
                if time.monotonic() - began > self._upload_seconds:
                    raise
                log.warning("upload_failed", key=self._key, error=str(error))
            if self._given_up.wait(delay):
                return
            delay = min(2 * delay, _LAST_RETRY_SECONDS)


class _Upload:
    """A by-product on its way into `folder` of the store. Tried until it is stored, left out, or nobody wants it."""

    def __init__(self, store: ObjectStore, folder: str, product: ByProduct, given_up: threading.Event) -> None:
        self.product = product
        self._store = store
        self._key = f"{folder}/{product.variant.filename}"
        self._given_up = given_up
        self._lock = threading.Lock()
        self._left_out = threading.Event()
        self._hurry = threading.Event()
        self._stored = False
        self._thread = threading.Thread(target=self._run, name=f"upload-{product.variant.name}", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """The store takes objects now: try at once, and again every moment."""
        self._hurry.set()

    def is_stored(self, deadline: float) -> bool:
        """Whether it is stored by this time of the monotonic clock; otherwise it is left out."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if not self._stored:
                self._left_out.set()
            return self._stored

    def leave_out(self) -> None:
        with self._lock:
            self._left_out.set()
        self._hurry.set()

    def description(self) -> dict[str, Any]:
        """As the job's result has it."""
        product = self.product
        return {
            "key": self._key,
            "bytes": product.bytes,
            "sha256": product.sha256,
            "content_type": product.variant.content_type,
            **product.details,
        }

    def _run(self) -> None:
        is_stored = self._put()
        with self._lock:
            self._stored = is_stored and not self._is_unwanted
        if not self._stored:
            with suppress(StorageError):
                self._store.delete_keys([self._key])

    def _put(self) -> bool:
        product, delay = self.product, _FIRST_RETRY_SECONDS
        while not self._is_unwanted:
            try:
                content_type = product.variant.content_type
                self._store.put_file(self._key, product.path, content_type=content_type, sha256=product.sha256)
                return True
            except StorageError as error:
                log.warning("upload_failed", key=self._key, error=str(error))
            except OSError as error:
                # its owner went on without it and removed the file
                log.warning("upload_failed", key=self._key, error=str(error))
                break
            if self._hurry.is_set():
                self._left_out.wait(_FIRST_RETRY_SECONDS)
            else:
                self._hurry.wait(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)
        return False

    @property
    def _is_unwanted(self) -> bool:
        return self._left_out.is_set() or self._given_up.is_set()


def _warning(variant: Variant, what: str) -> dict[str, str]:
    return {"code": f"{variant.name}_missing", "message": f"The {variant.name} {what}."}


def remove_attempt(store: ObjectStore, key: str) -> None:
    """Remove what an attempt stored, as far as the store answers; what stays is an orphan that no row points at."""
    try:
        store.delete_prefix(f"{PurePosixPath(key).parent}/")
    except StorageError as error:
        log.warning("removal_failed", key=key, error=str(error))
