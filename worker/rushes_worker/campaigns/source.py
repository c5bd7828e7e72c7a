"""A campaign's file in the store, as the reader of lines takes it."""

from collections.abc import Callable, Iterator

from rushes_core.campaigns.lines import Content
from rushes_core.models import File
from rushes_core.object_keys import file_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore

RANGE_BYTES = 4 * 1024 * 1024
"""Read in one request: a connection is never open for longer than its bytes take to be loaded."""


def content_of(file: File, store: ObjectStore, settings: Settings, *, on_range: Callable[[], None]) -> Content:
    """
    Args:
        on_range: called before every request to the store; what it raises ends the reading.
    """
    key = file_key(file.project, file.id)

    def read(start: int) -> Iterator[bytes]:
        for begin in range(start, file.bytes, RANGE_BYTES):
            on_range()
            yield from store.read(key, begin, min(begin + RANGE_BYTES, file.bytes) - 1)

    return Content(read, num_bytes=file.bytes, max_bytes=settings.campaign_max_bytes)
