"""How long clips took lately, by shape, from the jobs that completed: what progress and forecasts are made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Self

from sqlalchemy import Select, TextClause, select, text

from rushes_core.models import RESULT_RETAINED, MeasuredTime
from rushes_core.states import Phase

MEASURE_SECONDS = 10.0
"""How often `measure` is run."""
_MAX_JOBS = 1_000
"""Completed jobs that one pass looks at, the latest."""
_MAX_JOBS_PER_SHAPE = 50
"""More would keep the times of a slower deployment alive for long."""

_COMMIT_SECONDS = 5.0
"""How long the transaction that completes a job takes at most."""

_MEASURE = text(f"""
WITH last AS (
    SELECT id, model, width, height, num_frames, timings, finished_at,
        extract(epoch FROM finished_at - started_at)::float AS run
    FROM jobs WHERE {RESULT_RETAINED} AND started_at IS NOT NULL
    ORDER BY finished_at DESC LIMIT :max_jobs
), counted AS MATERIALIZED (
    SELECT * FROM (
        SELECT *, row_number() OVER (PARTITION BY model, width, height, num_frames ORDER BY finished_at DESC) AS place
        FROM last
    ) AS placed WHERE place <= :max_jobs_per_shape
), runs AS (
    SELECT model, width, height, num_frames, count(*) AS num_jobs,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY run) AS run_p50,
        percentile_cont(0.8) WITHIN GROUP (ORDER BY run) AS run_p80,
        percentile_cont(0.9) WITHIN GROUP (ORDER BY run) AS run_p90
    FROM counted GROUP BY model, width, height, num_frames
), phases AS (
    SELECT model, width, height, num_frames, jsonb_object_agg(phase, round(seconds::numeric, 3)) AS phases
    FROM (
        SELECT model, width, height, num_frames, phase, avg(seconds::float) AS seconds
        FROM counted, jsonb_each(timings) AS each (phase, seconds)
        WHERE phase <> 'total' AND jsonb_typeof(seconds) = 'number'
        GROUP BY model, width, height, num_frames, phase
    ) AS mean GROUP BY model, width, height, num_frames
)
INSERT INTO measured_times AS known (model, width, height, num_frames, num_jobs, run_p50, run_p80, run_p90, phases)
SELECT model, width, height, num_frames, num_jobs, run_p50, run_p80, run_p90, coalesce(phases, '{{}}')
FROM runs LEFT JOIN phases USING (model, width, height, num_frames)
ORDER BY model, width, height, num_frames  -- two dispatchers must not lock these rows in different orders
ON CONFLICT (model, width, height, num_frames) DO UPDATE
SET num_jobs = excluded.num_jobs, run_p50 = excluded.run_p50, run_p80 = excluded.run_p80, run_p90 = excluded.run_p90,
    phases = excluded.phases, updated_at = now()
WHERE (known.num_jobs, known.run_p50, known.run_p80, known.run_p90, known.phases)
    IS DISTINCT FROM (excluded.num_jobs, excluded.run_p50, excluded.run_p80, excluded.run_p90, excluded.phases)
""")


def measure() -> TextClause:
    """Write what the last completed jobs took. A shape that none of them has keeps what was measured before."""
    return _MEASURE.bindparams(max_jobs=_MAX_JOBS, max_jobs_per_shape=_MAX_JOBS_PER_SHAPE)


_RECENT = text(f"""
WITH last AS (
    SELECT width, height, num_frames, extract(epoch FROM finished_at - started_at)::float AS run,
        CASE WHEN generation = 1 THEN extract(epoch FROM started_at - created_at)::float END AS wait
    FROM jobs WHERE {RESULT_RETAINED} AND started_at IS NOT NULL
    ORDER BY finished_at DESC LIMIT :max_jobs
)
SELECT width, height, num_frames, count(*) AS num_jobs,
    percentile_cont(CAST(:quantiles AS float[])) WITHIN GROUP (ORDER BY run) AS run,
    percentile_cont(CAST(:quantiles AS float[])) WITHIN GROUP (ORDER BY wait) AS wait
FROM last GROUP BY width, height, num_frames ORDER BY width, height, num_frames
""")


def recent(quantiles: Sequence[float]) -> TextClause:
    """Of the last completed jobs, by shape: `num_jobs`, and quantiles of the seconds that they ran and waited.

    `wait` is null where all of them had been retried, whose times are not kept.
    """
    return _RECENT.bindparams(max_jobs=_MAX_JOBS, quantiles=list(quantiles))


_TODAY = text(f"""
SELECT date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS since,
    now() - make_interval(secs => {_COMMIT_SECONDS}) AS until
""")
_COMPLETED = text(f"""
WITH ended AS (
    SELECT width, height, num_frames, extract(epoch FROM finished_at - started_at)::float AS run,
        CASE WHEN generation = 1 THEN extract(epoch FROM started_at - created_at)::float END AS wait,
        attempt::float AS attempts
    FROM jobs WHERE {RESULT_RETAINED} AND started_at IS NOT NULL AND finished_at > :after AND finished_at <= :until
), figures AS (
    SELECT width, height, num_frames, kind, figure,
        (SELECT count(*) FROM unnest(bounds) AS bound WHERE bound < figure) AS num_below
    FROM ended, LATERAL (VALUES
        ('run', run, CAST(:run AS float[])),
        ('wait', wait, CAST(:wait AS float[])),
        ('attempts', attempts, CAST(:attempts AS float[]))
    ) AS each (kind, figure, bounds) WHERE figure IS NOT NULL
)
SELECT width, height, num_frames, kind, num_below, count(*) AS num_jobs, sum(figure) AS total
FROM figures GROUP BY width, height, num_frames, kind, num_below
""")


def today() -> TextClause:
    """`since`, when the day began (UTC), and `until`: what completed by then is seen by everybody."""
    return _TODAY


def completed(*, after: datetime, until: datetime, bounds: Mapping[str, Sequence[float]]) -> TextClause:
    """What the jobs that completed then and whose clips are kept were like, counted by shape.

    Columns: `width`, `height`, `num_frames`, `kind` (`run` and `wait` in seconds, `attempts`), `num_below`, how many of
    the `bounds` of that kind lie below the figure, `num_jobs` of which that is so, and `total` of their figures.
    """
    limits = {kind: list(values) for kind, values in bounds.items()}
    return _COMPLETED.bindparams(after=after, until=until, **limits)


def measured(model: str) -> Select[MeasuredTime]:
    """Every shape of which clips were measured."""
    return select(MeasuredTime).where(MeasuredTime.model == model)


def measured_shape(model: str, *, width: int, height: int, num_frames: int) -> Select[MeasuredTime]:
    return select(MeasuredTime).where(
        MeasuredTime.model == model,
        MeasuredTime.width == width,
        MeasuredTime.height == height,
        MeasuredTime.num_frames == num_frames,
    )


_ON_RANKS = (Phase.ENCODING, Phase.DENOISING, Phase.DECODING)

Shape = tuple[int, int, int]
"""Width, height and frames."""


def cost_of(shape: Shape) -> float:
    """What a clip of this shape is counted as in `campaign_counts.remaining_cost`: frames times pixels / 10,000."""
    width, height, num_frames = shape
    return width * height * num_frames / 10_000


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from start to completion of clips of one shape."""

    p50: float
    p90: float
    busy: float
    """Of `p50`, the seconds for which the ranks are taken: the next clip begins when they are free."""
    num_jobs: int
    """That were measured; 0: in proportion to other shapes."""

    @classmethod
    def of(cls, row: MeasuredTime) -> Self:
        on_ranks = sum(float(row.phases.get(phase.value, 0.0)) for phase in _ON_RANKS)
        p90 = max(row.run_p50, row.run_p90 or row.run_p80)
        return cls(row.run_p50, p90, min(row.run_p50, on_ranks) or row.run_p50, row.num_jobs)


@dataclass(frozen=True)
class RunTimes:
    """How long clips of a model run, by shape."""

    shapes: Mapping[Shape, Run]

    @classmethod
    def of(cls, rows: Iterable[MeasuredTime]) -> Self:
        """From rows of `measured`."""
        return cls({(row.width, row.height, row.num_frames): Run.of(row) for row in rows})

    def run(self, shape: Shape) -> Run | None:
        """Of clips of this shape; None: nothing was measured yet, of any shape."""
        if shape in self.shapes or self.seconds_per_cost is None:
            return self.shapes.get(shape)
        p50 = cost_of(shape) * self.seconds_per_cost
        return Run(p50, p50 * self.spread, p50 * self.busy_share, 0)

    def mixed(self, shapes: Mapping[Shape, int]) -> "RunTimes":
        """The same, where so many clips of each of `shapes` are meant: without any, as many as were measured."""
        runs = {shape: self.run(shape) for shape in shapes}
        weighed = {shape: replace(run, num_jobs=shapes[shape]) for shape, run in runs.items() if run is not None}
        return RunTimes(weighed) if weighed else self

    @cached_property
    def num_jobs(self) -> int:
        """Clips that were measured."""
        return sum(run.num_jobs for run in self.shapes.values())

    @cached_property
    def seconds_per_cost(self) -> float | None:
        """Of a run in the middle; None: nothing was measured."""
        cost = sum(run.num_jobs * cost_of(shape) for shape, run in self.shapes.items())
        return sum(run.num_jobs * run.p50 for run in self.shapes.values()) / cost if cost else None

    @cached_property
    def spread(self) -> float:
        """How much longer nine of ten runs take at most than half of them."""
        p50 = sum(run.num_jobs * run.p50 for run in self.shapes.values())
        return sum(run.num_jobs * run.p90 for run in self.shapes.values()) / p50 if p50 else 1.0

    @cached_property
    def busy_share(self) -> float:
        """Of the seconds that clips run, those for which the ranks are taken."""
        p50 = sum(run.num_jobs * run.p50 for run in self.shapes.values())
        return sum(run.num_jobs * run.busy for run in self.shapes.values()) / p50 if p50 else 1.0
