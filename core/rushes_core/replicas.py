"""Statements on replicas: who is up, and who has been silent for too long."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Select, Update, delete, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert, ReturningUpdate

from rushes_core.models import Job, Replica
from rushes_core.predicates import IS_LEASED

STALE_REPLICA = timedelta(days=1)

_NAME_LOCK = 7_387_643
"""The first of the two keys of advisory locks on names of replicas."""


def upsert_replica(replica_id: str, *, drain: bool = False, **values: Any) -> ReturningInsert[bool]:
    """Record a replica's state and that it was seen now; whether it is to take no more jobs.

    Args:
        drain: it asks that of itself.
    """
    asked = {"drain_requested_at": func.coalesce(Replica.drain_requested_at, func.now())} if drain else {}
    statement = upsert(Replica).values(id=replica_id, **values, **({"drain_requested_at": func.now()} if drain else {}))
    return statement.on_conflict_do_update(
        index_elements=[Replica.id], set_={**values, **asked, "last_seen": func.now()}
    ).returning(Replica.drain_requested_at.is_not(None))


def lock_name(replica_id: str) -> Select[Any]:
    """Until the transaction ends nobody else takes the name in `replica_id`."""
    return select(func.pg_advisory_xact_lock(_NAME_LOCK, func.hashtext(name_of(replica_id))))


def namesakes(replica_id: str, *, seen_within_seconds: float) -> Select[Replica]:
    """Other replicas with the name of `replica_id` that were heard of within the last `seen_within_seconds`, and have
    not stopped, nor are about to."""
    return up(seen_within_seconds=seen_within_seconds).where(
        func.split_part(Replica.id, "#", 1) == name_of(replica_id),
        Replica.id != replica_id,
        Replica.state != "stopping",
    )


def name_of(replica_id: str) -> str:
    """The part of a replica's id that outlives its restarts."""
    return replica_id.partition("#")[0]


def request_drain(replica_id: str) -> ReturningUpdate[Replica]:
    """Have a replica give back what it has not started, finish what it runs, and take no more.

    It sees that with its next heartbeat. No row: there is no such replica, or it has stopped.
    """
    return (
        _update_replica(replica_id)
        .values(drain_requested_at=func.coalesce(Replica.drain_requested_at, func.now()))
        .returning(Replica)
    )


def cancel_drain(replica_id: str) -> ReturningUpdate[Replica]:
    """Have a replica take jobs again, also one that drained itself because too many different jobs crashed on it.

    No row: there is no such replica, or it has stopped.
    """
    return _update_replica(replica_id).values(drain_requested_at=None).returning(Replica)


def _update_replica(replica_id: str) -> Update:
    return (
        update(Replica)
        .where(Replica.id == replica_id, Replica.state != "stopped")
        .execution_options(synchronize_session=False, populate_existing=True)
    )


def up(*, seen_within_seconds: float) -> Select[Replica]:
    """Replicas that have not stopped and have been heard of within the last `seen_within_seconds`, by name.

    `detail` holds `pid`, `host` and what tells the process from others, the `checkpoint`, the `ranks`' pids, their
    `devices`, `failures`, the rank groups in a row that ended without a completed job, and `crashed_jobs` of the last
    half hour, for which it may have drained itself.
    """
    return (
        select(Replica)
        .where(Replica.last_seen > func.now() - timedelta(seconds=seen_within_seconds), Replica.state != "stopped")
        .order_by(Replica.id)
    )


def forget_stale_replicas() -> ReturningDelete[str]:
    """Drop replicas that have been silent for a day and hold no job."""
    holds_a_job = exists().where(Job.lease_owner == Replica.id, IS_LEASED)
    return delete(Replica).where(Replica.last_seen < func.now() - STALE_REPLICA, ~holds_a_job).returning(Replica.id)
