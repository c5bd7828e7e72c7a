"""OpenAI's Videos: create, list, retrieve, delete, content."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import jobs
from rushes_core.ids import is_video_id
from rushes_core.models import Job
from rushes_core.request import ResolvedRequest, VideoRequest, resolve, shown
from rushes_core.states import JobState, states_with_status
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.body import JSON, MULTIPART, URLENCODED, parse_body, read_body
from rushes_api.content import check_finished, check_variant, deliver
from rushes_api.deps import AppState, CurrentJob, CurrentProject, Session, find_job, no_such_video, query
from rushes_api.errors import ApiError
from rushes_api.video import CONTENT_TYPE, Video, poll_after_ms, video_of

router = APIRouter(prefix="/v1/videos", tags=["videos"])

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
INLINE_BYTES = 8_192
"""Bodies up to this size are checked in the event loop: that takes less time than a thread's turn."""


class VideoList(BaseModel):
    """One page, newest first unless `order=asc` was asked for."""

    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"]
    deleted: bool


async def _resolved(request: Request, project: CurrentProject, state: AppState) -> ResolvedRequest:
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)
    content_types = request.headers.getlist("content-type")
    content_encoding = request.headers.get("content-encoding", "")

    def check() -> ResolvedRequest:
        members = parse_body(body, content_types=content_types, content_encoding=content_encoding)
        return resolve(members, state["model"])

    return check() if len(body) <= INLINE_BYTES else await to_thread.run_sync(check)


NoQuery = Annotated[Mapping[str, str], Depends(query())]
Resolved = Annotated[ResolvedRequest, Depends(_resolved)]

_REQUEST_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media_type: {"schema": VideoRequest.model_json_schema()} for media_type in (JSON, MULTIPART, URLENCODED)
        },
    }
}


@router.post("", openapi_extra=_REQUEST_BODY)
async def create_video(
    project: CurrentProject, parameters: NoQuery, wanted: Resolved, state: AppState, session: Session
) -> Video:
    """Accept a job. It is committed before this is answered."""
    model, max_attempts = state["model"], state["settings"].max_attempts
    values = wanted.job_values(model, project=project, max_attempts=max_attempts)
    job = (await session.execute(jobs.create(**values))).scalar_one()
    return video_of(job, model)


@router.get("")
async def list_videos(
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query("after", "limit", "order", "status"))],
    state: AppState,
    session: Session,
) -> VideoList:
    limit = _limit(parameters.get("limit"))
    statement = jobs.page(
        project=project,
        after=_cursor(parameters.get("after")),
        limit=limit,
        descending=_one_of("order", parameters.get("order", "desc"), ("asc", "desc")) == "desc",
        states=_states(parameters.get("status")),
    )
    rows = (await session.execute(statement)).scalars().all()
    data = [video_of(job, state["model"]) for job in rows[:limit]]
    return VideoList(
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    )


@router.get("/{video_id}")
async def get_video(
    job: CurrentJob, parameters: NoQuery, response: Response, state: AppState, session: Session
) -> Video:
    num_ahead = await _num_ahead(job, session)
    poll_after = poll_after_ms(job, num_ahead)
    if poll_after is not None:
        response.headers["openai-poll-after-ms"] = str(poll_after)
    return video_of(job, state["model"], num_ahead=num_ahead)


@router.delete("/{video_id}")
async def delete_video(video_id: str, project: CurrentProject, parameters: NoQuery, session: Session) -> VideoDeleted:
    """Hide a job for good; one that waits or runs is cancelled. Its objects are removed afterwards."""
    deleted = None
    if is_video_id(video_id):
        deleted = (await session.execute(jobs.delete_job(video_id, project=project))).scalar_one_or_none()
    if deleted is None:
        raise no_such_video(video_id)
    return VideoDeleted(id=video_id, object="video.deleted", deleted=True)


_CONTENT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {}}, "description": "The clip"},
    206: {"content": {CONTENT_TYPE: {}}, "description": "The range that was asked for"},
    302: {"description": "Where the clip lies"},
    304: {"description": "The clip is the one that If-None-Match names"},
    409: {"description": "There is no clip: not yet, or never"},
    416: {"description": "The range holds no byte of the clip"},
}


@router.head("/{video_id}/content", include_in_schema=False)
@router.get("/{video_id}/content", response_class=Response, responses=_CONTENT_RESPONSES)
async def get_content(
    video_id: str,
    request: Request,
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query("variant", "redirect"))],
    state: AppState,
) -> Response:
    check_variant(parameters.get("variant", "video"))
    # not the request's session: a slow store or client must not hold a connection to Postgres
    async with state["sessions"].begin() as session:
        job = await find_job(video_id, project=project, session=session)
    check_finished(job)
    return await deliver(job, request, state, redirect=parameters.get("redirect"))


async def _num_ahead(job: Job, session: AsyncSession) -> int | None:
    if job.state is not JobState.QUEUED:
        return None
    return (await session.execute(jobs.num_ahead(job))).scalar_one()


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_LIMIT):
        raise ApiError(f"limit must be between 1 and {MAX_LIMIT}, got {shown(text)}", param="limit")
    return int(text)


def _cursor(text: str | None) -> str | None:
    if text is not None and not is_video_id(text):
        raise ApiError(f"after must be the id of a video, got {shown(text)}", param="after")
    return text


def _states(text: str | None) -> tuple[JobState, ...] | None:
    if text is None:
        return None
    words = tuple(dict.fromkeys(state.public_status for state in JobState))
    return states_with_status(_one_of("status", text, words))


def _one_of(name: str, value: str, words: tuple[str, ...]) -> str:
    if value not in words:
        raise ApiError(f"{name} must be one of {', '.join(words)}, got {shown(value)}", param=name)
    return value
