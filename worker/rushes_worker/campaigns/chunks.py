"""Lines of a campaign's file in chunks, each loaded in one transaction."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rushes_core.campaigns.items import Item, Terms, custom_id_of, resolve_line
from rushes_core.campaigns.lines import Position, Reader
from rushes_core.campaigns.loading import Loaded, Refused

CHUNK_LINES = 5_000
CHUNK_BYTES = 8 * 1024 * 1024
"""A chunk ends with the line that reaches one of them."""


@dataclass(slots=True)
class Chunk:
    """What stands between two positions of a file."""

    begin: Position
    end: Position
    loaded: list[Loaded] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    is_last: bool = False

    @property
    def has_items(self) -> bool:
        return bool(self.loaded or self.refused)


def chunks(reader: Reader, terms: Terms, ids: Iterator[str]) -> Iterator[Chunk]:
    """The rest of what `reader` reads; the last chunk, which may have no lines, ends with the file.

    Args:
        ids: of the jobs, in the order of their lines.

    Raises:
        FileUnreadable, StorageError
    """
    chunk = Chunk(reader.position, reader.position)
    for line, end, value, error in reader:
        found: Item | None = None
        if value is not None:
            outcome = resolve_line(value, terms)
            if isinstance(outcome, Item):
                found = outcome
            else:
                error = outcome
        if found is not None:
            chunk.loaded.append(Loaded(line, next(ids), found))
        elif error is not None:
            chunk.refused.append(Refused(line, custom_id_of(value), error))
        chunk.end = end
        num_lines = len(chunk.loaded) + len(chunk.refused)
        if num_lines >= CHUNK_LINES or end.num_bytes - chunk.begin.num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk(end, end)
    chunk.end = reader.position
    chunk.is_last = True
    yield chunk
