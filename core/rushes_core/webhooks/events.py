"""What is told: the types of events, and the body of each, the same bytes in every attempt."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from rushes_core.fields import some_of, some_of_schema
from rushes_core.redact import without_places

STARTED = "video.started"
PROGRESS = "video.progress"
FINAL_TYPES = ("video.completed", "video.failed", "video.cancelled", "video.expired")
VIDEO_TYPES = (*FINAL_TYPES, STARTED, PROGRESS)
DEFAULT_TYPES: tuple[str, ...] = FINAL_TYPES
"""What a job's `webhook_url` is told unless the client says otherwise."""
BATCH_PROGRESS = "batch.progress"
BATCH_FINAL_TYPES = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
BATCH_TYPES = (
    *BATCH_FINAL_TYPES,
    BATCH_PROGRESS,
    "batch.paused",
    "batch.awaiting_approval",
    "batch.budget_reached",
)
DEFAULT_BATCH_TYPES: tuple[str, ...] = BATCH_FINAL_TYPES
"""What a campaign's `webhook_url` is told unless the client says otherwise."""
EVENT_TYPES = (*VIDEO_TYPES, *BATCH_TYPES)
END_TYPES = (*FINAL_TYPES, *BATCH_FINAL_TYPES)
"""Whoever was told one of these needs none of `PASSING_TYPES` that came before it."""
PASSING_TYPES = (STARTED, PROGRESS, BATCH_PROGRESS)
"""What is of no use any more to whoever was told what came of it."""

SAMPLE_VIDEO = "video_00000000000000000000000000"
"""The job that test events tell of. There is none."""
SAMPLE_BATCH = "batch_00000000000000000000000000"


VideoEventTypes = Annotated[list[str], BeforeValidator(some_of(VIDEO_TYPES)), some_of_schema(VIDEO_TYPES)]
"""Some of `VIDEO_TYPES`, in their order and each once."""
EventTypes = Annotated[list[str], BeforeValidator(some_of(EVENT_TYPES)), some_of_schema(EVENT_TYPES)]
"""Some of `EVENT_TYPES`, in their order and each once."""
Url = Annotated[str, Field(max_length=100_000), WithJsonSchema({"type": "string", "format": "uri", "maxLength": 2048})]
"""Checked by the guard, which says more."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom an event tells of: a job, or a campaign, of which only the id is known here."""

    id: str
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """As the client gave it with the job."""
    custom_id: str | None = None
    campaign_id: str | None = None


def event_body(*, event_id: str, type: str, created_at: datetime, subject: Subject, data: dict[str, Any]) -> bytes:
    """The event as JSON: OpenAI's thin event and a little more.

    Args:
        data: what the outbox wrote down of the job or the campaign.
    """
    event = {
        "id": event_id,
        "object": "event",
        "created_at": int(created_at.timestamp()),
        "timestamp": created_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "type": type,
        "data": _batch_data(subject, data) if type in BATCH_TYPES else _video_data(type, subject, data),
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _video_data(type: str, subject: Subject, data: dict[str, Any]) -> dict[str, Any]:
    error = data.get("error")
    return {
        "id": subject.id,
        "status": data.get("status"),
        "progress": data.get("progress"),
        "attempt": data.get("attempt"),
        "sequence": data.get("sequence"),
        "custom_id": subject.custom_id,
        "campaign_id": subject.campaign_id,
        "metadata": subject.metadata,
        "error": None if error is None else _error(error),
        "content_url": f"/v1/videos/{subject.id}/content" if type == "video.completed" else None,
    }


def _batch_data(subject: Subject, data: dict[str, Any]) -> dict[str, Any]:
    # its metadata may change: what it was then is in `data`
    return {"id": subject.id, **data}


def sample_data(type: str) -> dict[str, Any]:
    """What a test event of this type says."""
    if type in BATCH_TYPES:
        return _sample_batch(type)
    status = type.removeprefix("video.")
    if type in (STARTED, PROGRESS):
        return {"status": "in_progress", "attempt": 1, "progress": 0 if type == STARTED else 50, "sequence": 0}
    error = None if type == "video.completed" else {"code": "test_event", "message": "This is a test."}
    return {
        "status": status,
        "attempt": 1,
        "progress": 100 if type == "video.completed" else 0,
        "error": error,
        "sequence": 0,
    }


def _sample_batch(type: str) -> dict[str, Any]:
    is_final = type in BATCH_FINAL_TYPES
    has_run = type == "batch.completed"
    names = ("total", "completed", "failed", "queued", "in_progress", "cancelled", "expired", "invalid")
    counts = dict.fromkeys(names, 0)
    return {
        "status": type.removeprefix("batch.") if is_final else "in_progress",
        "progress": 100 if has_run else 0,
        "request_counts": counts | ({"total": 1, "completed": 1} if has_run else {}),
        "name": "Test",
        "metadata": {},
        "output_file_id": None,
        "error_file_id": None,
        "error": {"code": "test_event", "message": "This is a test."} if type == "batch.failed" else None,
        "sequence": 0,
    }


def _error(error: dict[str, Any]) -> dict[str, Any]:
    return {
        "code": str(error.get("code", "generation_failed")),
        "message": without_places(str(error.get("message", ""))),
        "stage": error.get("stage"),
    }
