"""What a campaign's file would become, without making anything of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rushes_core.campaigns import loading
from rushes_core.campaigns.forecast import Means, Work, ends_of
from rushes_core.campaigns.loading import Refused
from rushes_core.campaigns.means import means_of
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.view import eta_of
from rushes_core.measured import Shape, cost_of
from rushes_core.settings import Settings
from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.orm import Session

from rushes_worker.campaigns.chunks import Chunk
from rushes_worker.campaigns.copying import copy_rows


class Examination:
    """Reads all chunks of a file.

    Args:
        go_on: called between chunks; what it raises ends the reading.
    """

    def __init__(self, campaign: Campaign, settings: Settings, engine: Engine, *, go_on: Callable[[], None]) -> None:
        self._campaign = campaign
        self._settings = settings
        self._engine = engine
        self._go_on = go_on
        self._num_valid = self._num_invalid = 0
        self._shapes: Counter[Shape] = Counter()
        self._errors: list[dict[str, Any]] = []

    def run(self, chunks: Iterator[Chunk]) -> dict[str, Any]:
        """The column `report` of a campaign: `lines` with a request, those `valid` and `invalid`, `frames`,
        `gpu_seconds`, null where nothing was measured, when it would be done if it were sent now, as in its `eta`, and
        the first `errors`.

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
                    self._go_on()
                    with connection.begin():
                        self._add(connection, chunk)
            finally:
                # the tables go with it
                connection.invalidate()
        return {
            "lines": self._num_valid + self._num_invalid,
            "valid": self._num_valid,
            "invalid": self._num_invalid,
            "frames": sum(shape[2] * count for shape, count in self._shapes.items()),
            **self._outlook(),
            "errors": self._errors,
        }

    def _outlook(self) -> dict[str, Any]:
        campaign = self._campaign
        with Session(self._engine) as session:
            seen_within = self._settings.lease_seconds
            means = means_of(session, [campaign], seen_within_seconds=seen_within)[campaign.id]
            now = session.execute(select(func.now())).scalar_one()
        cost = sum(cost_of(shape) * count for shape, count in self._shapes.items())
        left = means.left(Work(self._num_valid, cost, shapes=self._shapes))
        eta = eta_of(left, ends_of(campaign, left, used_gpu_seconds=0.0, now=now))
        return {
            "gpu_seconds": self._gpu_seconds(means),
            "completes_at": None if eta is None else eta.completes_at,
            "completes_at_latest": None if eta is None else eta.completes_at_latest,
            "basis": None if eta is None else eta.basis,
            "fits_window": None if eta is None else eta.fits_window,
        }

    def _gpu_seconds(self, means: Means) -> float | None:
        """Also of fewer measured clips than a forecast needs."""
        seconds = 0.0
        for shape, count in self._shapes.items():
            run = means.times.run(shape)
            if run is None:
                return None
            seconds += count * run.p50
        return round(seconds * means.capacity.gpus, 1)

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
