"""OpenAI's Videos: create, list, retrieve, delete; and beside them cancel, retry, attempts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import jobs
from rushes_core.errors import InvalidRequest, TransitionRefused
from rushes_core.ids import is_video_id
from rushes_core.models import Job, JobAttempt
from rushes_core.request import ResolvedRequest, VideoRequest, parse, printable, resolve
from rushes_core.states import RETRYABLE_STATES, JobState, states_with_status
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.attempt import VideoAttempt, attempt_of, fence_of
from rushes_api.body import JSON, MULTIPART, URLENCODED, parse_body, read_body
from rushes_api.deps import (
    AppState,
    CurrentCaller,
    CurrentJob,
    CurrentProject,
    Session,
    State,
    find_job,
    no_such_video,
    query,
)
from rushes_api.errors import ApiError
from rushes_api.once import MAX_KEY_CHARACTERS, Call, SentKey, fingerprint, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, one_of, wanted_page
from rushes_api.video import Video, is_held, poll_after_ms, video_of

router = APIRouter(prefix="/v1/videos", tags=["videos"])

INLINE_BYTES = 8_192
"""Bodies up to this size are checked in the event loop: that takes less time than a thread's turn."""


class VideoList(Page[Video]):
    """One page, newest first unless `order=asc` was asked for."""


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"]
    deleted: bool


class AttemptList(Page[VideoAttempt]):
    """One page, the oldest first unless `order=desc` was asked for."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What was asked for, and what that means now: the answer to a repeated request may be older than its faults."""

    fingerprint: str
    resolved: ResolvedRequest | InvalidRequest


async def _wanted(request: Request, project: CurrentProject, key: SentKey, state: AppState) -> _Request:
    cancel_after = _cancel_after(request)
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)

    def check() -> _Request:
        members = _members(request, body)
        seen = "" if key is None else fingerprint(parse(members), cancel_after=cancel_after)
        try:
            return _Request(seen, resolve(members, state["model"], cancel_after=cancel_after))
        except InvalidRequest as error:
            if key is None:
                raise
            return _Request(seen, error)

    return check() if len(body) <= INLINE_BYTES else await to_thread.run_sync(check)


async def _no_members(request: Request, project: CurrentProject, state: AppState) -> None:
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)
    name = next(iter(_members(request, body)), None) if body else None
    if name is not None:
        raise ApiError(f"unknown parameter: {printable(name)}", param=printable(name), code="unknown_parameter")


def _members(request: Request, body: bytes) -> dict[str, Any]:
    return parse_body(
        body,
        content_types=request.headers.getlist("content-type"),
        content_encoding=request.headers.get("content-encoding", ""),
    )


def _cancel_after(request: Request) -> str | None:
    values = request.headers.getlist("cancel-after")
    if len(values) > 1:
        raise ApiError("Cancel-After is given twice", param="Cancel-After", code="duplicate_parameter")
    return values[0] if values else None


NoQuery = Annotated[Mapping[str, str], Depends(query())]
WantedVideo = Annotated[_Request, Depends(_wanted)]
NO_BODY = Depends(_no_members)


def _header(name: str, about: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": about, "schema": {"type": "string", **schema}}


_KEY_HEADER = _header(
    "Idempotency-Key", "Makes the request safe to send again", minLength=1, maxLength=MAX_KEY_CHARACTERS
)
_WITH_KEY: dict[str, Any] = {"parameters": [_KEY_HEADER]}
_CREATE: dict[str, Any] = {
    "parameters": [_KEY_HEADER, _header("Cancel-After", "The deadline as a duration from now, such as 90m")],
    "requestBody": {
        "required": True,
        "content": {
            media_type: {"schema": VideoRequest.model_json_schema()} for media_type in (JSON, MULTIPART, URLENCODED)
        },
    },
}


@router.post("", response_model=Video, openapi_extra=_CREATE)
async def create_video(
    request: Request, caller: CurrentCaller, parameters: NoQuery, key: SentKey, wanted: WantedVideo, state: AppState
) -> Response:
    """Accept a job. It is committed before this is answered."""
    max_attempts = state["settings"].max_attempts
    values: dict[str, Any] = {}
    if isinstance(wanted.resolved, ResolvedRequest):
        # the id is drawn once: an insert that is repeated finds the row of the first
        values = wanted.resolved.job_values(state["model"], project=caller.project, max_attempts=max_attempts)

    async def accept(session: AsyncSession) -> Video:
        if isinstance(wanted.resolved, InvalidRequest):
            raise wanted.resolved
        job = (await session.execute(jobs.create(**values))).scalar_one_or_none()
        return _video(job or await session.get_one(Job, values["id"]), state)

    call = Call(caller, "POST /v1/videos", key, wanted.fingerprint)
    return await take_effect(call, accept, request=request, sessions=state["sessions"])


@router.post("/{video_id}/cancel", response_model=Video, dependencies=[NO_BODY], openapi_extra=_WITH_KEY)
async def cancel_video(
    video_id: str, request: Request, caller: CurrentCaller, parameters: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Cancel a waiting job at once; a running one is asked to stop and goes on as it is until it has."""

    async def cancel(session: AsyncSession) -> Video:
        job = (await session.execute(jobs.cancel(video_id, project=caller.project))).scalar_one_or_none()
        if job is None:
            raise no_such_video(video_id)
        if job.state.is_final and job.state is not JobState.CANCELLED:
            raise TransitionRefused(f"{job.id} is {job.state.public_status}: it cannot be cancelled any more")
        return _video(job, state)

    call = Call(caller, f"POST /v1/videos/{_well_formed(video_id)}/cancel", key, fingerprint(), is_harmless=True)
    return await take_effect(call, cancel, request=request, sessions=state["sessions"])


@router.post("/{video_id}/retry", response_model=Video, dependencies=[NO_BODY], openapi_extra=_WITH_KEY)
async def retry_video(
    video_id: str, request: Request, caller: CurrentCaller, parameters: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Queue a job again that failed, was cancelled or expired: the same id, a new generation, from the start."""
    generation: int | None = None

    async def retry(session: AsyncSession) -> Video:
        nonlocal generation
        if generation is not None:
            found = await find_job(video_id, project=caller.project, session=session)
            if found.generation >= generation:
                return _video(found, state)
        statement = jobs.retry(video_id, project=caller.project).execution_options(populate_existing=True)
        job = (await session.execute(statement)).scalar_one_or_none()
        if job is None:
            found = await find_job(video_id, project=caller.project, session=session)
            words = ", ".join(one.public_status for one in RETRYABLE_STATES)
            raise TransitionRefused(f"{found.id} is {found.state.public_status}; what can be retried is {words}")
        generation = job.generation
        return _video(job, state)

    call = Call(caller, f"POST /v1/videos/{_well_formed(video_id)}/retry", key, fingerprint())
    return await take_effect(call, retry, request=request, sessions=state["sessions"])


@router.get("/{video_id}/attempts")
async def list_attempts(
    job: CurrentJob, parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS))], session: Session
) -> AttemptList:
    """Every time that a replica took the job, of all its generations."""
    wanted = wanted_page(parameters, key_of=fence_of, what="an attempt", descending=False)
    rows = (await session.execute(wanted.rows(jobs.attempts(job.id), JobAttempt.fence))).scalars().all()
    return AttemptList.of(rows, attempt_of, limit=wanted.limit)


@router.get("")
async def list_videos(
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS, "status"))],
    state: AppState,
    session: Session,
) -> VideoList:
    wanted = wanted_page(parameters, key_of=_video_id, what="a video")
    statement = jobs.listed(project=project, states=_states(parameters.get("status")))
    rows = (await session.execute(wanted.rows(statement, Job.id))).scalars().all()
    return VideoList.of(rows, lambda job: _video(job, state), limit=wanted.limit)


@router.get("/{video_id}")
async def get_video(
    job: CurrentJob, parameters: NoQuery, response: Response, state: AppState, session: Session
) -> Video:
    num_ahead = await _num_ahead(job, session)
    poll_after = poll_after_ms(job, num_ahead)
    if poll_after is not None:
        response.headers["openai-poll-after-ms"] = str(poll_after)
    return _video(job, state, num_ahead=num_ahead)


@router.delete("/{video_id}")
async def delete_video(video_id: str, project: CurrentProject, parameters: NoQuery, session: Session) -> VideoDeleted:
    """Hide a job for good; one that waits or runs is cancelled. Its objects are removed afterwards."""
    statement = jobs.delete_job(_well_formed(video_id), project=project)
    if (await session.execute(statement)).scalar_one_or_none() is None:
        raise no_such_video(video_id)
    return VideoDeleted(id=video_id, object="video.deleted", deleted=True)


def _video(job: Job, state: State, *, num_ahead: int | None = None) -> Video:
    return video_of(job, state["model"], retention_days=state["settings"].retention_days, num_ahead=num_ahead)


async def _num_ahead(job: Job, session: AsyncSession) -> int | None:
    if job.state is not JobState.QUEUED or is_held(job):
        return None
    return (await session.execute(jobs.num_ahead(job))).scalar_one()


def _well_formed(video_id: str) -> str:
    if not is_video_id(video_id):
        raise no_such_video(video_id)
    return video_id


def _video_id(text: str) -> str | None:
    return text if is_video_id(text) else None


def _states(text: str | None) -> tuple[JobState, ...] | None:
    if text is None:
        return None
    words = tuple(dict.fromkeys(state.public_status for state in JobState))
    return states_with_status(one_of("status", text, words))
