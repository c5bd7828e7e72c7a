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
_GIVE_UP_SECONDS = 600.0
"""How long an upload is tried before the attempt fails; the clip is not rendered again meanwhile."""


class Publication:
    """Finishes the clip at `path` and stores it under `key`.

    Args:
        enter: told of each phase as it begins, from the thread.
        on_end: called from the thread when there is an outcome.
        finish_seconds: how long the media process may take after the last frame.
    """

    def __init__(
        self,
        media: MediaProcess,
        store: ObjectStore,
        *,
        path: Path,
        key: str,
        enter: Callable[[Phase], None],
        on_end: Callable[[], None],
        finish_seconds: float,
    ) -> None:
        self._media = media
        self._store = store
        self._path = path
        self._key = key
        self._enter = enter
        self._on_end = on_end
        self._finish_seconds = finish_seconds
        self._given_up = threading.Event()
        self._uploading = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self._facts: ClipFacts | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publication", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._ended

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
            ended = self._ended
        if ended:
            remove_attempt(self._store, self._key)
        elif not self._uploading.is_set():
            self._media.kill()
            # the media process is the owner's again when this returns
            while not self._uploading.is_set() and not self._ended:
                self._thread.join(0.05)

    def _run(self) -> None:
        try:
            self._enter(Phase.MUXING)
            facts = self._media.finish(self._finish_seconds)
            self._uploading.set()
            if not self._given_up.is_set():
                self._enter(Phase.UPLOADING)
                self._upload(facts)
                self._facts = facts
        except RushesError as error:
            self._error = error
        except Exception as error:
            # whatever it was, the owner waits for an outcome
            log.exception("publication_failed")
            self._error = GenerationError(f"The clip could not be published ({type(error).__name__}).")
        with self._lock:
            self._ended = True
            given_up = self._given_up.is_set()
        if given_up:
            remove_attempt(self._store, self._key)
        self._on_end()

    def _upload(self, facts: ClipFacts) -> None:
        began = time.monotonic()
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                self._store.put_file(self._key, self._path, content_type=CONTENT_TYPE, sha256=facts.sha256)
                return
            except StorageError as error:
                if time.monotonic() - began > _GIVE_UP_SECONDS:
                    raise
                log.warning("upload_failed", key=self._key, error=str(error))
            if self._given_up.wait(delay):
                return
            delay = min(2 * delay, _LAST_RETRY_SECONDS)


def remove_attempt(store: ObjectStore, key: str) -> None:
    """Remove what an attempt stored, as far as the store answers; what stays is an orphan that no row points at."""
    with suppress(StorageError):
        store.delete_prefix(f"{PurePosixPath(key).parent}/")
