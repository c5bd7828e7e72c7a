"""A job as MiniMax's video API, version 2, shows tasks.

The contract: https://platform.minimax.io/docs/api-reference/video-generation-v2-query
"""

from datetime import datetime
from typing import Literal, cast

from pydantic import BaseModel
from rushes_core.canvas import BY_SIZE
from rushes_core.clip import FPS
from rushes_core.models import Job
from rushes_core.states import JobState
from rushes_core.video import error_of

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]

STATES: dict[str, tuple[JobState, ...]] = {
    "queued": (JobState.QUEUED,),
    "running": (JobState.CLAIMED, JobState.RUNNING),
    "succeeded": (JobState.COMPLETED,),
    "failed": (JobState.FAILED, JobState.EXPIRED),
    "cancelled": (JobState.CANCELLED,),
}
"""The states that are shown as each `Status`."""
LISTED_STATES: dict[str, tuple[JobState, ...]] = {**STATES, "expired": (JobState.EXPIRED,)}
"""The states that each `filter.status` finds: MiniMax has one more than tasks show here."""
_STATUS: dict[JobState, Status] = {
    state: cast("Status", status) for status, states in STATES.items() for state in states
}

MAX_PAGE_NUMBER = 10_000
MAX_PAGE_SIZE = 100
DEFAULT_PAGE_SIZE = 20
GENERATION = "generation"
TASK_TYPES = (GENERATION, "h3_context_ir", "regeneration")
"""MiniMax's kinds of task, of which only the first is served."""


class TaskError(BaseModel):
    """Why a task failed."""

    code: str
    message: str


class TaskContent(BaseModel):
    """Where the clip lies, for a while, for whoever has the URL."""

    url: str


class TaskUsage(BaseModel):
    """Seconds of video that went in and came out."""

    total_seconds: int
    input_seconds: int
    output_seconds: int
    input_image_count: int


class Task(BaseModel):
    """One job. `content` and `usage` are there once it has succeeded, `error` once it has failed."""

    id: str
    model: str
    status: Status
    error: TaskError | None = None
    created_at: int
    updated_at: int
    content: TaskContent | None = None
    resolution: str
    duration: int
    usage: TaskUsage | None = None
    ratio: str
    task_type: Literal["generation"] = GENERATION
    modality: Literal["video"] = "video"


class TaskAnswer(BaseModel):
    """The answer to a query."""

    task: Task


class TaskList(BaseModel):
    """One page of tasks, newest first, and how many there are on all pages."""

    items: list[Task]
    total: int


class TaskCreated(BaseModel):
    task_id: str


class TaskDeleted(BaseModel):
    """What became of a task that was not wanted any more."""

    task_id: str
    action: Literal["cancelled", "deleted"]
    status: Literal["cancelled", "deleted"]


def task_of(job: Job, *, url: str | None) -> Task:
    """How `job` looks.

    Args:
        url: where its clip can be fetched; None while it has none, or not any more.
    """
    status, canvas = _STATUS[job.state], BY_SIZE.get(f"{job.width}x{job.height}")
    # as it was asked for: clips are rounded up, a good half second at most
    seconds = round(float(job.request.get("seconds") or job.num_frames / FPS))
    error = error_of(job.error) if status == "failed" else None
    succeeded = status == "succeeded"
    return Task(
        id=job.id,
        model=model_of(job),
        status=status,
        error=None if error is None else TaskError(code=error.code, message=error.message),
        created_at=_unix(job.created_at),
        updated_at=_unix(job.finished_at or job.started_at or job.created_at),
        content=None if url is None else TaskContent(url=url),
        resolution="" if canvas is None else f"{canvas.short_edge}P",
        duration=seconds,
        usage=TaskUsage(total_seconds=seconds, input_seconds=0, output_seconds=seconds, input_image_count=0)
        if succeeded
        else None,
        ratio="" if canvas is None else canvas.aspect_ratio,
    )


def model_of(job: Job) -> str:
    """The model as its client called it."""
    return str(job.request.get("model_requested") or job.model)


def _unix(moment: datetime) -> int:
    return int(moment.timestamp())
