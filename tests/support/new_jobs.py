"""Rows of new jobs."""

import json
from datetime import datetime
from typing import Any

from rushes_core.arrivals import CREATE
from rushes_core.models import Job
from rushes_core.states import JobState
from sqlalchemy import insert, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ClauseElement


def insert_job(session: Session, **values: Any) -> Job:
    """A queued job, by the statement that the API inserts them with; one of a campaign as its loader would.

    Args:
        values: columns. What no request decides, and times that are expressions, are set afterwards.
    """
    if "campaign_id" in values:
        return session.execute(insert(Job).values(state=JobState.QUEUED, **values).returning(Job)).scalar_one()
    later = {
        name: value
        for name, value in values.items()
        if name in ("crashed_on", "low_memory") or isinstance(value, ClauseElement)
    }
    decided = {"priority": 1} | {name: value for name, value in values.items() if name not in later}
    job = session.execute(CREATE, {"jobs": json.dumps([decided], default=datetime.isoformat)}).scalar_one()
    if later:
        session.execute(update(Job).where(Job.id == job.id).values(later))
        session.refresh(job)
    return job
