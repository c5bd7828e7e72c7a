"""The Video object: OpenAI's members exactly, and beside them what this service can say truthfully."""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pydantic import BaseModel

from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS, Clip
from rushes_core.fields import PRIORITIES
from rushes_core.holds import CAMPAIGN, CONCURRENCY
from rushes_core.listed import Listed
from rushes_core.models import Job
from rushes_core.moment import unix_or_none
from rushes_core.redact import without_places
from rushes_core.served_model import ServedModel
from rushes_core.states import JobState, Phase
from rushes_core.stored import OutputVariant, content_url, variants_of
from rushes_core.webhooks.events import FINAL_TYPES

CONTENT_TYPE = "video/mp4"
PRIORITY_NAMES = {value: name for name, value in PRIORITIES.items()}

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]


QueueReason = Literal[
    "not_before", "paused", "concurrency", "drained", "retrying", "window", "budget", "quota", "approval"
]
"""The last four, and `paused` and `not_before` too, may be said of the job's campaign."""


class VideoError(BaseModel):
    """Why a job ended without a clip, and in which phase if it ran."""

    code: str
    message: str
    stage: str | None
    retryable: bool
    """Whether it may end otherwise when it is retried."""


class ProgressDetail(BaseModel):
    """Denoise steps of the current or last attempt, and in words what is being done."""

    completed_steps: int
    total_steps: int | None
    message: str | None


class Queue(BaseModel):
    """Where a waiting job stands. Lists leave the numbers out."""

    position: int | None
    ahead: int | None
    reason: QueueReason | None


class Eta(BaseModel):
    """Times by which four of five such jobs have started and completed, in Unix seconds; never in the past."""

    starts_at: int | None
    """Null once it has started."""
    completes_at: int | None
    """Null while no clip of this size and length has been measured."""
    confidence: Literal["p80"]


class WebhookState(BaseModel):
    """How telling the job's own `webhook_url` of its end fares."""

    state: Literal["none", "pending", "delivered", "failed"]
    attempts: int
    last_status: int | None


class Timing(BaseModel):
    """Seconds that the job waited and that its last attempt ran, once they are known."""

    queued_s: float | None
    run_s: float | None
    phases: dict[str, float]


class OutputWarning(BaseModel):
    """What is not as it could be with a clip that is stored all the same."""

    code: str
    message: str


class Output(BaseModel):
    """The clip: what it will be, and once it is stored also its size and checksum."""

    num_frames: int
    duration_seconds: float
    fps: int
    has_audio: bool
    audio_sample_rate: int
    bytes: int | None
    sha256: str | None
    content_type: str
    content_url: str
    variants: list[OutputVariant]
    """What can be fetched now."""
    warnings: list[OutputWarning]
    deleted_at: int | None


class Video(Listed):
    """One job. The members up to `error` are OpenAI's, the others are additions."""

    object: Literal["video"]
    created_at: int
    completed_at: int | None
    expires_at: int | None
    status: Status
    progress: int
    model: str
    prompt: str
    seconds: str
    size: str
    remixed_from_video_id: str | None
    error: VideoError | None

    size_requested: str | None
    phase: str | None
    seed: int
    metadata: dict[str, str]
    priority: str
    progress_detail: ProgressDetail
    queue: Queue
    eta: Eta | None
    timing: Timing
    generation: int
    attempt: int
    max_attempts: int
    not_before: int | None
    deadline: int | None
    cancel_requested_at: int | None
    output: Output
    batch_id: str | None
    campaign_id: str | None
    custom_id: str | None
    webhook: WebhookState


def video_of(
    job: Job,
    model: ServedModel,
    *,
    retention_days: int = 0,
    num_ahead: int | None = None,
    eta: Eta | None = None,
    is_paused: bool = False,
    is_drained: bool = False,
    campaign_reason: QueueReason | None = None,
    only_openais_words: bool = False,
) -> Video:
    """How `job` looks to its client.

    Args:
        retention_days: how long clips are kept whose client did not say; 0: for ever.
        num_ahead: jobs before it in the queue, where somebody counted them.
        is_paused: the queue is, for its project.
        is_drained: every replica is, by an operator or by itself.
        campaign_reason: why its campaign opens no jobs now; None: it does, in their turn.
        only_openais_words: `status` is one of OpenAI's four.
    """
    state = job.state
    request = job.request
    requested, not_before = request.get("size_requested"), request.get("not_before")
    completed_at = job.finished_at if state is JobState.COMPLETED else None
    expires_at = job.retain_until
    if expires_at is None and completed_at and retention_days:
        expires_at = completed_at + timedelta(days=retention_days)
    status = _STATUS[state]
    return Video(
        id=job.id,
        object="video",
        created_at=int(job.created_at.timestamp()),
        completed_at=unix_or_none(completed_at),
        expires_at=unix_or_none(expires_at),
        status="failed" if only_openais_words and status in _BEYOND_OPENAI else status,
        progress=job.progress,
        model=job.model,
        prompt=job.prompt,
        seconds=str(request.get("seconds", "")),
        size=f"{job.width}x{job.height}",
        remixed_from_video_id=job.remixed_from,
        error=error_of(job.error) if state.is_final else None,
        size_requested=None if requested is None else str(requested),
        phase=job.phase if state is JobState.RUNNING else None,
        seed=job.seed,
        metadata=_metadata_of(request),
        priority=PRIORITY_NAMES.get(job.priority, str(job.priority)),
        progress_detail=_progress_of(job, model),
        queue=_queue_of(job, num_ahead, campaign_reason, is_paused=is_paused, is_drained=is_drained),
        eta=eta,
        timing=_timing_of(job, state),
        generation=job.generation,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        not_before=int(not_before) if isinstance(not_before, (int, float)) else None,
        deadline=unix_or_none(job.deadline_at),
        cancel_requested_at=unix_or_none(job.cancel_requested_at),
        output=_output_of(job),
        batch_id=job.campaign_id,
        campaign_id=job.campaign_id,
        custom_id=job.custom_id,
        webhook=_webhook_of(job),
    )


def _webhook_of(job: Job) -> WebhookState:
    """What is known of it, as long as some end of the job is to be told."""
    hook: dict[str, Any] = job.request.get("webhook") or {}
    wanted: list[str] = hook.get("events") or []
    possible = (f"video.{job.state}",) if job.state.is_final else FINAL_TYPES
    if job.webhook is None or not any(one in wanted for one in possible):
        return WebhookState(state="none", attempts=0, last_status=None)
    return WebhookState(**job.webhook)


def is_held(job: Job) -> bool:
    """Whether `job` waits for a time that its client set."""
    return job.state is JobState.QUEUED and job.error is None and job.run_at > datetime.now(UTC)


_STATUS: dict[JobState, Status] = {
    JobState.QUEUED: "queued",
    JobState.CLAIMED: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
}


_BEYOND_OPENAI = ("cancelled", "expired")

RETRYABLE_ERRORS: dict[str, bool] = {
    "generation_failed": True,
    "worker_lost": True,
    "worker_crash": False,
    "out_of_memory": False,
    "invalid_output": True,
    "not_finite": True,
    "media_failed": True,
    "media_process_lost": True,
    "storage_error": True,
    "invalid_request": False,
    "cancelled_by_user": True,
    "budget_reached": True,
    "max_failures_reached": True,
    "deadline_exceeded": True,
    "batch_expired": True,
}
"""Every code that an ended job may have, and whether it may end otherwise when it is retried."""


def error_of(error: dict[str, Any] | None) -> VideoError | None:
    """An error as it is stored, without the hosts and paths that its message may name."""
    if error is None:
        return None
    code, stage = str(error.get("code", "generation_failed")), error.get("stage")
    return VideoError(
        code=code,
        message=without_places(str(error.get("message", ""))),
        stage=None if stage is None else str(stage),
        retryable=RETRYABLE_ERRORS.get(code, True),
    )


def _progress_of(job: Job, model: ServedModel) -> ProgressDetail:
    total = model.contract.num_forwards if job.model == model.name else None
    message = None
    if job.state is JobState.RUNNING and job.phase is not None:
        steps = f", {job.completed_steps} of {total} steps done" if job.phase == Phase.DENOISING and total else ""
        message = f"{job.phase.capitalize()}{steps}"
    return ProgressDetail(completed_steps=job.completed_steps, total_steps=total, message=message)


def _queue_of(
    job: Job, num_ahead: int | None, campaign_reason: QueueReason | None, *, is_paused: bool, is_drained: bool
) -> Queue:
    if job.hold == CAMPAIGN:
        return Queue(position=None, ahead=None, reason="paused" if is_paused else campaign_reason or _reason_of(job))
    if is_held(job):
        return Queue(position=None, ahead=None, reason="not_before")
    if job.state is not JobState.QUEUED:
        return Queue(position=None, ahead=None, reason=None)
    reason: QueueReason | None = _reason_of(job)
    if is_paused:
        reason = "paused"
    elif is_drained and reason != "concurrency":
        reason = "drained"
    return Queue(position=None if num_ahead is None else num_ahead + 1, ahead=num_ahead, reason=reason)


def _reason_of(job: Job) -> Literal["concurrency", "retrying"] | None:
    if job.hold == CONCURRENCY:
        return "concurrency"
    return None if job.error is None else "retrying"


def _metadata_of(request: dict[str, Any]) -> dict[str, str]:
    metadata: dict[str, Any] = request.get("metadata") or {}
    return {str(key): str(value) for key, value in metadata.items()}


def _timing_of(job: Job, state: JobState) -> Timing:
    started, finished = job.started_at, job.finished_at
    waits_again = state in (JobState.QUEUED, JobState.CLAIMED)
    # when a retried job was queued again is not kept; a job that was cancelled may have waited again by then
    is_first = job.generation == 1
    ran_to_its_end = state in (JobState.COMPLETED, JobState.FAILED)
    return Timing(
        queued_s=_seconds(job.created_at, started) if started and is_first and not waits_again else None,
        run_s=_seconds(started, finished) if started and finished and ran_to_its_end else None,
        phases={str(name): float(seconds) for name, seconds in job.timings.items()},
    )


def _seconds(start: datetime, end: datetime) -> float:
    return round(max(0.0, (end - start).total_seconds()), 3)


def _output_of(job: Job) -> Output:
    result = job.result or {}
    seconds = float(result.get("duration_seconds", Clip(job.num_frames).duration_seconds))
    return Output(
        num_frames=int(result.get("num_frames", job.num_frames)),
        duration_seconds=round(seconds, 3),
        fps=FPS,
        has_audio=bool(result.get("has_audio", True)),
        audio_sample_rate=int(result.get("audio_sample_rate", AUDIO_SAMPLE_RATE)),
        bytes=result.get("bytes"),
        sha256=result.get("sha256"),
        content_type=CONTENT_TYPE,
        content_url=content_url(job),
        variants=variants_of(job),
        warnings=[OutputWarning(code=one["code"], message=one["message"]) for one in result.get("warnings") or ()],
        deleted_at=removed_at(job),
    )


def removed_at(job: Job) -> int | None:
    """When the clip of a completed job was removed from the store, in Unix seconds."""
    text = (job.result or {}).get("deleted_at")
    return None if text is None else int(datetime.fromisoformat(text).timestamp())
