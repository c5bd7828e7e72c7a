"""OpenAI's Videos: create, list, retrieve, delete."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import jobs
from rushes_core.holds import CAMPAIGN
from rushes_core.ids import is_video_id
from rushes_core.listing import page
from rushes_core.models import Job
from rushes_core.parsing import unsupported
from rushes_core.request import FROM_TEXT, ResolvedRequest
from rushes_core.video import QueueReason, Video
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import (
    CANCEL_AFTER_HEADER,
    KEY_HEADER,
    VIDEO_BODY,
    SentVideo,
    Submission,
    admission,
    is_plain,
    new_job,
)
from rushes_api.answer import answer
from rushes_api.auth import Caller
from rushes_api.deps import (
    AppState,
    CurrentCaller,
    CurrentJob,
    CurrentProject,
    NoQuery,
    Session,
    State,
    WellFormedId,
    no_such_video,
    query,
)
from rushes_api.errors import responses
from rushes_api.once import Call, Commit, SentKey, fingerprint, json_response, settled, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page
from rushes_api.polling import poll_after_ms
from rushes_api.quota import check_priority
from rushes_api.validation import VideoValidation, draft_of, estimate_of, validation_of
from rushes_api.video_filters import FILTER_PARAMETERS, filters_of
from rushes_api.view import VIEW_PARAMETERS, CurrentView, ViewQuery, campaign_reasons
from rushes_api.waiting import PREFER_HEADER, WAIT_FIRST, PreferredWait, answer_later

router = APIRouter(prefix="/v1/videos", tags=["videos"])


class VideoList(Page[Video]):
    """One page, newest first unless `order=asc` was asked for."""


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"]
    deleted: bool


ShownAs = Callable[[Job, int | None], BaseModel]
"""The answer to who made a job: of the job, and of those ahead of it, where somebody counted them."""

_CREATE: dict[str, Any] = {"parameters": [KEY_HEADER, CANCEL_AFTER_HEADER, PREFER_HEADER], "requestBody": VIDEO_BODY}
_VALIDATE: dict[str, Any] = {"parameters": [CANCEL_AFTER_HEADER], "requestBody": VIDEO_BODY}


@router.post("", response_model=Video, responses=responses("model_not_found"), openapi_extra=_CREATE)
async def create_video(
    request: Request,
    caller: CurrentCaller,
    parameters: ViewQuery,
    key: SentKey,
    sent: SentVideo,
    state: AppState,
    view: CurrentView,
    seconds: PreferredWait,
) -> Response:
    """Accept a job. It is committed before this is answered."""
    response = await accepted(request, video_call(caller, key, sent), sent, state=state, shown_as=view.accepted)
    return await answer_later(response, seconds, request=request, caller=caller, state=state, view=view)


def video_call(caller: Caller, key: str | None, sent: Submission[ResolvedRequest]) -> Call:
    return Call(caller, "POST /v1/videos", key, sent.fingerprint)


async def accepted(
    request: Request,
    call: Call,
    sent: Submission[ResolvedRequest],
    *,
    state: State,
    shown_as: ShownAs,
    tells_place: bool = True,
) -> Response:
    """Accept a job and answer with it, or as the same request was answered before.

    Args:
        tells_place: the answer tells of the jobs ahead; otherwise nobody counts them.
    """
    if call.key is None and is_plain(sent.checked(), caller=call.caller):
        return await _taken_in(
            sent.checked(), call, request=request, state=state, shown_as=shown_as, tells_place=tells_place
        )
    admit = admission(sent.order, caller=call.caller, state=state)

    async def accept(session: AsyncSession) -> BaseModel:
        job = await admit(session)
        return shown_as(job, await state["lookup"].num_ahead_of_newcomer(job) if tells_place else None)

    return await take_effect(call, accept, request=request, sessions=state["sessions"])


async def _taken_in(
    resolved: ResolvedRequest, call: Call, *, request: Request, state: State, shown_as: ShownAs, tells_place: bool
) -> Response:
    check_priority(resolved.priority, caller=call.caller)
    new = new_job(resolved, caller=call.caller, state=state)
    num_ahead = None
    if tells_place and resolved.not_before is None:
        num_ahead = await state["lookup"].num_before_end(new["model"], new["project"], new["priority"])

    def shown(job: Job) -> str:
        return shown_as(job, num_ahead).model_dump_json()

    async def attempt(commit: Commit) -> Response:
        return json_response(await state["intake"].add(new, shown, commit.note_sent, in_doubt=commit.was_sent))

    return await settled(call, attempt, request=request)


@router.post("/validate", responses=responses("model_not_found"), openapi_extra=_VALIDATE)
async def validate_video(
    caller: CurrentCaller, parameters: NoQuery, sent: SentVideo, state: AppState, view: CurrentView
) -> VideoValidation:
    """What `POST /v1/videos` would make of this body. Nothing is stored."""
    resolved = sent.checked()
    check_priority(resolved.priority, caller=caller)
    now, outlook = datetime.now(UTC), state["forecast"].outlook
    draft = draft_of(resolved, view.model, project=caller.project, now=now)
    is_due = outlook is not None and resolved.not_before is None
    num_ahead = await state["lookup"].num_ahead(draft) if is_due else None
    return validation_of(resolved, view.model, estimate=estimate_of(draft, outlook, num_ahead), now=now)


@router.post("/edits", include_in_schema=False)
@router.post("/extensions", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
async def start_from_a_video(request: Request, caller: CurrentCaller) -> None:
    """OpenAI's routes that need a video as input."""
    raise unsupported("video", FROM_TEXT)


@router.get("", response_model=VideoList)
async def list_videos(
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS, *VIEW_PARAMETERS, *FILTER_PARAMETERS))],
    session: Session,
    view: CurrentView,
) -> Response:
    wanted = wanted_page(parameters, key_of=_video_id, what="a video")
    statement = page(
        project=project,
        filters=filters_of(parameters, view.states_of),
        after=wanted.after,
        limit=wanted.limit,
        descending=wanted.descending,
    )
    rows = (await session.execute(statement)).scalars().all()
    reasons = await campaign_reasons(rows, session)

    def shown(job: Job) -> Video:
        return view.video(job, campaign_reason=reasons.get(job.campaign_id or ""))

    return answer(VideoList.of(rows, shown, limit=wanted.limit))


@router.get(
    "/{video_id}",
    response_model=Video,
    dependencies=[WAIT_FIRST],
    openapi_extra={"parameters": [PREFER_HEADER]},
)
async def get_video(job: CurrentJob, parameters: ViewQuery, state: AppState, view: CurrentView) -> Response:
    num_ahead = await state["lookup"].num_ahead_or_none(job)
    reason = await _campaign_reason(job, state) if job.hold == CAMPAIGN else None
    video = view.video(job, num_ahead=num_ahead, campaign_reason=reason)
    poll_after = poll_after_ms(job, num_ahead, video.eta)
    headers = {} if poll_after is None else {"openai-poll-after-ms": str(poll_after)}
    return answer(video, headers=headers)


async def _campaign_reason(job: Job, state: State) -> QueueReason | None:
    async with state["sessions"].begin() as session:
        return (await campaign_reasons([job], session)).get(job.campaign_id or "")


@router.delete("/{video_id}", response_model=VideoDeleted)
async def delete_video(
    video_id: WellFormedId, request: Request, caller: CurrentCaller, parameters: NoQuery, state: AppState
) -> Response:
    """Hide a job for good; one that waits or runs is cancelled. Its objects are removed afterwards."""

    async def delete(session: AsyncSession) -> VideoDeleted:
        deleted = (await session.execute(jobs.delete_job(video_id, project=caller.project))).scalar_one_or_none()
        if deleted is None and (await session.execute(jobs.get(video_id, project=caller.project))).first() is None:
            raise no_such_video(video_id)
        return VideoDeleted(id=video_id, object="video.deleted", deleted=True)

    call = Call(caller, f"DELETE /v1/videos/{video_id}", None, fingerprint(), is_harmless=True)
    return await take_effect(call, delete, request=request, sessions=state["sessions"])


def _video_id(text: str) -> str | None:
    return text if is_video_id(text) else None
