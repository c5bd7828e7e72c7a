"""Statements that list the jobs of a project, filtered, page by page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Select, Text, any_, literal, literal_column, select, text, union_all
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.ids import first_video_id
from rushes_core.models import HAS_METADATA, Job
from rushes_core.predicates import in_states
from rushes_core.states import JobState

CLOCK_SLACK_SECONDS = 3_600
"""How far the clocks that ids are drawn by may be from the database's, which says when a job was created."""

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


def page(*, project: str, filters: Filters, after: str | None, limit: int, descending: bool) -> Select[Job]:
    """One page of the jobs that a project sees, by id, and one more: it tells that there are more."""
    scan = _Scan(project, filters, after, limit + 1, descending)
    if filters.states is None:
        return scan.of(select(Job), None)
    # one ordered scan of an index for each state, merged: no scan of an index is in the order of the ids of several
    each = [scan.of(select(Job.id), state).subquery(f"in_{state}") for state in filters.states]
    ids = union_all(*(select(one.c.id) for one in each)).subquery("ids")
    order = Job.id.desc() if descending else Job.id.asc()
    return select(Job).where(Job.id.in_(select(ids.c.id))).order_by(order).limit(limit + 1)


@dataclass(frozen=True, slots=True)
class _Scan:
    """What is read of an index: of all a project's jobs, or of those in one state."""

    project: str
    filters: Filters
    after: str | None
    limit: int
    descending: bool

    def of(self, statement: Statement, state: JobState | None) -> Statement:
        """`statement` for the first jobs in this order.

        It is the order of project and id, and the project is one of a list of one: an equation would be left out of
        the order, and the order of ids alone is that of other indexes too, in which a project whose jobs are old would
        be looked for among all that are newer.
        """
        where = [
            Job.project == any_(literal([self.project], ARRAY(Text()))),
            Job.deleted_at.is_(None),
            *self._bounds(),
            *_conditions(self.filters),
        ]
        if state is not None:
            where.append(in_states(state))
        order = [one.desc() if self.descending else one.asc() for one in (Job.project, Job.id)]
        return statement.where(*where).order_by(*order).limit(self.limit)

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


def _conditions(filters: Filters) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if filters.model is not None:
        conditions.append(Job.model == filters.model)
    if filters.created_from is not None:
        conditions.append(Job.created_at >= filters.created_from)
    if filters.created_until is not None:
        conditions.append(Job.created_at < filters.created_until)
    if filters.metadata:
        # written as the index has it
        metadata = Job.request.op("->")(literal_column("'metadata'")).cast(JSONB)
        conditions += [text(HAS_METADATA), metadata.contains(dict(filters.metadata))]  # type: ignore[list-item]
    return conditions
