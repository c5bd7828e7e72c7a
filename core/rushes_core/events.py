"""Statements that follow jobs: what changes of many at once, and the whole story of some."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from sqlalchemy import Select, Text, any_, exists, func, literal, select
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, aggregate_order_by
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.models import Job, JobEvent
from rushes_core.states import JobState


class Glimpse(NamedTuple):
    """What changes of a job that a client follows."""

    id: str
    state: JobState
    generation: int
    attempt: int
    fence: int | None
    deleted_at: datetime | None
    phase: str | None
    completed_steps: int
    progress: int
    cancel_requested_at: datetime | None

    @classmethod
    def of(cls, job: Job) -> Self:
        return cls(*(getattr(job, name) for name in cls._fields))

    @property
    def status(self) -> tuple[Any, ...]:
        """What tells apart two states of the job's life; the rest is progress."""
        return self.state, self.generation, self.attempt, self.fence, self.deleted_at


class Step(NamedTuple):
    """One entry of a job's history. Its place in it, from 1, never changes."""

    place: int
    state: JobState
    generation: int
    attempt: int

    @classmethod
    def story(cls, rows: Sequence[Sequence[Any]]) -> tuple[Self, ...]:
        """The history as `stories` selects it."""
        return tuple(
            cls(place, JobState(state), generation, attempt)
            for place, (state, generation, attempt) in enumerate(rows, start=1)
        )


def glimpses(job_ids: Sequence[str]) -> "Select[*tuple[Any, ...]]":
    """The members of `Glimpse`, in order, of each of these jobs that there is."""
    columns: list[InstrumentedAttribute[Any]] = [getattr(Job, name) for name in Glimpse._fields]
    return select(*columns).where(_is_one_of(job_ids))


def stories(job_ids: Sequence[str]) -> Select[Job, Any]:
    """Each of these jobs that there is, deleted ones too, and its history as one value: both of the same moment."""
    entry = func.jsonb_build_array(JobEvent.new_state, JobEvent.generation, JobEvent.attempt, type_=JSONB())
    history = (
        select(func.coalesce(func.jsonb_agg(aggregate_order_by(entry, JobEvent.id)), func.jsonb_build_array()))
        .where(JobEvent.job_id == Job.id)
        .correlate(Job)
        .scalar_subquery()
    )
    return select(Job, history).where(_is_one_of(job_ids))


def stories_of(asked: Sequence[tuple[str, str]]) -> Select[Job, Any]:
    """`stories` of the jobs of which somebody asked: each an id and the project that it must be of. What is another
    project's is not even sent: that would take time, which tells that it is there."""
    job_ids, projects = ([pair[at] for pair in asked] for at in (0, 1))
    arrays = (literal(column, ARRAY(Text())) for column in (job_ids, projects))
    pair = func.unnest(*arrays).table_valued("id", "project").render_derived(name="asked")
    owned = exists().where(pair.c.id == Job.id, pair.c.project == Job.project)
    return stories(job_ids).where(owned)


def _is_one_of(job_ids: Sequence[str]) -> ColumnElement[bool]:
    # one array, and so one prepared statement, however many there are
    return Job.id == any_(literal(list(job_ids), ARRAY(Text())))
