"""Statements on replicas: who is up, and who has been silent for too long."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Select, delete, exists, func, literal_column, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql.dml import ReturningDelete

from rushes_core.models import Job, Replica
from rushes_core.states import LEASED_STATES

STALE_REPLICA = timedelta(days=1)

# literals, not parameters: a prepared statement's generic plan could not use the partial index otherwise
_IS_LEASED = Job.state.in_([literal_column(f"'{state}'", Job.state.type) for state in LEASED_STATES])


def upsert_replica(replica_id: str, **values: Any) -> Any:
    """Record a replica's state and that it was seen now."""
    statement = upsert(Replica).values(id=replica_id, **values)
    return statement.on_conflict_do_update(index_elements=[Replica.id], set_={**values, "last_seen": func.now()})


def live_replicas(*, seen_within_seconds: float) -> Select[Replica]:
    """Replicas that take jobs and have been heard of within the last `seen_within_seconds`."""
    return select(Replica).where(
        Replica.last_seen > func.now() - timedelta(seconds=seen_within_seconds),
        Replica.state.not_in(("stopped", "drained")),
    )


def forget_stale_replicas() -> ReturningDelete[str]:
    """Drop replicas that have been silent for a day and hold no job."""
    holds_a_job = exists().where(Job.lease_owner == Replica.id, _IS_LEASED)
    return delete(Replica).where(Replica.last_seen < func.now() - STALE_REPLICA, ~holds_a_job).returning(Replica.id)
