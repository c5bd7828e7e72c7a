"""The Batch object: OpenAI's members exactly, and beside them what this service can say truthfully."""

import math
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from rushes_core.campaigns.forecast import Ends, Left
from rushes_core.campaigns.options import ENDPOINT, duration_text
from rushes_core.campaigns.output import error_members, line_of
from rushes_core.campaigns.statements import OPEN_STATES, Counts
from rushes_core.campaigns.tables import ACTIVE_STATES, Campaign, CampaignLineError
from rushes_core.listed import Listed
from rushes_core.models import Job
from rushes_core.moment import unix_or_none
from rushes_core.stored import content_url
from rushes_core.video import PRIORITY_NAMES, Status, removed_at

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
HoldReason = Literal["paused", "window", "not_before", "budget", "quota", "approval"]
ITEM_PREFIX = "item_"
"""What the id of an item begins with; its line follows."""
MAX_ITEM_DIGITS = 12


class BatchError(BaseModel):
    """What is wrong with the file as a whole."""

    code: str | None
    line: int | None
    message: str | None
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Items by how far they are. `failed` has the lines that could not become jobs, too."""

    total: int
    completed: int
    failed: int
    queued: int
    in_progress: int
    cancelled: int
    expired: int
    invalid: int
    """Of those that failed, the lines that could not become jobs."""


class CampaignEta(BaseModel):
    """When the last item is done, in Unix seconds: `completes_at` as half of such campaigns have it, and
    `completes_at_latest` as nine of ten. Null while nobody knows when it may go on."""

    completes_at: int | None
    completes_at_latest: int | None
    gpu_seconds: float | None
    """What is left to do takes."""
    basis: str
    """What it was made from."""
    fits_window: bool | None
    """Whether nine of ten are done before the window closes next; null: there is none."""


class BudgetUsed(BaseModel):
    gpu_seconds: float | None
    """Null: there is no limit."""
    used_gpu_seconds: float
    on_limit: Literal["complete_running", "cancel"]


class ProofState(BaseModel):
    count: int
    state: Literal["running", "awaiting_approval", "approved"]
    auto_continue_after: str | None
    done_at: int | None


class Loading(BaseModel):
    """How far the file is read."""

    lines: int
    bytes: int
    """Not compressed."""
    completed_at: int | None


class Batch(Listed):
    """One campaign. The members up to `metadata` are OpenAI's, the others are additions."""

    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str | None
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]

    name: str | None
    priority: str
    paused: bool
    pause_reason: Literal["request", "failures"] | None
    hold_reason: HoldReason | None
    progress: int
    eta: CampaignEta | None
    loading: Loading
    input_format: Literal["jsonl", "csv"] | None
    defaults: dict[str, Any]
    window: dict[str, Any] | None
    not_before: int | None
    budget: BudgetUsed
    proof: ProofState | None
    max_attempts: int | None
    max_parallel: int | None
    max_failures: int | None
    on_failure: Literal["pause", "cancel"]
    validation: Literal["lines", "strict"]
    dry_run: bool
    report: dict[str, Any] | None
    """What reading the file found."""
    retrying: bool
    """Whether ended items are still being queued again."""
    reopened_at: int | None
    webhook_url: str | None


_TIMES = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "not_before",
    "reopened_at",
)
_ENDS = {"completed_at": "completed", "expired_at": "expired", "cancelled_at": "cancelled", "failed_at": "failed"}
"""Times that are told only in their state: a campaign may have been reopened since."""


def batch_of(campaign: Campaign, counts: Counts, *, eta: CampaignEta | None = None) -> Batch:
    """How `campaign` looks to its client."""
    times: dict[str, datetime | None] = {name: getattr(campaign, name) for name in _TIMES}
    times |= {name: None for name, state in _ENDS.items() if campaign.state != state}
    return Batch(
        id=campaign.id,
        object="batch",
        endpoint=ENDPOINT,
        model=campaign.model,
        errors=_errors_of(campaign),
        input_file_id=campaign.input_file_id,
        completion_window=None if campaign.completion_seconds is None else duration_text(campaign.completion_seconds),
        status=campaign.state,  # type: ignore[arg-type]
        output_file_id=campaign.output_file_id,
        error_file_id=campaign.error_file_id,
        request_counts=RequestCounts(
            total=counts.total,
            completed=counts.completed,
            failed=counts.failed + counts.invalid,
            queued=counts.queued,
            in_progress=counts.in_progress,
            cancelled=counts.cancelled,
            expired=counts.expired,
            invalid=counts.invalid,
        ),
        metadata=campaign.metadata_,
        name=campaign.name,
        priority=PRIORITY_NAMES[campaign.priority],
        paused=campaign.paused_at is not None,
        pause_reason=campaign.pause_reason,  # type: ignore[arg-type]
        hold_reason=campaign.hold_reason if campaign.state in OPEN_STATES else None,  # type: ignore[arg-type]
        progress=progress_of(campaign, counts),
        eta=eta,
        loading=Loading(
            lines=campaign.loaded_lines, bytes=campaign.loaded_bytes, completed_at=unix_or_none(campaign.loaded_at)
        ),
        input_format=campaign.input_format,  # type: ignore[arg-type]
        defaults=campaign.defaults,
        window=campaign.window,
        budget=BudgetUsed(
            gpu_seconds=campaign.budget_gpu_seconds,
            used_gpu_seconds=round(counts.gpu_seconds, 3),
            on_limit=campaign.on_budget,  # type: ignore[arg-type]
        ),
        proof=_proof_of(campaign),
        max_attempts=campaign.max_attempts,
        max_parallel=campaign.max_parallel,
        max_failures=campaign.max_failures,
        on_failure=campaign.on_failure,  # type: ignore[arg-type]
        validation="strict" if campaign.strict else "lines",
        dry_run=campaign.dry_run,
        report=campaign.report,
        retrying=campaign.retry is not None,
        webhook_url=None if campaign.webhook is None else campaign.webhook["url"],
        **{name: unix_or_none(time) for name, time in times.items()},  # type: ignore[arg-type]
    )


def eta_of(left: Left, ends: Ends) -> CampaignEta | None:
    """A forecast as it is shown; None: there is none yet."""
    if left.basis is None:
        return None
    p50, p90 = (None if at is None else math.ceil(at.timestamp()) for at in (ends.p50, ends.p90))
    return CampaignEta(
        completes_at=p50,
        completes_at_latest=p90,
        gpu_seconds=left.gpu_seconds,
        basis=left.basis,
        fits_window=ends.fits_window,
    )


def progress_of(campaign: Campaign, counts: Counts) -> int:
    """Percent of the items that have ended, however they have; 100 only and always once the campaign has."""
    if campaign.state not in ACTIVE_STATES:
        return 100
    # while it is read, nobody knows of how many
    if campaign.loaded_at is None or not counts.total:
        return 0
    return min(99, 100 * counts.ended // counts.total)


def _errors_of(campaign: Campaign) -> BatchErrors | None:
    if campaign.errors is None:
        return None
    data: list[dict[str, Any]] = campaign.errors.get("data") or []
    names = ("code", "line", "message", "param")
    return BatchErrors(object="list", data=[BatchError(**{name: one.get(name) for name in names}) for one in data])


def _proof_of(campaign: Campaign) -> ProofState | None:
    if campaign.proof_count is None:
        return None
    after = campaign.proof_continue_seconds
    return ProofState(
        count=campaign.proof_count,
        state=campaign.proof_state or "running",  # type: ignore[arg-type]
        auto_continue_after=None if after is None else duration_text(after),
        done_at=unix_or_none(campaign.proof_done_at),
    )


class ItemError(BaseModel):
    """Why an item ended without a clip."""

    code: str
    message: str
    param: str | None
    line: int


class CampaignItem(Listed):
    """One line of a campaign's file."""

    object: Literal["campaign.item"]
    line: int
    """Physical line of the file, from 1."""
    custom_id: str | None
    status: Status
    video_id: str | None
    """Null: the line could not become a job."""
    progress: int
    attempt: int
    seconds: str | None
    size: str | None
    seed: int | None
    completed_at: int | None
    content_url: str | None
    error: ItemError | None


def item_of(item: Job | CampaignLineError, *, shown_status: Status | None = None) -> CampaignItem:
    """How an item looks to the client of its campaign.

    Args:
        shown_status: the status of a job, where it is shown in other words than its own.
    """
    line = line_of(item)
    error = error_members(item)
    told = None if error is None else ItemError(**{name: error[name] for name in ("code", "message", "param", "line")})
    common: dict[str, Any] = {
        "id": f"{ITEM_PREFIX}{line}",
        "object": "campaign.item",
        "line": line,
        "custom_id": item.custom_id,
        "error": told,
    }
    if isinstance(item, CampaignLineError):
        absent = ("video_id", "seconds", "size", "seed", "completed_at", "content_url")
        return CampaignItem(**common, **dict.fromkeys(absent), status="failed", progress=0, attempt=0)
    is_complete = item.state.value == "completed"
    return CampaignItem(
        **common,
        status=shown_status or item.state.public_status,  # type: ignore[arg-type]
        video_id=item.id,
        progress=item.progress,
        attempt=item.attempt,
        seconds=str(item.request.get("seconds", "")),
        size=f"{item.width}x{item.height}",
        seed=item.seed,
        completed_at=unix_or_none(item.finished_at) if is_complete else None,
        content_url=content_url(item) if is_complete and removed_at(item) is None else None,
    )


def line_of_id(item_id: str) -> int | None:
    """The line in an item's id; None for what is no such id."""
    digits = item_id.removeprefix(ITEM_PREFIX)
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_ITEM_DIGITS
    return int(digits) if item_id.startswith(ITEM_PREFIX) and is_number else None
