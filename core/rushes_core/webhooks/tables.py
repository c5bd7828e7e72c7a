"""The tables of webhooks: who is told, of what, and how each attempt went."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, SmallInteger, String, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from rushes_core.models import Base


class WebhookEndpoint(Base):
    """Who is told: an endpoint that a client registered, or an origin that `webhook_url`s of a project point at.

    Concurrency and failures are counted by endpoint, so that one that is slow or dead delays nobody else.
    """

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`whe_` and a ULID, or `who_` and a digest of project and origin."""
    project: Mapped[str]
    origin: Mapped[str | None]
    """Scheme, host and port of `webhook_url`s; null for one that was registered."""
    name: Mapped[str] = mapped_column(server_default=text("''"))
    url: Mapped[str | None]
    event_types: Mapped[list[str]] = mapped_column(ARRAY(Text()), server_default=text("'{}'::text[]"))
    secret: Mapped[bytes | None]
    """Encrypted. Null for an origin: its deliveries are signed with the project's secret."""
    secret_hint: Mapped[str | None]
    previous_secret: Mapped[bytes | None]
    """Of before the last rotation; signs beside the other until `previous_until`."""
    previous_until: Mapped[datetime | None]
    state: Mapped[str] = mapped_column(String(16), server_default=text("'enabled'"))
    """`enabled` or `disabled`."""
    disabled_reason: Mapped[str | None] = mapped_column(String(32))
    """`gone`, `failing` or `request`."""
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    """Attempts that failed since the last that succeeded."""
    failing_since: Mapped[datetime | None]
    """When so many had failed in a row that pauses began."""
    open_until: Mapped[datetime | None]
    """Nothing is sent before this time; after many failures it is one delivery at a time until one succeeds."""
    held_until: Mapped[datetime | None]
    """When it asked to be sent something again; `open_until` is not before that."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('enabled', 'disabled')", name="state"),
        CheckConstraint("(origin IS NULL) = (url IS NOT NULL AND secret IS NOT NULL)", name="registered_or_origin"),
        CheckConstraint("(previous_secret IS NULL) = (previous_until IS NULL)", name="previous_secret_ends"),
        Index(
            "ix_webhook_endpoints_registered",
            "project",
            "id",
            postgresql_where=text("deleted_at IS NULL AND origin IS NULL"),
        ),
        {"postgresql_with": {"fillfactor": 50}},
    )


class WebhookSecret(Base):
    """What the deliveries to `webhook_url`s of a project are signed with, encrypted."""

    __tablename__ = "webhook_secrets"

    project: Mapped[str] = mapped_column(primary_key=True)
    secret: Mapped[bytes]
    hint: Mapped[str]
    previous_secret: Mapped[bytes | None]
    previous_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("(previous_secret IS NULL) = (previous_until IS NULL)", name="previous_secret_ends"),
    )


class WebhookDelivery(Base):
    """One event that is to be told to one endpoint. The row is the truth, as a job's is of a job."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`whd_`, milliseconds since the epoch and random digits, so that ids sort by creation."""
    project: Mapped[str]
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id"))
    kind: Mapped[str] = mapped_column(String(16), server_default=text("'event'"))
    """`event`, `redelivery`, `replay` or `test`."""
    event_id: Mapped[str]
    """Sent as `webhook-id`: the same in every attempt and every redelivery of the event."""
    job_id: Mapped[str | None]
    """Of the job, or of the campaign, that it tells of; null: a test."""
    type: Mapped[str] = mapped_column(String(32))
    sequence: Mapped[int] = mapped_column(server_default=text("0"))
    url: Mapped[str | None]
    """The `webhook_url` of the job or campaign; null: the endpoint's own."""

    state: Mapped[str] = mapped_column(String(16), server_default=text("'pending'"))
    """`pending`, `delivering`, `delivered`, `failed` or `cancelled`."""
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    step: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """Place in the schedule; an answer that says when to come back does not move it."""
    next_at: Mapped[datetime] = mapped_column(server_default=func.now())
    fence: Mapped[int | None]
    """Rises with every claim of any delivery: what a sender with an older one reports matches no row."""
    lease_until: Mapped[datetime | None]
    last_status: Mapped[int | None] = mapped_column(SmallInteger)
    last_error: Mapped[str | None] = mapped_column(String(32))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('pending', 'delivering', 'delivered', 'failed', 'cancelled')", name="state"),
        CheckConstraint(
            "(state = 'delivering') = (lease_until IS NOT NULL)",
            name="lease_iff_delivering",
        ),
        CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('delivered', 'failed', 'cancelled'))", name="finished_at_iff_final"
        ),
        Index(
            "ix_webhook_deliveries_pending",
            "endpoint_id",
            "next_at",
            "id",
            postgresql_where=text("state = 'pending'"),
        ),
        Index(
            "ix_webhook_deliveries_leased", "lease_until", "endpoint_id", postgresql_where=text("state = 'delivering'")
        ),
        Index("ix_webhook_deliveries_tests", "id", postgresql_where=text("state = 'pending' AND kind = 'test'")),
        Index("ix_webhook_deliveries_project", "project", "id"),
        # few beside those that were delivered, and few or none in some states
        Index(
            "ix_webhook_deliveries_project_state",
            "project",
            "state",
            "id",
            postgresql_where=text("state IN ('pending', 'delivering', 'failed', 'cancelled')"),
        ),
        Index("ix_webhook_deliveries_job_id", "job_id", "endpoint_id"),
        Index("ix_webhook_deliveries_endpoint_id", "endpoint_id", "event_id"),
        Index("ix_webhook_deliveries_finished_at", "finished_at"),
        {"postgresql_with": {"fillfactor": 70}},
    )


class WebhookAttempt(Base):
    """One request that was made, or was to be made, for a delivery."""

    __tablename__ = "webhook_attempts"

    delivery_id: Mapped[str] = mapped_column(ForeignKey("webhook_deliveries.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    status: Mapped[int | None] = mapped_column(SmallInteger)
    error: Mapped[str | None] = mapped_column(String(32))
    """Null for a success."""
    duration_ms: Mapped[int | None]
    url: Mapped[str | None]
    """Where it went, without the query. Null where nobody knows any more."""
    excerpt: Mapped[str | None]
    """The beginning of the answer's body, at most 1 KB, without control characters."""
