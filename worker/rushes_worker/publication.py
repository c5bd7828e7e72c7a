"""From encoded frames to a stored clip: wait for the media process, upload, verify. A thread, so that its owner can
watch the lease meanwhile."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rushes_core.errors import GenerationError, RushesError, StorageError
from rushes_core.log import get_logger
from rushes_core.states import Phase
from rushes_core.storage import ObjectStore

from rushes_worker.media.process import MediaProcess
from rushes_worker.media.validate import ClipFacts

log = get_logger(__name__)

CONTENT_TYPE = "video/mp4"
_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 10.0


class Publication:
    """Finishes the clip at `path` and stores it under `key`.

    Args:
        enter: told of each phase as it begins, from the thread.
        on_encoded: told of the finished file, from the thread; the media process is the owner's again.
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
        on_encoded: Callable[[ClipFacts], None],
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
        self._facts: ClipFacts | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publication", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Whether there is an outcome within `timeout` seconds."""
        return self._ended.wait(timeout)

    def result(self) -> ClipFacts:
        """What was stored, once it has ended.

        Raises:
            GenerationError: the clip is not what it must be, or could not be made.
            StorageError: the store did not take it.
        """
        if self._error is not None:
            raise self._error
        assert self._facts is not None
        return self._facts

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
            facts = self._media.finish(self._finish_seconds)
            with self._lock:
                self._needs_media = False
            self._on_encoded(facts)
            self._encoded.set()
            if not self._given_up.is_set():
                self._enter(Phase.UPLOADING)
                self._upload(facts)
                self._facts = facts
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

    def _upload(self, facts: ClipFacts) -> None:
        began = time.monotonic()
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                self._store.put_file(self._key, self._path, content_type=CONTENT_TYPE, sha256=facts.sha256)
                return
            except StorageError as error:
                if time.monotonic() - began > self._upload_seconds:
                    raise
                log.warning("upload_failed", key=self._key, error=str(error))
            if self._given_up.wait(delay):
                return
            delay = min(2 * delay, _LAST_RETRY_SECONDS)


def remove_attempt(store: ObjectStore, key: str) -> None:
    """Remove what an attempt stored, as far as the store answers; what stays is an orphan that no row points at."""
    with suppress(StorageError):
        store.delete_prefix(f"{PurePosixPath(key).parent}/")
