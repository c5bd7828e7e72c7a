"""The tables of campaigns: what was asked for, how far it is, and the lines that could not become jobs."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Double, ForeignKey, Index, SmallInteger, String, func, text
from sqlalchemy.orm import Mapped, mapped_column

from rushes_core.models import Base

STATES = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
"""OpenAI's words for a batch."""
ACTIVE_STATES = ("validating", "in_progress", "finalizing", "cancelling")
"""Those in which somebody still has to do something."""
BUDGET = "budget"
"""As `hold_reason`: the budget is too small for one more clip. Of a campaign that is being cancelled: that is why."""
FAILURES = "failures"
"""As `hold_reason` of a campaign that is being cancelled: too many of its jobs failed."""
CANCEL_ERROR = (
    f"CASE WHEN campaigns.state = 'cancelling' AND campaigns.hold_reason IN ('{BUDGET}', '{FAILURES}') "
    "THEN (campaigns.errors -> 'data' -> 0) - ARRAY['param', 'line'] END"
)
"""SQL for the error that jobs get of a campaign that was cancelled by one of its limits; null: by somebody."""
NUM_SHARDS = 8
"""Rows that the numbers of a campaign are spread over."""


def _sql_list(states: tuple[str, ...]) -> str:
    return ", ".join(f"'{state}'" for state in states)


class Campaign(Base):
    """A file of requests and what is done with it. OpenAI calls it a batch."""

    __tablename__ = "campaigns"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`batch_` and a ULID."""
    project: Mapped[str]
    api_key: Mapped[str | None]
    """Id of the key that it was sent with, whose limits its jobs count against."""
    name: Mapped[str | None]
    state: Mapped[str] = mapped_column(String(16), server_default=text("'validating'"))
    hold_reason: Mapped[str | None] = mapped_column(String(16))
    """Why none of its jobs is opened now: `paused`, `window`, `not_before`, `budget`, `quota`, `approval`; null: they
    are."""
    model: Mapped[str]
    input_file_id: Mapped[str]
    owns_input: Mapped[bool] = mapped_column(server_default=text("false"))
    """The file came in the request that made it, and goes with it."""
    input_format: Mapped[str | None] = mapped_column(String(8))
    """`jsonl` or `csv`; null: the file's name and beginning tell."""
    defaults: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """Members that every line has unless it says otherwise."""
    # Base has an attribute of that name
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata", server_default=text("'{}'::jsonb"))
    dry_run: Mapped[bool] = mapped_column(server_default=text("false"))
    """Its file is read and reported on, and nothing becomes a job."""
    strict: Mapped[bool] = mapped_column(server_default=text("false"))
    """One bad line fails it as a whole."""
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("2"))
    """Class of its jobs, as `Job.priority`."""
    overrides_priority: Mapped[bool] = mapped_column(server_default=text("false"))
    """It was changed since: jobs that are opened from then on have it, whatever their lines said."""
    max_attempts: Mapped[int | None]
    max_parallel: Mapped[int | None]
    """Most of its jobs that run or may be claimed at once."""
    max_failures: Mapped[int | None]
    """Failed jobs after which `on_failure` is done."""
    on_failure: Mapped[str] = mapped_column(String(16), server_default=text("'pause'"))
    """`pause` or `cancel`."""
    failures_excused: Mapped[int] = mapped_column(server_default=text("0"))
    """Failed jobs for which `on_failure` was done already: they do not count any more."""
    budget_gpu_seconds: Mapped[float | None] = mapped_column(Double())
    on_budget: Mapped[str] = mapped_column(String(16), server_default=text("'complete_running'"))
    """When the budget is used up: `complete_running` holds what is left, `cancel` cancels it."""
    window: Mapped[dict[str, Any] | None]
    """When its jobs may run: `timezone`, `days`, `start`, `end`, `on_close`."""
    not_before: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    """What has not started by then expires."""
    completion_seconds: Mapped[int | None]
    """`completion_window` as it was asked for."""
    proof_count: Mapped[int | None]
    """Its first jobs that are run before the others wait for approval; null: no proof."""
    proof_continue_seconds: Mapped[int | None]
    """How long after the proof is done it goes on by itself; null: never."""
    proof_state: Mapped[str | None] = mapped_column(String(24))
    """`running`, `awaiting_approval` or `approved`."""
    proof_done_at: Mapped[datetime | None]
    paused_at: Mapped[datetime | None]
    pause_reason: Mapped[str | None] = mapped_column(String(16))
    """`request` or `failures`."""
    webhook: Mapped[dict[str, Any] | None]
    """Who is told of it: `url`, `origin`, `endpoint`, `events`, as `webhook` in a job's `request`."""
    tell_items: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether endpoints are told of its single jobs, too; those types that `webhook` names are told in any case."""
    errors: Mapped[dict[str, Any] | None]
    """Why it failed as a whole: `data`, a list of `code`, `message`, `param` and `line`."""
    report: Mapped[dict[str, Any] | None]
    """What reading its file found: numbers of lines, frames and GPU seconds, and the first bad lines."""
    num_lines: Mapped[int | None]
    """Physical lines of its file; null: nobody has counted them yet."""
    loaded_bytes: Mapped[int] = mapped_column(server_default=text("0"))
    """Of its file, not compressed, up to the line where the next chunk begins."""
    loaded_lines: Mapped[int] = mapped_column(server_default=text("0"))
    """Physical lines up to there."""
    loaded_at: Mapped[datetime | None]
    """When its last line was loaded, or it was clear that the others will not be."""
    load_failures: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """How often in a row the next lines could not be loaded, by a fault of this service."""
    store_failed_at: Mapped[datetime | None]
    """When the store first did not give its file; null: it has given more of it since, or never failed."""
    lease_owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    fence: Mapped[int] = mapped_column(server_default=text("0"))
    """Of the process that loads, closes or finishes it now."""
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    output_seconds: Mapped[int | None]
    """How long these two are kept; null: until somebody deletes them."""
    retry: Mapped[dict[str, Any] | None]
    """Which of its ended jobs are still to be queued again: `codes`, `include_cancelled`, `new_seeds`, `before`, in
    Unix seconds: what ended later is not meant; and `reached`, the line up to which they are."""
    num_events: Mapped[int] = mapped_column(server_default=text("0"))
    """Events about it so far: each gets the next number."""
    told_progress: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """Percent in the last progress event."""
    told_progress_at: Mapped[datetime | None]

    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    reopened_at: Mapped[datetime | None]
    """When a job was last retried after the campaign had ended."""
    deleted_at: Mapped[datetime | None]
    purged_at: Mapped[datetime | None]
    """When the last of the jobs of a deleted campaign was deleted."""

    __table_args__ = (
        CheckConstraint(f"state IN ({_sql_list(STATES)})", name="state"),
        CheckConstraint("priority BETWEEN 0 AND 2", name="priority_is_a_class"),
        Index("ix_campaigns_project", "project", "id", postgresql_where=text("deleted_at IS NULL")),
        Index("ix_campaigns_active", "state", "id", postgresql_where=text(f"state IN ({_sql_list(ACTIVE_STATES)})")),
        Index("ix_campaigns_unpurged", "id", postgresql_where=text("deleted_at IS NOT NULL AND purged_at IS NULL")),
        Index("ix_campaigns_retry", "id", postgresql_where=text("retry IS NOT NULL")),
    )


class CampaignCount(Base):
    """The jobs of a campaign by state, changed by the triggers that move them: the sum of `NUM_SHARDS` rows, which it
    has from its beginning."""

    __tablename__ = "campaign_counts"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True)
    shard: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    queued: Mapped[int] = mapped_column(server_default=text("0"))
    in_progress: Mapped[int] = mapped_column(server_default=text("0"))
    """Claimed or running."""
    completed: Mapped[int] = mapped_column(server_default=text("0"))
    failed: Mapped[int] = mapped_column(server_default=text("0"))
    cancelled: Mapped[int] = mapped_column(server_default=text("0"))
    expired: Mapped[int] = mapped_column(server_default=text("0"))
    invalid: Mapped[int] = mapped_column(server_default=text("0"))
    """Lines that could not become jobs."""
    remaining_cost: Mapped[int] = mapped_column(server_default=text("0"))
    """Frames times pixels / 10,000 of the jobs that are not final."""
    gpu_seconds: Mapped[float] = mapped_column(Double(), server_default=text("0"))
    """Seconds from start to end of every attempt, times the GPUs of its replica."""

    # one page holds many versions of a row that every transition updates
    __table_args__ = ({"postgresql_with": {"fillfactor": 20}},)


class CampaignLineError(Base):
    """A line that could not become a job: an item that has failed."""

    __tablename__ = "campaign_line_errors"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True)
    """Physical line of the file, from 1."""
    custom_id: Mapped[str | None]
    code: Mapped[str]
    param: Mapped[str | None]
    message: Mapped[str]


class CampaignForecast(Base):
    """How fast a campaign goes and when it will be done, written every few seconds while it goes on; of a completed
    one, what was foreseen of it."""

    __tablename__ = "campaign_forecasts"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True)
    made_at: Mapped[datetime]
    num_ended: Mapped[int]
    """Jobs that had ended then."""
    num_dropped: Mapped[int]
    """Of those, cancelled and expired ones."""
    work_left: Mapped[float] = mapped_column(Double())
    """Frames times pixels / 10,000 of the others, less what running ones had done."""
    may_run: Mapped[bool]
    """Whether nothing held it."""
    pace: Mapped[dict[str, Any] | None]
    """The members of `pace.Pace`; null: nobody would have run it yet."""
    gpu_seconds: Mapped[float | None] = mapped_column(Double())
    """What was left took; like the next three null where nothing could be said."""
    seconds_p50: Mapped[float | None] = mapped_column(Double())
    """In which it may run, from `made_at` to its end, as half of such campaigns need."""
    seconds_p90: Mapped[float | None] = mapped_column(Double())
    """As nine of ten need."""
    basis: Mapped[str | None]
    told: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    """When it was to be done, as was first foreseen with so many percent done: `at`, `p50` and `p90` in Unix seconds.
    No such forecast is kept of a campaign that was held after it."""
    ended_at: Mapped[datetime | None]
    """When it completed."""

    __table_args__ = (
        Index("ix_campaign_forecasts_ended_at", "ended_at"),
        {"postgresql_with": {"fillfactor": 20}},
    )
