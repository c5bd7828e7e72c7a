"""What a request would become, told without making a job."""

from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import BaseModel
from rushes_core.clip import FPS
from rushes_core.request import ResolvedRequest
from rushes_core.served_model import ServedModel

from rushes_api.video import PRIORITY_NAMES, unix_or_none


class Estimate(BaseModel):
    """What the job would take, if it were accepted now. Null where nothing was measured yet."""

    run_seconds: float | None
    starts_at: int | None
    completes_at: int | None
    gpu_seconds: float | None


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


def validation_of(resolved: ResolvedRequest, model: ServedModel, *, now: datetime) -> VideoValidation:
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
        estimate=Estimate(run_seconds=None, starts_at=None, completes_at=None, gpu_seconds=None),
    )
