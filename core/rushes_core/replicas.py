"""Statements on replicas: who is up, and who has been silent for too long."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, Update, and_, delete, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import InstrumentedAttribute, aliased
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert, ReturningUpdate

from rushes_core.models import Job, Replica
from rushes_core.predicates import IS_LEASED

_LOST_AFTER_LEASES = 10
_REMEMBERED_SECONDS = 3_600.0
"""How long a lost one is still told of."""

_NAME_LOCK = 7_387_643
"""The first of the two keys of advisory locks on names of replicas."""


def lost_after(lease_seconds: float) -> float:
    """Seconds of silence after which a replica counts as lost, and no more as one that is only slow to say that it
    lives. Its jobs were given to others long before, when it had been silent for a lease."""
    return _LOST_AFTER_LEASES * lease_seconds


def forgotten_after(lease_seconds: float) -> float:
    """Seconds of silence after which a replica is told of no more."""
    return lost_after(lease_seconds) + _REMEMBERED_SECONDS


def upsert_replica(
    replica_id: str, *, drain: bool = False, was_drained: bool = False, **values: Any
) -> ReturningInsert[bool]:
    """Record a replica's state and that it was seen now; whether it is to take no more jobs.

    Args:
        drain: it asks that of itself.
        was_drained: that was asked of it, as it knows, which counts if its row was forgotten meanwhile.
    """
    asked = {"drain_requested_at": func.coalesce(Replica.drain_requested_at, func.now())} if drain else {}
    asked_at_first = {"drain_requested_at": func.now()} if drain or was_drained else {}
    statement = upsert(Replica).values(id=replica_id, **values, **asked_at_first)
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
        _name(Replica.id) == name_of(replica_id),
        Replica.id != replica_id,
        Replica.state != "stopping",
    )


def of_namespace(namespace: str | None) -> Select[Replica]:
    """Replicas that have not stopped and whose processes are, or were, of this namespace of processes."""
    return select(Replica).where(Replica.detail["namespace"].astext == namespace, Replica.state != "stopped")


def take_places(replica_id: str, *, ended: Collection[str], silent_for_seconds: float) -> ReturningUpdate[str]:
    """Have those count as stopped whose place `replica_id` takes: `ended`, whose processes do not run any more, and
    others of its name that were silent for so long. One of the latter that lives says so with its next heartbeat."""
    silent = and_(
        _name(Replica.id) == name_of(replica_id),
        Replica.id != replica_id,
        Replica.last_seen <= func.now() - timedelta(seconds=silent_for_seconds),
    )
    # whoever holds one of these rows says something of it now
    gone = (
        select(Replica.id)
        .where(or_(Replica.id.in_(ended), silent), Replica.state != "stopped")
        .with_for_update(skip_locked=True)
    )
    return (
        update(Replica)
        .where(Replica.id.in_(gone))
        .values(state="stopped")
        .returning(Replica.id)
        .execution_options(synchronize_session=False)
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
    `devices`, `failures`, the rank groups in a row that ended without a completed job, `trouble`, why the last one
    ended, if none is ready since, and `crashed_jobs` of the last half hour, for which it may have drained itself.
    """
    return (
        select(Replica)
        .where(Replica.last_seen > func.now() - timedelta(seconds=seen_within_seconds), Replica.state != "stopped")
        .order_by(Replica.id)
    )


def forget_stale_replicas(*, lease_seconds: float) -> ReturningDelete[str]:
    """Drop replicas that hold no job and have been silent for too long to be told of: for a lease where another one of
    the name is up."""
    holds_a_job = exists().where(Job.lease_owner == Replica.id, IS_LEASED)
    other = aliased(Replica)
    lease = timedelta(seconds=lease_seconds)
    is_replaced = exists().where(
        _name(other.id) == _name(Replica.id),
        other.id != Replica.id,
        other.last_seen > func.now() - lease,
        other.state != "stopped",
    )
    is_forgotten = Replica.last_seen < func.now() - timedelta(seconds=forgotten_after(lease_seconds))
    is_silent = Replica.last_seen < func.now() - lease
    return (
        delete(Replica)
        .where(or_(is_forgotten, and_(is_silent, is_replaced)), ~holds_a_job)
        .returning(Replica.id)
        .execution_options(synchronize_session=False)
    )


def _name(replica_id: InstrumentedAttribute[str]) -> ColumnElement[str]:
    return func.split_part(replica_id, "#", 1)
