"""How long the jobs of the day ran and waited, and how often they were tried: histograms for Prometheus, by size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from prometheus_client.core import HistogramMetricFamily
from rushes_core import measured
from sqlalchemy.ext.asyncio import AsyncSession

SECONDS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 14_400.0)
ATTEMPTS = (1.0, 2.0, 3.0, 5.0, 10.0)
_FAMILIES = {
    "run": ("rushes_job_run_seconds", "Seconds from start to completion of jobs completed since 00:00 UTC", SECONDS),
    "wait": ("rushes_job_wait_seconds", "Seconds that they had waited", SECONDS),
    "attempts": ("rushes_job_attempts", "Attempts that they took", ATTEMPTS),
}
_SLICE = timedelta(hours=1)
"""What one statement counts at most: it has to be over in the time that statements have."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    """One for each bound, of what is not above it but above the one before, and one for the rest."""
    total: float = 0.0


@dataclass(slots=True)
class JobHistograms:
    """However late in the day a process is started, it reads what completed since midnight once, and then what
    completed since it looked last. All processes tell alike, but for jobs of the day that were deleted, or whose clips
    were removed: those that had counted them still do, and one that is started later does not."""

    _since: datetime = _NEVER
    _until: datetime = _NEVER
    _found: dict[tuple[str, str, str], _Histogram] = field(default_factory=dict[tuple[str, str, str], _Histogram])

    async def refresh(self, session: AsyncSession) -> None:
        """Count what has completed, but for the last seconds: its commits may still be on their way."""
        since, until = (await session.execute(measured.today())).one()
        if since != self._since:
            self._since, self._until = since, since
            self._found.clear()
        while self._until < until:
            await self._count(session, until=min(until, self._until + _SLICE))

    async def _count(self, session: AsyncSession, *, until: datetime) -> None:
        after, bounds = self._until, {kind: limits for kind, (_, _, limits) in _FAMILIES.items()}
        rows = (await session.execute(measured.completed(after=after, until=until, bounds=bounds))).all()
        if self._until != after:
            # another request has counted the same meanwhile
            return
        self._until = until
        for row in rows:
            key = (row.kind, f"{row.width}x{row.height}", str(row.num_frames))
            histogram = self._found.setdefault(key, _Histogram([0] * (len(bounds[row.kind]) + 1)))
            histogram.counts[row.num_below] += row.num_jobs
            histogram.total += row.total

    def families(self) -> Iterable[HistogramMetricFamily]:
        for kind, (name, about, bounds) in _FAMILIES.items():
            family = HistogramMetricFamily(name, about, labels=["size", "num_frames"])
            for (of, size, num_frames), histogram in sorted(self._found.items()):
                if of == kind:
                    family.add_metric([size, num_frames], _buckets(histogram.counts, bounds), histogram.total)
            yield family


def _buckets(counts: Sequence[int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return [(name, float(sum(counts[: place + 1]))) for place, name in enumerate(names)]
