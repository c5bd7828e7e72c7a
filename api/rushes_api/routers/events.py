"""What happens to a job, told while it happens: server-sent events that can be resumed."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from rushes_core import keys
from rushes_core.events import Glimpse, Step
from rushes_core.fields import shown
from rushes_core.models import Job
from rushes_core.states import JobState
from sqlalchemy.exc import SQLAlchemyError

from rushes_api.deps import AppState, CurrentCaller, State, WellFormedId, visible
from rushes_api.errors import ApiError, Unauthorized, Unavailable
from rushes_api.event_stream import BEAT, MEDIA_TYPE, RECONNECT_MS, EventStream, event
from rushes_api.view import CurrentView, View, ViewQuery
from rushes_api.watch import Closing, Story

router = APIRouter(prefix="/v1/videos", tags=["videos"])

BEAT_SECONDS = 15.0
MAX_STREAM_SECONDS = 3_600.0
"""After which a stream ends; its client comes back with the id of its last event."""

_LAST_EVENT_ID = "Last-Event-ID"
_PLACE = re.compile(r"[0-9]{1,9}", re.ASCII)


async def _last_place(request: Request, caller: CurrentCaller) -> int | None:
    values = [value for value in request.headers.getlist(_LAST_EVENT_ID) if value]
    if not values:
        return None
    if len(values) > 1:
        raise ApiError(f"{_LAST_EVENT_ID} is given twice", param=_LAST_EVENT_ID, code="duplicate_parameter")
    if not _PLACE.fullmatch(values[0]):
        raise ApiError(f"{_LAST_EVENT_ID} must be the id of an event, got {shown(values[0])}", param=_LAST_EVENT_ID)
    return int(values[0])


_EVENTS: dict[str, Any] = {
    "parameters": [
        {
            "name": _LAST_EVENT_ID,
            "in": "header",
            "description": "Id of the last event that was received: go on after it",
            "schema": {"type": "string", "pattern": "^[0-9]{0,9}$"},
        }
    ]
}
_STREAM: dict[str, Any] = {
    # no type: there is none for a stream, and some tools take this for the schema of an event
    "description": "Server-sent events `status` and `progress`, each with an `id` and a Video as `data`"
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": _STREAM}}, "description": "The events"},
    204: {"description": "The job has ended and nothing was missed"},
}


@router.get("/{video_id}/events", response_class=Response, responses=_RESPONSES, openapi_extra=_EVENTS)
async def follow_video(
    video_id: WellFormedId,
    request: Request,
    caller: CurrentCaller,
    parameters: ViewQuery,
    last_place: Annotated[int | None, Depends(_last_place)],
    state: AppState,
    view: CurrentView,
) -> Response:
    """The job's events as they happen (server-sent events), until it has ended."""
    story = await state["watcher"].story(video_id, project=caller.project)
    job = visible(None if story is None else story.job, video_id)
    assert story is not None
    if last_place is not None and job.state.is_final and last_place >= _changes(story.steps)[-1].place:
        # a 200 that ends would have EventSource come back for ever
        return Response(status_code=204)
    told = _Told(view, job, last_place)

    async def chunks(gone: asyncio.Task[None]) -> AsyncGenerator[str]:
        with state["watcher"].seat(caller.api_key) as seat:
            seat.follow(Glimpse.of(job))
            yield f"retry: {RECONNECT_MS}\n\n" + told.news(Glimpse.of(job), story)
            checked_at = time.monotonic()
            ends_at = checked_at + MAX_STREAM_SECONDS
            while not told.is_over and time.monotonic() < ends_at:
                try:
                    update = await seat.next(gone, timeout_seconds=BEAT_SECONDS)
                except Closing:
                    return
                if update is None or time.monotonic() - checked_at >= BEAT_SECONDS:
                    if not await _may_go_on(request, state):
                        return
                    checked_at = time.monotonic()
                if update is None:
                    yield BEAT
                elif text := told.news(update.glimpse, update.story):
                    yield text

    return EventStream(chunks)


async def _may_go_on(request: Request, state: State) -> bool:
    """Whether the key that the stream was opened with still opens one."""
    try:
        caller = await state["keys"].caller(request.headers.getlist("authorization"))
    except Unauthorized:
        return False
    except (Unavailable, SQLAlchemyError, OSError):
        return True
    return keys.READ in caller.scopes


class _Told:
    """What one client has been told of a job, and so what is news to it."""

    def __init__(self, view: View, job: Job, last_place: int | None) -> None:
        self.is_over = False
        self._id = job.id
        self._view = view
        self._last_place = last_place
        self._progress = ""

    def news(self, glimpse: Glimpse | None, story: Story | None) -> str:
        """The events that tell of these."""
        if glimpse is None or glimpse.deleted_at is not None:
            self.is_over = True
            data = {"id": self._id, "object": "video.deleted", "deleted": True}
            return event("deleted", _compact(data))
        text = "" if story is None else "".join(self._statuses(story))
        self.is_over = glimpse.state.is_final
        return text if self.is_over else text + self._progress_of(glimpse)

    def _statuses(self, story: Story) -> Iterable[str]:
        job = story.job
        changes = _changes(story.steps)
        last = changes[-1].place
        first = next(step.place for step in changes if step.generation == job.generation)
        for step in changes:
            # who comes without an id hears how the job is; one that was retried tells nothing of its earlier lives
            is_missed = self._last_place is not None and step.place > self._last_place
            if step.generation == job.generation and (is_missed or (self._last_place is None and step.place == last)):
                video = self._view.video(
                    job if step.place == last else _as_it_was(job, step, is_new=step.place == first)
                )
                yield event("status", video.model_dump_json(), event_id=step.place)
        self._last_place = max(last, self._last_place or 0)

    def _progress_of(self, glimpse: Glimpse) -> str:
        if glimpse.state is not JobState.RUNNING:
            return ""
        data = _compact(
            {
                "id": glimpse.id,
                "status": glimpse.state.public_status,
                "phase": glimpse.phase,
                "progress": glimpse.progress,
                "completed_steps": glimpse.completed_steps,
                "total_steps": self._view.model.contract.num_forwards,
                "generation": glimpse.generation,
                "attempt": glimpse.attempt,
                "cancel_requested_at": glimpse.cancel_requested_at and int(glimpse.cancel_requested_at.timestamp()),
            }
        )
        if data == self._progress:
            return ""
        self._progress = data
        return event("progress", data)


def _changes(steps: Iterable[Step]) -> list[Step]:
    """The steps that changed the status as clients see it. There is always a first one."""
    found: list[Step] = []
    for step in steps:
        if not found or found[-1].state.public_status != step.state.public_status:
            found.append(step)
    return found


def _as_it_was(job: Job, step: Step, *, is_new: bool) -> Job:
    """`job` at an earlier step of the same generation: what is not kept of that time is as it is now, or left out."""
    values = {column.key: getattr(job, column.key) for column in Job.__table__.columns}
    values |= {
        "state": step.state,
        "attempt": step.attempt,
        "hold": None,
        "phase": None,
        "completed_steps": 0,
        # it never falls, and 100 is said with the end alone
        "progress": 0 if is_new else min(job.progress, 99),
        "result": None,
        "error": None,
        "timings": {},
        "started_at": None if is_new else job.started_at,
        "finished_at": None,
    }
    return Job(**values)


def _compact(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))
