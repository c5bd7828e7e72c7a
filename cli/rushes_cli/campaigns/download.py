"""Clips of a campaign on this disk: what is missing is fetched, what was broken off goes on, nothing is trusted unread.

A clip has its name only when it is whole and has the SHA-256 that the manifest says; until then it is `NAME.part`.
"""

import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rushes_core.campaigns.names import clip_name
from rushes_core.errors import RushesError

from rushes_cli.campaigns.client import STREAM_TIMEOUT, Client, Refused, refusal, retry_after

ATTEMPTS = 6
"""In a row without one more byte, after which a clip is given up."""
_CHUNK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")


@dataclass(frozen=True, slots=True)
class Clip:
    """A completed item."""

    video_id: str
    custom_id: str | None
    line: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Of its file: that which it has in an archive, so that every call of the command finds it again."""
        return clip_name(self.custom_id, self.line)


def clip_of(line: dict[str, Any]) -> Clip | None:
    """The clip of a line of the manifest; None: it has none."""
    body = (line.get("response") or {}).get("body")
    output = (body or {}).get("output") or {}
    if body is None or output.get("sha256") is None or output.get("deleted_at") is not None:
        return None
    return Clip(body["id"], line.get("custom_id"), line["line"], int(output["bytes"]), output["sha256"])


@dataclass(frozen=True, slots=True)
class Resume:
    """How the fetching of a clip goes on."""

    offset: int
    """Bytes that are here."""
    digest: Any
    """SHA-256 of them so far."""


def resume(part: Path, clip: Clip) -> Resume:
    """What of a clip is here. Bytes that are more than it has are worth nothing."""
    digest = hashlib.sha256()
    try:
        size = part.stat().st_size
    except FileNotFoundError:
        return Resume(0, digest)
    if size > clip.bytes:
        part.unlink()
        return Resume(0, digest)
    with part.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return Resume(size, digest)


def part_of(target: Path) -> Path:
    """Where a clip is until it is whole."""
    return target.with_name(f"{target.name}.part")


def range_headers(clip: Clip, offset: int) -> dict[str, str]:
    """Of a request for the rest of it, or for the whole should it be another by now."""
    # bytes as they are stored: a compressed answer has other offsets
    plain = {"Accept-Encoding": "identity"}
    return plain if offset == 0 else plain | {"Range": f"bytes={offset}-", "If-Range": f'"{clip.sha256}"'}


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other downloads out of a directory, by a lock that ends with this process.

    Raises:
        RushesError: there is one.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        # some file systems of other machines lock no directory
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RushesError(f"another download writes into {folder}") from None
        yield
    finally:
        os.close(handle)


class NotFetched(RushesError):
    """A clip is not here; says why."""


class Stopped(RushesError):
    """The download was to end."""


class Fetcher:
    """Fetches clips into a directory. Threads may share one; `stop` ends all of them between two pieces."""

    def __init__(self, client: Client, folder: Path, *, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        self._client = client
        self._folder = folder
        self._on_bytes = on_bytes
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def is_here(self, clip: Clip, *, verify: bool) -> bool:
        """Whether the whole clip is here, by its name and size, and by its bytes if it is to `verify`."""
        target = self._folder / clip.name
        try:
            if target.stat().st_size != clip.bytes:
                return False
        except FileNotFoundError:
            return False
        return not verify or resume(target, clip).digest.hexdigest() == clip.sha256

    def fetch(self, clip: Clip) -> None:
        """Have the whole clip here, checked.

        Raises:
            NotFetched
            Stopped: what came so far is kept.
        """
        if (target := self._folder / clip.name).is_dir():
            raise NotFetched(f"{target} is a directory")
        part = part_of(target)
        failures, fresh = 0, False
        while True:
            state = resume(part, clip)
            try:
                if state.offset < clip.bytes:
                    self._receive(clip, part, state)
                    state = resume(part, clip)
                if state.offset == clip.bytes:
                    if state.digest.hexdigest() == clip.sha256:
                        os.replace(part, target)
                        return
                    part.unlink()
                    if fresh:
                        raise NotFetched("what the API sends has another SHA-256 than the manifest says")
                    fresh = True
                    continue
                reason, pause = "the answer ended early", 0.0
            except (httpx.TransportError, _TryAgain) as error:
                reason = str(error) or type(error).__name__
                pause = error.after if isinstance(error, _TryAgain) else 0.0
            except Refused as error:
                if error.status in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
                    part.unlink(missing_ok=True)
                raise NotFetched(str(error)) from None
            failures = 0 if _size(part) > state.offset else failures + 1
            if failures >= ATTEMPTS:
                raise NotFetched(reason)
            if self._stop.wait(max(pause, 0.25 * 2**failures)):
                raise Stopped("stopped")

    def _receive(self, clip: Clip, part: Path, state: Resume) -> None:
        """Append what comes."""
        url, headers = f"/v1/videos/{clip.video_id}/content", range_headers(clip, state.offset)
        with self._client.stream(url, headers=headers) as answer:
            if not answer.is_redirect:
                return self._append(answer, part, state.offset)
            location = answer.headers["location"]
        # the store's: it has other ETags, and the SHA-256 at the end tells whether it was the same clip
        headers.pop("If-Range", None)
        with httpx.stream("GET", location, headers=headers, timeout=STREAM_TIMEOUT) as answer:
            self._append(answer, part, state.offset)

    def _append(self, answer: httpx.Response, part: Path, offset: int) -> None:
        if answer.status_code in (429, 500, 502, 503, 504):
            answer.read()
            raise _TryAgain(f"the API answered {answer.status_code}", retry_after(answer))
        if answer.is_error:
            answer.read()
            raise refusal(answer)
        begins = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
        is_rest = answer.status_code == httpx.codes.PARTIAL_CONTENT and begins is not None and int(begins[1]) == offset
        with part.open("r+b" if is_rest else "wb") as file:
            file.seek(0, os.SEEK_END)
            for piece in answer.iter_raw(1 << 16):
                file.write(piece)
                self._on_bytes(len(piece))
                if self._stop.is_set():
                    raise Stopped("stopped")


class _TryAgain(RushesError):
    def __init__(self, message: str, after: float) -> None:
        super().__init__(message)
        self.after = after


def fetch_all(
    fetcher: Fetcher, clips: Iterable[Clip], *, parallel: int, tick: Callable[[], None]
) -> Iterator[tuple[Clip, str | None]]:
    """Fetch clips, `parallel` at a time: each with why it is not here, or None, in the order in which they end.

    `tick` is called twice a second meanwhile. However it ends, nothing is left running.
    """
    waiting: dict[Future[None], Clip] = {}
    source = iter(clips)
    with ThreadPoolExecutor(parallel, thread_name_prefix="fetch") as pool:
        try:
            while True:
                # no more than can be begun soon: the list may be of a million
                while len(waiting) < 2 * parallel and (clip := next(source, None)) is not None:
                    waiting[pool.submit(fetcher.fetch, clip)] = clip
                if not waiting:
                    return
                done, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                tick()
                for future in done:
                    clip = waiting.pop(future)
                    error = future.exception()
                    if error is not None and not isinstance(error, (RushesError, OSError)):
                        raise error
                    yield clip, None if error is None else str(error)
        finally:
            fetcher.stop()
            for future in waiting:
                future.cancel()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Rate:
    """Bytes a second over the last seconds. Threads may share one."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.total = 0
        self._seconds = seconds
        self._lock = threading.Lock()
        self._marks = [(time.monotonic(), 0)]

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count

    def value(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._marks.append((now, self.total))
            while len(self._marks) > 2 and self._marks[1][0] < now - self._seconds:
                del self._marks[0]
            began, before = self._marks[0]
            return (self.total - before) / max(now - began, 0.001)
