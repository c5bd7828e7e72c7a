"""Conditions on a job's state, written as literals that a prepared statement's generic plan can match with an index."""

from sqlalchemy import and_, literal_column
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.models import Job
from rushes_core.states import LEASED_STATES, JobState


def in_states(*states: JobState) -> ColumnElement[bool]:
    """Whether the job is in one of `states`."""
    return Job.state.in_([literal_column(f"'{state}'", Job.state.type) for state in states])


IS_QUEUED = Job.state == literal_column(f"'{JobState.QUEUED}'", Job.state.type)
IS_CLAIMABLE = and_(IS_QUEUED, Job.hold.is_(None))
IS_LEASED = in_states(*LEASED_STATES)
