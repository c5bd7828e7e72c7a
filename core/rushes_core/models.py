"""The tables: jobs, their history, what is told of them outside, shares of the GPUs, and the replicas that run them."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    Enum,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    SmallInteger,
    String,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rushes_core.states import FINAL_STATES, LEASED_STATES, JobState


def _values(enum: type[JobState]) -> list[str]:
    return [member.value for member in enum]


def _sql_list(states: tuple[JobState, ...]) -> str:
    return ", ".join(f"'{state}'" for state in states)


RESULT_RETAINED = "state = 'completed' AND deleted_at IS NULL AND NOT (result ? 'deleted_at')"
"""Predicate of completed jobs whose clip retention has not removed."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  read once by SQLAlchemy
        str: Text(),
        int: BigInteger(),
        datetime: DateTime(timezone=True),
        # a Python None is SQL NULL, not the JSON value null
        dict[str, Any]: JSONB(none_as_null=True),
    }


class Job(Base):
    """One clip that a client asked for. The row is the job: every other trace of it may be lost."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`video_` and a ULID, so that ids sort by creation."""
    project: Mapped[str]
    state: Mapped[JobState] = mapped_column(
        Enum(JobState, native_enum=False, length=16, values_callable=_values, create_constraint=True, name="state"),
        server_default=JobState.QUEUED,
    )
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    """0 interactive, 1 normal, 2 bulk."""

    model: Mapped[str]
    prompt: Mapped[str]
    seed: Mapped[int]
    width: Mapped[int]
    height: Mapped[int]
    num_frames: Mapped[int]
    request: Mapped[dict[str, Any]]
    """What the client asked for in its own terms: `seconds`, `size`, `metadata`."""

    generation: Mapped[int] = mapped_column(server_default=text("1"))
    """Counts the retries in place: what follows is of this generation, and history tells of the earlier ones."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the current or last attempt; 0 before the first claim."""
    max_attempts: Mapped[int]
    crash_count: Mapped[int] = mapped_column(server_default=text("0"))
    """Attempts that ended with their worker."""
    crashed_on: Mapped[list[str]] = mapped_column(ARRAY(Text()), server_default=text("'{}'::text[]"))
    """Names of the replicas that ended with an attempt of it, each once."""
    error_count: Mapped[int] = mapped_column(server_default=text("0"))
    """Attempts that ended with a clean error."""
    low_memory: Mapped[bool] = mapped_column(server_default=text("false"))
    """An attempt ran out of device memory: the next one takes the plan that needs less."""
    fence: Mapped[int | None]
    """Rises with every claim of any job: what a holder of an older fence writes matches no row."""
    lease_owner: Mapped[str | None]
    """Id of the replica that holds it: a name that outlives restarts, `#`, and a part of this process alone."""
    lease_until: Mapped[datetime | None]
    """By the database's clock."""

    phase: Mapped[str | None] = mapped_column(String(16))
    completed_steps: Mapped[int] = mapped_column(server_default=text("0"))
    progress: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """0..100, never falls within a generation, 100 only when completed."""

    result: Mapped[dict[str, Any] | None]
    """Pointer to the clip: bucket, key, bytes, sha256, what was measured, and `deleted_at` once it was removed."""
    error: Mapped[dict[str, Any] | None]
    """`code`, `message`, `stage` of the error that ended the job."""
    timings: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """Seconds per phase of the attempt that completed."""

    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    run_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Not claimed before this time."""
    deadline_at: Mapped[datetime | None]
    """A job that has not started by then expires; one that still runs is cancelled."""
    started_at: Mapped[datetime | None]
    """When the current or last attempt started."""
    finished_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """The row stays as a tombstone; it is invisible to clients."""
    purged_at: Mapped[datetime | None]
    """When the objects of a deleted job were removed from the store."""

    __table_args__ = (
        CheckConstraint(
            f"(finished_at IS NOT NULL) = (state IN ({_sql_list(FINAL_STATES)}))", name="finished_at_iff_final"
        ),
        CheckConstraint(
            f"(lease_until IS NOT NULL AND lease_owner IS NOT NULL AND fence IS NOT NULL) "
            f"OR state NOT IN ({_sql_list(LEASED_STATES)})",
            name="leased_states_hold_a_lease",
        ),
        CheckConstraint(
            f"lease_until IS NULL OR state IN ({_sql_list(LEASED_STATES)})", name="lease_only_in_leased_states"
        ),
        CheckConstraint("(result IS NOT NULL) = (state = 'completed')", name="result_iff_completed"),
        CheckConstraint("error IS NULL OR state <> 'completed'", name="no_error_when_completed"),
        CheckConstraint("progress BETWEEN 0 AND 100", name="progress_is_percent"),
        CheckConstraint("progress < 100 OR state = 'completed'", name="progress_100_iff_completed"),
        CheckConstraint("priority BETWEEN 0 AND 2", name="priority_is_a_class"),
        Index("ix_jobs_project_id", "project", "id", postgresql_where=text("deleted_at IS NULL")),
        Index(
            "ix_jobs_claim", "model", "priority", "project", "run_at", "id", postgresql_where=text("state = 'queued'")
        ),
        Index(
            "ix_jobs_leased",
            "lease_until",
            postgresql_where=text(f"state IN ({_sql_list(LEASED_STATES)})"),
        ),
        Index(
            "ix_jobs_unpurged",
            "deleted_at",
            postgresql_where=text("deleted_at IS NOT NULL AND purged_at IS NULL"),
        ),
        Index(
            "ix_jobs_deadline",
            "deadline_at",
            postgresql_where=text("deadline_at IS NOT NULL AND state = 'queued'"),
        ),
        Index("ix_jobs_retained", "finished_at", postgresql_where=text(RESULT_RETAINED)),
        {"postgresql_with": {"fillfactor": 80}},
    )


class JobAttempt(Base):
    """One execution of a job, written by the guard trigger on `jobs`."""

    __tablename__ = "job_attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    fence: Mapped[int] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(server_default=text("1"))
    attempt: Mapped[int]
    lease_owner: Mapped[str]
    claimed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    outcome: Mapped[str | None] = mapped_column(String(16))
    """The state that the job went to when the attempt ended: `queued` for one that was given back or lost."""
    crashed: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether it ended with its worker while it ran."""
    error: Mapped[dict[str, Any] | None]


class JobEvent(Base):
    """The history of a job's states, appended by the guard trigger on `jobs`."""

    __tablename__ = "job_events"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    old_state: Mapped[str | None] = mapped_column(String(16))
    new_state: Mapped[str] = mapped_column(String(16))
    generation: Mapped[int] = mapped_column(server_default=text("1"))
    attempt: Mapped[int]
    fence: Mapped[int | None]


class OutboxEvent(Base):
    """The end of a generation of a job, to be told outside: written by the trigger in the transaction that ends it.

    A deleted job tells nothing. There is no foreign key: what happened stays true when the row is gone.
    """

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    event_id: Mapped[str] = mapped_column(unique=True)
    """`evt_`, the job's ULID and the generation: the same event has the same id however often it is sent."""
    job_id: Mapped[str]
    project: Mapped[str]
    generation: Mapped[int]
    type: Mapped[str] = mapped_column(String(32))
    """`video.completed`, `video.failed`, `video.cancelled` or `video.expired`."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (UniqueConstraint("job_id", "generation"),)


class ProjectShare(Base):
    """What a project has had of the GPUs, for the fair order of claims. Rows without queued jobs may be dropped."""

    __tablename__ = "project_shares"

    project: Mapped[str] = mapped_column(primary_key=True)
    virtual_time: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """Cost of the work that was claimed, on a clock that all projects share."""
    last_start: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """`virtual_time` before the last claim; the largest of all projects is the time now on the shared clock."""

    # one page holds many versions of a row that every claim updates
    __table_args__ = ({"postgresql_with": {"fillfactor": 20}},)


class IdempotencyKey(Base):
    """A request that a client may send again: what was answered the first time."""

    __tablename__ = "idempotency_keys"

    project: Mapped[str] = mapped_column(primary_key=True)
    api_key: Mapped[str] = mapped_column(primary_key=True)
    """Id of the API key that the request was sent with."""
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    """SHA-256 of the parsed request."""
    status: Mapped[int | None] = mapped_column(SmallInteger)
    """HTTP status of the answer; null, as `body` is, only within the transaction that makes it."""
    body: Mapped[str | None]
    """The answer as it was sent, byte for byte."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), index=True)


class Replica(Base):
    """A replica that is up, or was: its supervisor refreshes the row with every heartbeat."""

    __tablename__ = "replicas"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Its name, `#`, and a part of this process alone; also the `lease_owner` of the jobs that it holds."""
    pool: Mapped[str] = mapped_column(String(32))
    layout: Mapped[str] = mapped_column(String(16))
    model: Mapped[str]
    device: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    """`starting`, `ready`, `busy`, `drained`, `stopping` or `stopped`."""
    epoch: Mapped[int]
    """Counts the rank groups that this supervisor has started."""
    job_id: Mapped[str | None]
    detail: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (Index("ix_replicas_last_seen", "last_seen"),)
