"""The tables: jobs and their history, who may ask for them, shares of the GPUs, and the replicas that run them."""

from datetime import date, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    Double,
    Enum,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rushes_core.states import LEASED_STATES, JobState


def _values(enum: type[JobState]) -> list[str]:
    return [member.value for member in enum]


def _sql_list(states: tuple[JobState, ...]) -> str:
    return ", ".join(f"'{state}'" for state in states)


RESULT_RETAINED = "state = 'completed' AND deleted_at IS NULL AND NOT (result ? 'deleted_at')"
"""Predicate of completed jobs whose clip retention has not removed."""

HAS_METADATA = "deleted_at IS NULL AND (request -> 'metadata') <> '{}'::jsonb"
"""Predicate of visible jobs with metadata."""


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
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        date: Date(),
        # a Python None is SQL NULL, not the JSON value null
        dict[str, Any]: JSONB(none_as_null=True),
    }


class Project(Base):
    """Whose jobs are fair to each other's and invisible to each other's keys."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(Double(), server_default=text("1"))
    """Its share of the GPUs beside those of other projects that have work."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (CheckConstraint("weight > 0", name="weight_is_positive"),)


class ApiKey(Base):
    """A key that clients send. The secret itself is not kept."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`key_` and a ULID: the same before and after a rotation."""
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), index=True)
    name: Mapped[str]
    hint: Mapped[str]
    """The last characters of the secret, for people to tell keys apart."""
    digest: Mapped[bytes] = mapped_column(unique=True)
    """SHA-256 of the secret, which is random enough to need no slower hash."""
    previous_digest: Mapped[bytes | None] = mapped_column(unique=True)
    """Of the secret before the last rotation, which goes on working until `previous_until`."""
    previous_until: Mapped[datetime | None]
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text()))
    priorities: Mapped[list[str]] = mapped_column(ARRAY(Text()))
    """Classes that its jobs may have."""
    compat: Mapped[str | None] = mapped_column(String(16))
    """`openai`: answers use OpenAI's four status words."""
    requests_per_minute: Mapped[int | None]
    max_queued: Mapped[int | None]
    max_running: Mapped[int | None]
    daily_gpu_seconds: Mapped[int | None]
    """Limits; null: none."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    """Written at most once a minute."""

    __table_args__ = (
        CheckConstraint("requests_per_minute > 0", name="requests_per_minute_is_positive"),
        CheckConstraint("max_queued >= 0", name="max_queued_is_not_negative"),
        CheckConstraint("max_running > 0", name="max_running_is_positive"),
        CheckConstraint("daily_gpu_seconds > 0", name="daily_gpu_seconds_is_positive"),
    )


class ApiKeyUsage(Base):
    """GPU time that the jobs of a key took in one day (UTC), added up by the trigger that ends an attempt."""

    __tablename__ = "api_key_usage"

    api_key: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    gpu_seconds: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """Seconds from start to end of each attempt, times the GPUs of its replica."""
    attempts: Mapped[int] = mapped_column(server_default=text("0"))

    # one page holds many versions of a row that every attempt updates
    __table_args__ = ({"postgresql_with": {"fillfactor": 20}},)


class Job(Base):
    """One clip that a client asked for. The row is the job: every other trace of it may be lost.

    Triggers refuse a row that is not sound as a violation of `ck_jobs_<name>`: `finished_at` in final states alone; a
    lease, its owner and a fence in leased states, a lease in no other; a result in `completed` alone, an error there
    never; `progress` 0..100, 100 in `completed` alone; `priority` 0..2; a `hold` in `queued` alone. No check
    does, because the server reads the text of one again for every statement that writes a row.
    """

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`video_` and a ULID, so that ids sort by creation."""
    project: Mapped[str]
    api_key: Mapped[str | None]
    """Id of the key that it was sent with, whose limits it counts against."""
    state: Mapped[JobState] = mapped_column(
        Enum(JobState, native_enum=False, length=16, values_callable=_values, name="state"),
        server_default=JobState.QUEUED,
    )
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    """0 interactive, 1 normal, 2 bulk."""
    hold: Mapped[str | None] = mapped_column(String(16))
    """Why a queued job may not be claimed yet: `concurrency`, its key has `max_running` jobs that may; `campaign`, its
    campaign has not opened it."""

    model: Mapped[str]
    prompt: Mapped[str]
    seed: Mapped[int]
    width: Mapped[int]
    height: Mapped[int]
    num_frames: Mapped[int]
    request: Mapped[dict[str, Any]]
    """What the client asked for in its own terms: `seconds`, `size`, `metadata`."""
    remixed_from: Mapped[str | None]
    """Id of the job that it was made from."""
    campaign_id: Mapped[str | None]
    line: Mapped[int | None]
    """Physical line of the campaign's file, from 1."""
    custom_id: Mapped[str | None]
    """The client's name for it, one of a kind in its campaign."""
    start_by: Mapped[datetime | None]
    """An attempt that has not started by then goes back to its campaign: it could not finish in time."""
    stop_at: Mapped[datetime | None]
    """An attempt that still runs then goes back to its campaign."""
    charged: Mapped[float | None] = mapped_column(Double())
    """What the last claim charged its project, on the shared clock."""

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
    webhook: Mapped[dict[str, Any] | None]
    """What became of telling the job's own `webhook_url`: `state`, `attempts`, `last_status`; null: it has none."""
    retain_until: Mapped[datetime | None]
    """When the clip is removed, where the client decided that; otherwise the deployment does."""
    cancel_requested_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """The row stays as a tombstone; it is invisible to clients."""
    purged_at: Mapped[datetime | None]
    """When the objects of a deleted job were removed from the store."""

    __table_args__ = (
        Index("ix_jobs_project_id", "project", "id", postgresql_where=text("deleted_at IS NULL")),
        Index("ix_jobs_project_state", "project", "state", "id", postgresql_where=text("deleted_at IS NULL")),
        Index(
            "ix_jobs_metadata",
            text("(request -> 'metadata')"),
            postgresql_using="gin",
            postgresql_where=text(HAS_METADATA),
        ),
        Index(
            "ix_jobs_claimable",
            "model",
            "priority",
            "project",
            "run_at",
            "id",
            postgresql_where=text("state = 'queued' AND hold IS NULL"),
        ),
        Index(
            "ix_jobs_queued_by_key",
            "api_key",
            "hold",
            "priority",
            "run_at",
            "id",
            postgresql_where=text("state = 'queued'"),
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
        Index(
            "ix_jobs_retain_until",
            "retain_until",
            postgresql_where=text(f"retain_until IS NOT NULL AND {RESULT_RETAINED}"),
        ),
        Index(
            "uq_jobs_campaign_line",
            "campaign_id",
            "line",
            unique=True,
            postgresql_where=text("campaign_id IS NOT NULL"),
        ),
        Index(
            "uq_jobs_campaign_custom_id",
            "campaign_id",
            "custom_id",
            unique=True,
            postgresql_where=text("campaign_id IS NOT NULL"),
        ),
        Index(
            "ix_jobs_campaign_state", "campaign_id", "state", "line", postgresql_where=text("campaign_id IS NOT NULL")
        ),
        Index(
            "ix_jobs_campaign_open",
            "campaign_id",
            "state",
            postgresql_where=text(
                f"campaign_id IS NOT NULL AND state IN ('queued', {_sql_list(LEASED_STATES)}) "
                "AND hold IS DISTINCT FROM 'campaign'"
            ),
        ),
        # a class of which all was claimed costs each claim a look at the entries that no vacuum has removed yet
        {
            "postgresql_with": {
                "fillfactor": 80,
                "autovacuum_vacuum_scale_factor": 0.01,
                "autovacuum_vacuum_insert_scale_factor": 0.05,
            }
        },
    )


class JobAttempt(Base):
    """One execution of a job, written by triggers on `jobs` alone, which also delete it with its job."""

    __tablename__ = "job_attempts"

    job_id: Mapped[str] = mapped_column(primary_key=True)
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
    """The history of a job's states, appended by triggers on `jobs` alone, which also delete it with its job."""

    __tablename__ = "job_events"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(index=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    old_state: Mapped[str | None] = mapped_column(String(16))
    new_state: Mapped[str] = mapped_column(String(16))
    generation: Mapped[int] = mapped_column(server_default=text("1"))
    attempt: Mapped[int]
    fence: Mapped[int | None]


class OutboxEvent(Base):
    """What happened to a job or a campaign, to be told outside: written in the transaction in which it happens.

    Every end of a generation of a job is here, a start or progress only where somebody wants to be told; jobs of a
    campaign only if it tells of them. What was deleted tells nothing. There is no foreign key: what happened stays true
    when the row is gone.
    """

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    event_id: Mapped[str] = mapped_column(unique=True)
    """`evt_`, the ULID of whom it tells and the generation: the same event has the same id however often it is sent."""
    job_id: Mapped[str]
    """Of the job, or of the campaign."""
    project: Mapped[str]
    generation: Mapped[int]
    """Of the job; the number of a campaign's event."""
    type: Mapped[str] = mapped_column(String(32))
    """One of `rushes_core.webhooks.events.EVENT_TYPES`."""
    data: Mapped[dict[str, Any] | None]
    """The job or campaign at that moment; of a job `status`, `attempt`, `progress`, `error` and `sequence`, which rises
    with each event."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        Index(
            "uq_outbox_end",
            "job_id",
            "generation",
            unique=True,
            postgresql_where=text("type NOT IN ('video.started', 'video.progress')"),
        ),
        Index("ix_outbox_project", "project", "created_at", "id"),
        Index("ix_outbox_job_id", "job_id", "created_at"),
    )


class ProjectShare(Base):
    """What a project has had of the GPUs, for the fair order of claims. Rows without queued jobs may be dropped."""

    __tablename__ = "project_shares"

    project: Mapped[str] = mapped_column(primary_key=True)
    virtual_time: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """Cost of the work that was claimed, on a clock that all projects share. 0 or less: it has no share yet, and begins
    where the others are."""
    last_start: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """`virtual_time` before the last claim. The largest of all projects is the latest at which another one begins."""

    # one page holds many versions of a row that every claim updates
    __table_args__ = ({"postgresql_with": {"fillfactor": 20}},)


class JobEnd(Base):
    """One end of a job, written by a trigger on `jobs` alone, until it is counted in `job_end_counts`."""

    __tablename__ = "job_ends"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    code: Mapped[str]
    """Of the error; empty for a job that was completed, or has none."""


class JobEndCount(Base):
    """How many ends of jobs were counted; never falls, whatever becomes of the jobs."""

    __tablename__ = "job_end_counts"

    state: Mapped[str] = mapped_column(String(16), primary_key=True)
    code: Mapped[str] = mapped_column(primary_key=True)
    num_jobs: Mapped[int]

    __table_args__ = ({"postgresql_with": {"fillfactor": 50}},)


class Beat(Base):
    """When a process of a kind that works without being asked did so last."""

    __tablename__ = "beats"

    process: Mapped[str] = mapped_column(String(16), primary_key=True)
    """One of `rushes_core.beats.PROCESSES`."""
    at: Mapped[datetime] = mapped_column(server_default=func.now())

    # written every few seconds
    __table_args__ = ({"postgresql_with": {"fillfactor": 20}},)


class QueuePause(Base):
    """A project whose jobs are not claimed until somebody resumes them; `*`: those of all projects."""

    __tablename__ = "queue_pauses"

    project: Mapped[str] = mapped_column(primary_key=True)
    paused_at: Mapped[datetime] = mapped_column(server_default=func.now())


class MeasuredTime(Base):
    """How long clips of one shape took lately, from the jobs that completed: written again every few seconds."""

    __tablename__ = "measured_times"

    model: Mapped[str] = mapped_column(primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True)
    height: Mapped[int] = mapped_column(primary_key=True)
    num_frames: Mapped[int] = mapped_column(primary_key=True)
    num_jobs: Mapped[int]
    run_p50: Mapped[float] = mapped_column(Double())
    run_p80: Mapped[float] = mapped_column(Double())
    """Seconds from start to completion."""
    run_p90: Mapped[float | None] = mapped_column(Double())
    """Null: not measured since there is the column."""
    phases: Mapped[dict[str, Any]]
    """Mean seconds per phase."""
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


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


class File(Base):
    """A file that a client uploaded. Its object lies in the store before there is a row."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`file_` and a ULID."""
    project: Mapped[str]
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str]
    bytes: Mapped[int]
    sha256: Mapped[str]
    """Hexadecimal."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]
    """When it was deleted, or the time at which it expired: a tombstone."""
    purged_at: Mapped[datetime | None]
    """When its object was removed from the store."""

    __table_args__ = (
        CheckConstraint("bytes > 0", name="bytes_is_positive"),
        Index("ix_files_visible", "project", "id", postgresql_where=text("deleted_at IS NULL")),
        Index(
            "ix_files_expires_at",
            "expires_at",
            postgresql_where=text("deleted_at IS NULL AND expires_at IS NOT NULL"),
        ),
        Index(
            "ix_files_unpurged",
            "deleted_at",
            postgresql_where=text("deleted_at IS NOT NULL AND purged_at IS NULL"),
        ),
    )


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
    """`starting`, `ready`, `busy`, `full` (its scratch disk), `drained`, `stopping` or `stopped`."""
    epoch: Mapped[int]
    """Counts the rank groups that this supervisor has started."""
    job_id: Mapped[str | None]
    drain_requested_at: Mapped[datetime | None]
    """Set by an operator: it finishes what it holds and takes no more until this is null again."""
    detail: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (Index("ix_replicas_last_seen", "last_seen"),)
