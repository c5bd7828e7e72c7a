"""The clips of a campaign in one ZIP file, made while it is sent: nothing of it lies on a disk, or in memory but for a
piece of a clip and the names of those that are in it."""

# zipstream is not typed
# pyright: standard

import csv
import io
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, cast

from anyio import CapacityLimiter, WouldBlock, from_thread, to_thread
from fastapi.responses import StreamingResponse
from rushes_core.campaigns.names import clip_name
from rushes_core.campaigns.output import Item, Show, csv_head, csv_rows, guarded, line_of
from rushes_core.campaigns.tables import Campaign
from rushes_core.errors import ObjectMissing
from rushes_core.log import get_logger
from rushes_core.models import Job
from rushes_core.object_keys import bucket_of_result
from rushes_core.storage import ObjectStore
from rushes_core.stored import stored_variants
from rushes_core.variants import VIDEO
from starlette.types import Receive, Scope, Send
from zipstream import ZIP_STORED, ZipStream

from rushes_api.campaign_pages import PAGE, Chosen, Sessions, items
from rushes_api.errors import Unavailable

log = get_logger(__name__)

MANIFEST = "manifest.csv"
MISSING = "missing.csv"
"""Lists the clips that were to be here and are not."""
MAX_CLIPS = 50_000
"""Most clips of a campaign with an archive: what a ZIP file says of each at its end is kept until then."""
MAX_ARCHIVES = 4
"""Archives that one process sends at a time."""


class SeatedResponse(StreamingResponse):
    """A stream that has one of the places for archives until it ends.

    Raises:
        Unavailable: there is none.
    """

    def __init__(self, seats: CapacityLimiter, content: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(content, **options)
        self._seats = seats
        try:
            seats.acquire_on_behalf_of_nowait(self)
        except WouldBlock as error:
            raise Unavailable("Too many archives are being sent. Try again later.", code="overloaded") from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._seats.release_on_behalf_of(self)


class Archive:
    """
    Args:
        show: how a job looks to its client, for the manifest.
        limiter: threads that may wait for the store.
    """

    def __init__(
        self, campaign: Campaign, *, sessions: Sessions, store: ObjectStore, show: Show, limiter: CapacityLimiter
    ) -> None:
        self._campaign = campaign
        self._sessions = sessions
        self._store = store
        self._show = show
        self._limiter = limiter

    async def stream(self) -> AsyncIterator[bytes]:
        """The file, piece by piece. When it is not read on, nothing more is asked of the store.

        Raises:
            StorageError: the store failed in the middle of a clip.
        """
        pieces = self._pieces()
        try:
            while piece := await to_thread.run_sync(next, pieces, b"", limiter=self._limiter):
                yield piece
        finally:
            pieces.close()

    def _pieces(self) -> Generator[bytes]:
        archive = ZipStream(compress_type=ZIP_STORED, sized=False)
        missing: list[tuple[Any, ...]] = []
        for item in self._items(Chosen.part("output")):
            job = cast("Job", item)
            name = clip_name(job.custom_id, line_of(job))
            try:
                clip = self._open(job)
            except ObjectMissing:
                log.warning("clip_missing", job_id=job.id)
                missing.append((name, job.custom_id, job.line, job.id, "it is no longer in the store"))
                continue
            if clip is None:
                missing.append((name, job.custom_id, job.line, job.id, "it was removed when its retention ended"))
                continue
            try:
                archive.add(clip, name, size=stored_variants(job)[VIDEO.name].bytes)
                yield from _non_empty(archive.file())
            finally:
                cast("Generator[bytes]", clip).close()
        archive.add(self._manifest(), MANIFEST)
        yield from _non_empty(archive.file())
        if missing:
            archive.add(_table(missing), MISSING)
            yield from _non_empty(archive.file())
        yield from _non_empty(archive.finalize())

    def _open(self, job: Job) -> Iterator[bytes] | None:
        """The bytes of a clip; None: it was removed on purpose.

        Raises:
            ObjectMissing
        """
        stored = stored_variants(job).get(VIDEO.name)
        if stored is None:
            return None
        store = self._store.in_bucket(bucket_of_result(job.request, job.result or {}))
        return store.read(stored.key, 0, stored.bytes - 1)

    def _manifest(self) -> Iterator[bytes]:
        yield csv_head()
        yield from csv_rows(self._items(Chosen.part("all")), self._show)

    def _items(self, chosen: Chosen) -> Iterator[Item]:
        """All of them, from a thread of the event loop's."""
        after: int | None = 0
        while after is not None:
            page, after = from_thread.run(self._page, chosen, after)
            yield from page

    async def _page(self, chosen: Chosen, after: int) -> tuple[list[Item], int | None]:
        async with self._sessions.begin() as session:
            return await items(session, self._campaign.id, chosen, after=after, limit=PAGE)


def _table(rows: list[tuple[Any, ...]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(("name", "custom_id", "line", "video_id", "reason"))
    writer.writerows([guarded(cell) for cell in row] for row in rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def _non_empty(pieces: Iterator[bytes]) -> Iterator[bytes]:
    # an empty piece would look like the end
    return (piece for piece in pieces if piece)
