"""What a campaign's file would become, without making anything of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rushes_core.campaigns import loading
from rushes_core.campaigns.loading import Refused
from rushes_core.measured import measured
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from rushes_worker.campaigns.chunks import Chunk
from rushes_worker.campaigns.copying import copy_rows

Shape = tuple[int, int, int]


class Examination:
    """Reads all chunks of a file.

    Args:
        renew: called between chunks; what it raises ends the reading.
    """

    def __init__(self, engine: Engine, *, renew: Callable[[], None]) -> None:
        self._engine = engine
        self._renew = renew
        self._num_valid = self._num_invalid = 0
        self._shapes: Counter[Shape] = Counter()
        self._errors: list[dict[str, Any]] = []

    def run(self, chunks: Iterator[Chunk], *, model: str) -> dict[str, Any]:
        """The column `report` of a campaign: `lines` with a request, those `valid` and `invalid`, `frames`,
        `gpu_seconds`, which is null where nothing was measured, and the first `errors`.

        Raises:
            FileUnreadable, StorageError
        """
        # what was seen lies in the database: a million names do not fit in memory beside the rest
        with self._engine.connect() as connection:
            try:
                with connection.begin():
                    for statement in loading.CREATE_SEEN:
                        connection.exec_driver_sql(statement)
                for chunk in chunks:
                    self._renew()
                    with connection.begin():
                        self._add(connection, chunk)
            finally:
                # the tables go with it
                connection.invalidate()
        with Session(self._engine) as session:
            seconds = {(row.width, row.height, row.num_frames): row.run_p50 for row in session.scalars(measured(model))}
        return {
            "lines": self._num_valid + self._num_invalid,
            "valid": self._num_valid,
            "invalid": self._num_invalid,
            "frames": sum(shape[2] * count for shape, count in self._shapes.items()),
            "gpu_seconds": estimated_seconds(self._shapes, seconds),
            "errors": self._errors,
        }

    def _add(self, connection: Connection, chunk: Chunk) -> None:
        named = [(one.item.custom_id, one.line) for one in chunk.loaded if one.item.custom_id is not None]
        refused = list(chunk.refused)
        if named:
            copy_rows(connection, loading.COPY_SEEN, named)
            if connection.execute(loading.SEE).rowcount < len(named):
                refused += [
                    loading.duplicate(row.custom_id, line=row.line, first=row.first)
                    for row in connection.execute(loading.SEEN_BEFORE)
                ]
        refused_lines = {one.line for one in refused}
        self._num_invalid += len(refused)
        for one in chunk.loaded:
            if one.line not in refused_lines:
                self._num_valid += 1
                self._shapes[one.item.width, one.item.height, one.item.num_frames] += 1
        room = loading.MAX_REPORTED - len(self._errors)
        self._errors += map(loading.line_error, sorted(refused, key=_line)[:room])


def _line(refused: Refused) -> int:
    return refused.line


def estimated_seconds(shapes: Mapping[Shape, int], measured_seconds: Mapping[Shape, float]) -> float | None:
    """What so many clips of each shape take; one that was not measured takes its part by frames and pixels.

    None: nothing was measured.
    """
    measured_cost = sum(map(math.prod, measured_seconds))
    if not measured_cost:
        return None
    each = sum(measured_seconds.values()) / measured_cost
    return round(sum(n * measured_seconds.get(shape, each * math.prod(shape)) for shape, n in shapes.items()), 1)
