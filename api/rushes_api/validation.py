"""What a request would become, told without making a job."""

from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import BaseModel
from rushes_core.clip import FPS
from rushes_core.models import Job
from rushes_core.moment import unix_or_none
from rushes_core.request import ResolvedRequest
from rushes_core.served_model import ServedModel
from rushes_core.states import JobState
from rushes_core.video import PRIORITY_NAMES

from rushes_api.eta import Outlook


class Estimate(BaseModel):
    """What the job would take, as four of five do, if it were accepted now. Null where nobody knows."""

    run_seconds: float | None
    starts_at: int | None
    completes_at: int | None
    gpu_seconds: float | None
    """What would count against the key's `daily_gpu_seconds`."""


class VideoValidation(BaseModel):
    """A request that `POST /v1/videos` would accept, and what it would render."""

    object: Literal["video.validation"]
    model: str
    num_tokens: int
    max_tokens: int
    seconds: str
    size: str
    size_requested: str | None
    num_frames: int
    duration_seconds: float
    fps: int
    seed: int | None
    """Null: one would be drawn."""
    seed_policy: Literal["as_given", "drawn"]
    metadata: dict[str, str]
    priority: str
    not_before: int | None
    deadline: int | None
    expires_at: int | None
    output: dict[str, Any]
    estimate: Estimate


def draft_of(resolved: ResolvedRequest, model: ServedModel, *, project: str, now: datetime) -> Job:
    """The job that `resolved` would be, as far as it decides when it would run."""
    return Job(
        id="~",
        project=project,
        model=model.name,
        state=JobState.QUEUED,
        priority=resolved.priority,
        width=resolved.canvas.width,
        height=resolved.canvas.height,
        num_frames=resolved.clip.num_frames,
        run_at=resolved.not_before or now,
    )


def estimate_of(draft: Job, outlook: Outlook | None, num_ahead: int | None) -> Estimate:
    """What is foreseen of `draft`, before which so many jobs wait."""
    times = None if outlook is None else outlook.shapes.get((draft.width, draft.height, draft.num_frames))
    eta = None if outlook is None else outlook.eta(draft, num_ahead)
    gpus = None if outlook is None else outlook.gpus_per_replica
    return Estimate(
        run_seconds=None if times is None else round(times.run_seconds, 3),
        starts_at=None if eta is None else eta.starts_at,
        completes_at=None if eta is None else eta.completes_at,
        gpu_seconds=None if times is None or gpus is None else round(times.run_seconds * gpus, 3),
    )


def validation_of(
    resolved: ResolvedRequest, model: ServedModel, *, estimate: Estimate, now: datetime
) -> VideoValidation:
    retention = resolved.retention_seconds
    return VideoValidation(
        object="video.validation",
        model=model.name,
        num_tokens=resolved.num_tokens,
        max_tokens=model.max_prompt_tokens,
        seconds=resolved.seconds,
        size=resolved.canvas.size,
        size_requested=resolved.size_requested,
        num_frames=resolved.clip.num_frames,
        duration_seconds=round(resolved.clip.duration_seconds, 3),
        fps=FPS,
        seed=None if resolved.is_seed_drawn else resolved.seed,
        seed_policy="drawn" if resolved.is_seed_drawn else "as_given",
        metadata=resolved.metadata,
        priority=PRIORITY_NAMES[resolved.priority],
        not_before=unix_or_none(resolved.not_before),
        deadline=unix_or_none(resolved.deadline),
        expires_at=None if retention is None else int((now + timedelta(seconds=retention)).timestamp()),
        output=resolved.output,
        estimate=estimate,
    )
