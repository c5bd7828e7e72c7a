"""Statements that list the jobs of a project, filtered, page by page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Select, SelectBase, Text, any_, func, literal, literal_column, select, text, union, union_all
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import aliased
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.ids import first_video_id
from rushes_core.models import HAS_METADATA, Job
from rushes_core.predicates import in_states
from rushes_core.states import JobState

CLOCK_SLACK_SECONDS = 3_600
"""How far the clocks that ids are drawn by may be from the database's, which says when a job was created."""

MAX_WALKED = 10_000
"""Jobs that are looked at one after the other for a pair of metadata."""

_METADATA = Job.request.op("->")(literal_column("'metadata'")).cast(JSONB)

# an array of few ids, by the index that each campaign has of its names
_NAMED = """jobs.id = ANY (ARRAY(
    SELECT named.id FROM campaigns, LATERAL (
        SELECT id FROM jobs AS own WHERE own.campaign_id = campaigns.id AND own.custom_id = :custom_id
    ) AS named WHERE campaigns.project = :named_project
))"""

Statement = TypeVar("Statement", bound=Select[*tuple[Any, ...]])


@dataclass(frozen=True, slots=True)
class Filters:
    """Which jobs are listed. Those that all of them let through."""

    states: tuple[JobState, ...] | None = None
    model: str | None = None
    created_from: datetime | None = None
    created_until: datetime | None = None
    """Not listed itself."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Pairs that the job's metadata has, maybe among others."""
    campaign_id: str | None = None
    custom_id: str | None = None


def page(*, project: str, filters: Filters, after: str | None, limit: int, descending: bool) -> Select[Job]:
    """One page of the jobs that a project sees, by id, and one more: it tells that there are more."""
    scan = _Scan(project, filters, after, limit + 1, descending)
    if filters.states is None and not filters.metadata:
        return scan.of(select(Job), None)
    # one ordered scan of an index for each state, merged: no scan of an index is in the order of the ids of several
    each = [scan.ids(state) for state in filters.states or (None,)]
    ids = union_all(*each).subquery("ids")
    order = Job.id.desc() if descending else Job.id.asc()
    return select(Job).where(Job.id.in_(select(ids.c.id))).order_by(order).limit(limit + 1)


def all_listed(*, project: str, filters: Filters) -> Select[Job]:
    """The jobs of every page, newest first, for pages that go by their number. Without pairs of metadata."""
    assert not filters.metadata
    statement = _Scan(project, filters, None, None, descending=True).of(select(Job), None)
    return statement if filters.states is None else statement.where(in_states(*filters.states))


@dataclass(frozen=True, slots=True)
class _Scan:
    """What is read of an index: of all a project's jobs, or of those in one state."""

    project: str
    filters: Filters
    after: str | None
    limit: int | None
    descending: bool

    def ids(self, state: JobState | None) -> SelectBase:
        """The ids of the first jobs in this order.

        Those with a pair of metadata are looked for among the first `MAX_WALKED` jobs; only where these are too few, by
        the index of metadata, which has no order: of a pair that many jobs have it yields all.
        """
        if not self.filters.metadata:
            return _part(self.of(select(Job.id), state), f"in_{state}")
        # what conditions are about
        columns = (Job.project, Job.id, Job.model, Job.created_at, _METADATA.label("metadata"))
        walked = self._sorted(select(*columns).where(*self._where(state))).limit(MAX_WALKED).cte(f"walked_{state}")
        job = aliased(Job, walked)
        conditions = [*_conditions(self.filters, job), walked.c.metadata.contains(dict(self.filters.metadata))]
        near = self._sorted(select(job.id).where(*conditions), job).limit(self.limit)
        near = near.cte(f"near_{state}")
        is_page_short = select(func.count()).select_from(near).scalar_subquery() < self.limit
        is_walk_cut = select(func.count()).select_from(walked).scalar_subquery() >= MAX_WALKED
        matching = select(Job.project, Job.id).where(
            *self._where(state), *_conditions(self.filters, Job), *self._pairs()
        )
        # an offset, even of nothing, keeps the order out of it: for that the planner would walk on through all jobs
        far = aliased(
            Job, matching.where(is_page_short, is_walk_cut).offset(literal_column("0")).subquery(f"far_{state}")
        )
        return union(select(near.c.id), _part(self._sorted(select(far.id), far).limit(self.limit), f"rest_{state}"))

    def of(self, statement: Statement, state: JobState | None) -> Statement:
        """`statement` for the first jobs that are listed."""
        where = [*self._where(state), *_conditions(self.filters, Job)]
        return self._sorted(statement.where(*where)).limit(self.limit)

    def _pairs(self) -> list[ColumnElement[bool]]:
        """As the index has it."""
        return [text(HAS_METADATA), _METADATA.contains(dict(self.filters.metadata))]  # type: ignore[list-item]

    def _sorted(self, statement: Statement, job: type[Job] = Job) -> Statement:
        """By project and id. The project is one of a list of one: an equation would be left out of the order, and the
        order of ids alone is that of other indexes too, in which a project whose jobs are old would be looked for among
        all that are newer.
        """
        return statement.order_by(*(one.desc() if self.descending else one.asc() for one in (job.project, job.id)))

    def _where(self, state: JobState | None) -> list[ColumnElement[bool]]:
        """The project's jobs, whatever else is asked of them."""
        return [
            Job.project == any_(literal([self.project], ARRAY(Text()))),
            Job.deleted_at.is_(None),
            *self._bounds(),
            *self._in_campaign(),
            *([] if state is None else [in_states(state)]),
        ]

    def _in_campaign(self) -> list[ColumnElement[bool]]:
        campaign_id, custom_id = self.filters.campaign_id, self.filters.custom_id
        conditions: list[ColumnElement[bool]] = []
        if campaign_id is not None:
            # ids of a campaign's jobs rise with their lines, and few others were drawn between them
            of_campaign = select(Job.id).where(Job.campaign_id == campaign_id)
            first, last = (of_campaign.order_by(order).limit(1) for order in (Job.line.asc(), Job.line.desc()))
            conditions += [
                Job.campaign_id == campaign_id,
                Job.id >= first.scalar_subquery(),
                Job.id <= last.scalar_subquery(),
            ]
        if custom_id is not None:
            named = text(_NAMED).bindparams(named_project=self.project, custom_id=custom_id)
            conditions.append(named)  # type: ignore[arg-type]
        return conditions

    def _bounds(self) -> list[ColumnElement[bool]]:
        since, until = self.filters.created_from, self.filters.created_until
        bounds: list[ColumnElement[bool]] = []
        if self.after is not None:
            bounds.append(Job.id < self.after if self.descending else Job.id > self.after)
        # ids begin with a time
        if since is not None:
            bounds.append(Job.id >= first_video_id(since.timestamp() - CLOCK_SLACK_SECONDS))
        if until is not None:
            bounds.append(Job.id < first_video_id(until.timestamp() + CLOCK_SLACK_SECONDS))
        return bounds


def _part(statement: Select[str], name: str) -> Select[str]:
    """`statement`, with its own order and limit, as a part of a union."""
    return select(statement.subquery(name).c.id)


def _conditions(filters: Filters, job: type[Job]) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if filters.model is not None:
        conditions.append(job.model == filters.model)
    if filters.created_from is not None:
        conditions.append(job.created_at >= filters.created_from)
    if filters.created_until is not None:
        conditions.append(job.created_at < filters.created_until)
    return conditions
