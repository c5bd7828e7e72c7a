"""What is told: the types of events, and the body of each, the same bytes in every attempt."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from rushes_core.fields import some_of, some_of_schema
from rushes_core.redact import without_places

STARTED = "video.started"
PROGRESS = "video.progress"
FINAL_TYPES = ("video.completed", "video.failed", "video.cancelled", "video.expired")
EVENT_TYPES = (*FINAL_TYPES, STARTED, PROGRESS)
DEFAULT_TYPES: tuple[str, ...] = FINAL_TYPES
"""What a job's `webhook_url` is told unless the client says otherwise."""

SAMPLE_VIDEO = "video_00000000000000000000000000"
"""The job that test events tell of. There is none."""


EventTypes = Annotated[list[str], BeforeValidator(some_of(EVENT_TYPES)), some_of_schema(EVENT_TYPES)]
"""Some of `EVENT_TYPES`, in their order and each once."""
Url = Annotated[str, Field(max_length=100_000), WithJsonSchema({"type": "string", "format": "uri", "maxLength": 2048})]
"""Checked by the guard, which says more."""


def event_body(
    *,
    event_id: str,
    type: str,
    created_at: datetime,
    video_id: str,
    data: dict[str, Any],
    metadata: dict[str, Any],
) -> bytes:
    """The event as JSON: OpenAI's thin event and a little more.

    Args:
        data: what the outbox wrote down of the job.
        metadata: as the client gave it with the job.
    """
    error = data.get("error")
    event = {
        "id": event_id,
        "object": "event",
        "created_at": int(created_at.timestamp()),
        "timestamp": created_at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "type": type,
        "data": {
            "id": video_id,
            "status": data.get("status"),
            "progress": data.get("progress"),
            "attempt": data.get("attempt"),
            "sequence": data.get("sequence"),
            "custom_id": None,
            "campaign_id": None,
            "metadata": metadata,
            "error": None if error is None else _error(error),
            "content_url": f"/v1/videos/{video_id}/content" if type == "video.completed" else None,
        },
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def sample_data(type: str) -> dict[str, Any]:
    """What a test event of this type says."""
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


def _error(error: dict[str, Any]) -> dict[str, Any]:
    return {
        "code": str(error.get("code", "generation_failed")),
        "message": without_places(str(error.get("message", ""))),
        "stage": error.get("stage"),
    }
