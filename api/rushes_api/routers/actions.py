"""What a client does with a job after it was accepted: cancel, retry, remix, attempts."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from rushes_core import jobs
from rushes_core.errors import InvalidRequest, TransitionRefused
from rushes_core.models import Job
from rushes_core.request import ResolvedRequest, remix
from rushes_core.states import RETRYABLE_STATES, JobState
from rushes_core.video import Video
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import KEY_HEADER, NO_BODY, REMIX_BODY, SentRemix, admission
from rushes_api.attempt import VideoAttempt, attempt_of, number_of
from rushes_api.deps import AppState, CurrentCaller, CurrentJob, Session, WellFormedId, find_job, query
from rushes_api.once import Call, SentKey, fingerprint, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page
from rushes_api.polling import MIN_POLL_MS
from rushes_api.quota import reserve_place, take_place
from rushes_api.view import CurrentView, ViewQuery
from rushes_api.waiting import PREFER_HEADER, PreferredWait, answer_later

router = APIRouter(prefix="/v1/videos", tags=["videos"])

_WITH_KEY: dict[str, Any] = {"parameters": [KEY_HEADER]}


class AttemptList(Page[VideoAttempt]):
    """One page, the oldest first unless `order=desc` was asked for."""


@router.post("/{video_id}/cancel", response_model=Video, dependencies=[NO_BODY], openapi_extra=_WITH_KEY)
async def cancel_video(
    video_id: WellFormedId,
    request: Request,
    caller: CurrentCaller,
    parameters: ViewQuery,
    key: SentKey,
    state: AppState,
    view: CurrentView,
) -> Response:
    """Cancel a waiting job at once; a running one is asked to stop and goes on as it is until it has."""

    async def cancel(session: AsyncSession) -> Video:
        job = (await session.execute(jobs.cancel(video_id, project=caller.project))).scalar_one_or_none()
        if job is None:
            job = await find_job(video_id, project=caller.project, session=session)
        if job.state.is_final and job.state is not JobState.CANCELLED:
            raise TransitionRefused(f"{job.id} is {job.state.public_status}: it cannot be cancelled any more")
        return view.video(job)

    call = Call(caller, f"POST /v1/videos/{video_id}/cancel", key, fingerprint(), is_harmless=True)
    return await take_effect(call, cancel, request=request, sessions=state["sessions"])


@router.post("/{video_id}/retry", response_model=Video, dependencies=[NO_BODY], openapi_extra=_WITH_KEY)
async def retry_video(
    video_id: WellFormedId,
    request: Request,
    caller: CurrentCaller,
    parameters: ViewQuery,
    key: SentKey,
    state: AppState,
    view: CurrentView,
) -> Response:
    """Queue a job again that failed, was cancelled or expired: the same id, a new generation, from the start."""
    generation: int | None = None

    async def retry(session: AsyncSession) -> Video:
        nonlocal generation
        if generation is not None:
            found = await find_job(video_id, project=caller.project, session=session)
            if found.generation >= generation:
                return view.video(found)
        before = await find_job(video_id, project=caller.project, session=session)
        if before.state not in RETRYABLE_STATES:
            # decided here: the job may end from now on, and nothing has reserved a place for it
            raise _not_retryable(before)
        # a job of a campaign waits with that, not in the queue of its key
        api_key = before.api_key if before.campaign_id is None else None
        await reserve_place(session, caller=caller, api_key=api_key, priority=before.priority)
        statement = jobs.retry(video_id, project=caller.project).execution_options(populate_existing=True)
        job = (await session.execute(statement)).scalar_one_or_none()
        if job is None:
            await session.refresh(before)
            raise _not_retryable(before)
        await take_place(session, job)
        generation = job.generation
        return view.video(job, num_ahead=await state["lookup"].num_ahead_of_newcomer(job))

    call = Call(caller, f"POST /v1/videos/{video_id}/retry", key, fingerprint())
    return await take_effect(call, retry, request=request, sessions=state["sessions"])


def _not_retryable(job: Job) -> TransitionRefused:
    words = ", ".join(one.public_status for one in RETRYABLE_STATES)
    return TransitionRefused(
        f"{job.id} is {job.state.public_status}; what can be retried is {words}",
        retry_after=None if job.state.is_final else MIN_POLL_MS // 1_000,
    )


_REMIX: dict[str, Any] = {"parameters": [KEY_HEADER, PREFER_HEADER], "requestBody": REMIX_BODY}


@router.post("/{video_id}/remix", response_model=Video, openapi_extra=_REMIX)
async def remix_video(
    video_id: WellFormedId,
    request: Request,
    caller: CurrentCaller,
    parameters: ViewQuery,
    key: SentKey,
    sent: SentRemix,
    state: AppState,
    view: CurrentView,
    seconds: PreferredWait,
) -> Response:
    """Accept a job that is like this one, of whatever status, but for its prompt. The seed is the same too."""

    async def order(session: AsyncSession) -> ResolvedRequest:
        source = await find_job(video_id, project=caller.project, session=session)
        prompt = sent.checked()
        buckets = state["settings"].output_buckets
        return remix(source, prompt.text, num_tokens=prompt.num_tokens, buckets=buckets)

    admit = admission(order, caller=caller, state=state, remixed_from=video_id)

    async def accept(session: AsyncSession) -> Video:
        try:
            job = await admit(session)
        except InvalidRequest as error:
            raise _not_to_be_remixed(error, video_id) from error
        return view.video(job, num_ahead=await state["lookup"].num_ahead_of_newcomer(job))

    call = Call(caller, f"POST /v1/videos/{video_id}/remix", key, sent.fingerprint)
    response = await take_effect(call, accept, request=request, sessions=state["sessions"])
    return await answer_later(response, seconds, request=request, caller=caller, state=state, view=view)


def _not_to_be_remixed(error: InvalidRequest, video_id: str) -> InvalidRequest:
    """What `error` says of a field that was taken from the source, where the client cannot change it."""
    if error.param not in ("webhook_url", "callback_url"):
        return error
    why = f"{video_id} cannot be remixed: its {error}. POST /v1/videos takes the same request without it"
    return InvalidRequest(why, param=error.param, code=error.code)


@router.get("/{video_id}/attempts")
async def list_attempts(
    job: CurrentJob, parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS))], session: Session
) -> AttemptList:
    """Every time that a replica took the job, of all its generations."""
    wanted = wanted_page(parameters, key_of=number_of, what="an attempt", descending=False)
    statement, number = jobs.numbered_attempts(job.id)
    rows = (await session.execute(wanted.rows(statement, number))).all()
    return AttemptList.of(rows, lambda row: attempt_of(*row), limit=wanted.limit)
