"""MiniMax's video API, version 2: its clients render here once their base URL is changed."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import jobs
from rushes_core.errors import TransitionRefused
from rushes_core.fields import is_storable, shown
from rushes_core.ids import is_video_id
from rushes_core.listing import Filters, all_listed
from rushes_core.models import Job
from rushes_core.states import JobState
from rushes_core.variants import VIDEO
from sqlalchemy import Select, false, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import KEY_HEADER, NO_BODY
from rushes_api.content import check_finished, deliver, find_variant
from rushes_api.content_link import PARAMETERS, PATH, check_link, content_links
from rushes_api.deps import (
    AppState,
    CurrentCaller,
    CurrentJob,
    CurrentProject,
    NoQuery,
    WellFormedId,
    query,
    visible,
)
from rushes_api.errors import ApiError, responses
from rushes_api.minimax_request import TASK_BODY, SentTask
from rushes_api.minimax_task import (
    DEFAULT_PAGE_SIZE,
    GENERATION,
    LISTED_STATES,
    MAX_PAGE_NUMBER,
    MAX_PAGE_SIZE,
    TASK_TYPES,
    TaskAnswer,
    TaskCreated,
    TaskDeleted,
    TaskList,
    task_of,
)
from rushes_api.once import Call, SentKey, fingerprint, take_effect
from rushes_api.page import one_of, whole_number
from rushes_api.routers.videos import accepted

router = APIRouter(prefix="/v2", tags=["minimax"])

DAYS_LISTED = 7
"""MiniMax lists no older tasks. A single one is found as long as its job is kept."""
_LIST = ("page_num", "page_size", "filter.status", "filter.model", "filter.task_type", "filter.task_ids")

_CREATE: dict[str, Any] = {"parameters": [KEY_HEADER], "requestBody": TASK_BODY}


@router.post(
    "/video_generation", response_model=TaskCreated, responses=responses("model_not_found"), openapi_extra=_CREATE
)
async def create_task(
    request: Request, caller: CurrentCaller, parameters: NoQuery, key: SentKey, sent: SentTask, state: AppState
) -> Response:
    """Accept a job, as `POST /v1/videos` does."""

    def shown_as(job: Job, num_ahead: int | None) -> TaskCreated:
        return TaskCreated(task_id=job.id)

    call = Call(caller, "POST /v2/video_generation", key, sent.fingerprint)
    return await accepted(request, call, sent, state=state, shown_as=shown_as, tells_place=False)


@router.get("/query/video_generation/{video_id}", response_model=TaskAnswer)
async def query_task(job: CurrentJob, request: Request, parameters: NoQuery, state: AppState) -> Response:
    """A task, and once it has succeeded an address of its clip that needs no API key. Ask again for a fresh one."""
    links = await content_links([job], request, state)
    return _sparse(TaskAnswer(task=task_of(job, url=links.get(job.id))))


@router.get("/query/video_generation", response_model=TaskList)
async def list_tasks(
    request: Request,
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query(*_LIST, several=("filter.task_ids",)))],
    state: AppState,
) -> Response:
    """The project's tasks of the last seven days."""
    number = whole_number("page_num", parameters, default=1, high=MAX_PAGE_NUMBER)
    size = whole_number("page_size", parameters, default=DEFAULT_PAGE_SIZE, high=MAX_PAGE_SIZE)
    wanted = _listed(parameters, project)
    all_of_them = select(func.count()).select_from(wanted.order_by(None).subquery())
    first = (number - 1) * size
    # not the request's session: a store that is slow to say how to sign must not hold a connection to Postgres
    async with state["sessions"].begin() as session:
        total = (await session.execute(all_of_them)).scalar_one()
        # Postgres would pass over all of them to find none
        rows = (await session.execute(wanted.limit(size).offset(first))).scalars().all() if first < total else ()
    links = await content_links(rows, request, state)
    return _sparse(TaskList(items=[task_of(job, url=links.get(job.id)) for job in rows], total=total))


@router.delete(
    "/video_generation/{video_id}",
    response_model=TaskDeleted,
    responses=responses("invalid_state"),
    dependencies=[NO_BODY],
)
async def delete_task(
    video_id: WellFormedId, request: Request, caller: CurrentCaller, parameters: NoQuery, state: AppState
) -> Response:
    """Cancel a task that waits, or delete one that has succeeded or failed; of others MiniMax refuses both.

    `POST /v1/videos/{video_id}/cancel` stops one that runs.
    """
    done: TaskDeleted | None = None

    async def delete(session: AsyncSession) -> TaskDeleted:
        nonlocal done
        # locked, for it to be still so when it is changed
        found = await session.execute(jobs.get(video_id, project=caller.project).with_for_update(key_share=True))
        job = found.scalar_one_or_none()
        if done is not None and job is not None and (job.deleted_at is not None or job.state is JobState.CANCELLED):
            return done
        status = task_of(visible(job, video_id), url=None).status
        if status == "queued":
            await session.execute(jobs.cancel(video_id, project=caller.project))
            done = TaskDeleted(task_id=video_id, action="cancelled", status="cancelled")
        elif status in ("succeeded", "failed"):
            await session.execute(jobs.delete_job(video_id, project=caller.project))
            done = TaskDeleted(task_id=video_id, action="deleted", status="deleted")
        else:
            raise TransitionRefused(
                f"{video_id} is {status}; a task that is queued, succeeded or failed can be deleted"
            )
        return done

    call = Call(caller, f"DELETE /v2/video_generation/{video_id}", None, fingerprint(), is_harmless=True)
    return await take_effect(call, delete, request=request, sessions=state["sessions"])


@router.head(PATH.removeprefix(router.prefix), include_in_schema=False)
@router.get(PATH.removeprefix(router.prefix), response_class=Response, include_in_schema=False)
async def get_linked_content(
    video_id: str,
    request: Request,
    parameters: Annotated[Mapping[str, str], Depends(query(*PARAMETERS))],
    state: AppState,
) -> Response:
    """The clip, for whoever has the address that a task shows."""
    check_link(video_id, parameters.get("expires"), parameters.get("signature"), state["settings"])
    async with state["sessions"].begin() as session:
        job = visible(await session.get(Job, video_id), video_id)
    check_finished(job)
    return await deliver(job, find_variant(job, VIDEO), request, state, redirect=None)


def _listed(parameters: Mapping[str, str], project: str) -> Select[Job]:
    states = None
    if "filter.status" in parameters:
        states = LISTED_STATES[one_of("filter.status", parameters["filter.status"], tuple(LISTED_STATES))]
    since = datetime.now(UTC) - timedelta(days=DAYS_LISTED)
    wanted = all_listed(project=project, filters=Filters(states=states, created_from=since))
    model = parameters.get("filter.model")
    if model is not None:
        if not is_storable(model):
            raise ApiError(f"filter.model must be the name of a model, got {shown(model)}", param="filter.model")
        wanted = wanted.where(func.coalesce(Job.request["model_requested"].as_string(), Job.model) == model)
    if "filter.task_ids" in parameters:
        ids = parameters["filter.task_ids"].split(",")
        wrong = next((one for one in ids if not is_video_id(one)), None)
        if wrong is not None:
            raise ApiError(f"filter.task_ids must be ids of tasks, got {shown(wrong)}", param="filter.task_ids")
        if len(ids) > MAX_PAGE_SIZE:
            raise ApiError(
                f"filter.task_ids must be at most {MAX_PAGE_SIZE} ids, got {len(ids)}", param="filter.task_ids"
            )
        wanted = wanted.where(Job.id.in_(ids))
    task_type = one_of("filter.task_type", parameters.get("filter.task_type", GENERATION), TASK_TYPES)
    return wanted if task_type == GENERATION else wanted.where(false())


def _sparse(model: BaseModel) -> Response:
    """As MiniMax answers: what there is not is left out. Addresses that need no key are not for caches to keep."""
    body = model.model_dump_json(exclude_none=True)
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
