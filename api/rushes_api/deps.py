"""What endpoints ask for: the session, the caller's project, the job in the path, the served model, the store."""

import re
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from typing import Annotated, Any, TypedDict, cast

from anyio import CapacityLimiter
from fastapi import Depends, Request
from rushes_core import jobs, keys
from rushes_core.errors import JobDeleted, JobNotFound
from rushes_core.fields import printable
from rushes_core.ids import is_video_id
from rushes_core.models import Job
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from rushes_api.auth import ApiKeys, Caller
from rushes_api.boundary import ANSWER_HEADERS
from rushes_api.errors import ApiError, InsufficientScope
from rushes_api.eta import Forecast
from rushes_api.intake import Intake
from rushes_api.limits import RequestLimits
from rushes_api.lookup import Lookup
from rushes_api.metrics import Metrics
from rushes_api.pauses import Pauses
from rushes_api.pulse import Pulse
from rushes_api.readiness import Readiness
from rushes_api.watch import Watcher
from rushes_api.webhooks import Webhooks


class State(TypedDict):
    """What the lifespan makes and every request sees."""

    settings: Settings
    keys: ApiKeys
    request_limits: RequestLimits
    model: ServedModel
    model_created: int
    sessions: async_sessionmaker[AsyncSession]
    lookup: Lookup
    intake: Intake
    pulse: Pulse
    pauses: Pauses
    forecast: Forecast
    store: ObjectStore
    store_limiter: CapacityLimiter
    """Threads that may wait for the store: a frozen one must not take those that other requests need."""
    uploads: CapacityLimiter
    archives: CapacityLimiter
    """Files that may be on their way into the store at once: each has a part of it on the scratch disk."""
    readiness: Readiness
    watcher: Watcher
    metrics: Metrics
    webhooks: Webhooks


# what many requests need calls this and `caller_of`: for FastAPI to resolve a dependency takes longer than most take
def state_of(request: Request) -> State:
    """What the lifespan made."""
    return cast("State", request.scope["state"])


async def _session(request: Request) -> AsyncGenerator[AsyncSession]:
    async with state_of(request)["sessions"].begin() as session:  # commits on success, rolls back on error
        yield session


# asynchronous although it waits for nothing: FastAPI runs plain functions in threads
async def _app_state(request: Request) -> State:
    return state_of(request)


_CALLER = "rushes_caller"


async def _any_caller(request: Request) -> Caller:
    known: Caller | None = request.scope.get(_CALLER)
    if known is not None:
        return known
    state = state_of(request)
    caller = await state["keys"].caller(request.headers.getlist("authorization"))
    if caller.requests_per_minute is not None:
        standing = await state["request_limits"].count(caller.api_key, per_minute=caller.requests_per_minute)
        request.scope[ANSWER_HEADERS] = standing.headers
        if standing.is_over:
            raise standing.error()
    request.scope[_CALLER] = caller
    return caller


async def caller_of(request: Request) -> Caller:
    """Who may read, where the request reads, or change videos, where it changes something.

    Raises:
        ApiError: nobody who may.
    """
    caller = await _any_caller(request)
    return _with_scope(caller, keys.READ if request.method in ("GET", "HEAD") else keys.WRITE)


async def _webhook_caller(request: Request) -> Caller:
    return _with_scope(await _any_caller(request), keys.WEBHOOKS)


async def _file_caller(request: Request) -> Caller:
    return _with_scope(await _any_caller(request), keys.BATCHES)


async def _admin(request: Request) -> Caller:
    return _with_scope(await _any_caller(request), keys.ADMIN)


async def _scraper(request: Request) -> None:
    if not state_of(request)["settings"].metrics_open:
        await _admin(request)


def _with_scope(caller: Caller, scope: str) -> Caller:
    if scope not in caller.scopes:
        raise InsufficientScope(scope)
    return caller


CurrentCaller = Annotated[Caller, Depends(caller_of)]
"""Who may read, where the request reads, or change videos, where it changes something."""
FileCaller = Annotated[Caller, Depends(_file_caller)]
WebhookCaller = Annotated[Caller, Depends(_webhook_caller)]
AdminCaller = Annotated[Caller, Depends(_admin)]
MAY_SCRAPE = Depends(_scraper)
"""Refuses whoever may not see the figures for Prometheus."""
AnyCaller = Annotated[Caller, Depends(_any_caller)]
"""Whoever has a key that works, whatever it may do."""


async def _project(request: Request) -> str:
    return (await caller_of(request)).project


AppState = Annotated[State, Depends(_app_state)]
# scope="function": commit before the response leaves, not after it (FastAPI's default).
Session = Annotated[AsyncSession, Depends(_session, scope="function")]
CurrentProject = Annotated[str, Depends(_project)]


async def find_job(video_id: str, *, project: str, session: AsyncSession) -> Job:
    """The job of this project with this id.

    Raises:
        JobNotFound, JobDeleted
    """
    found = None
    if is_video_id(video_id):
        found = (await session.execute(jobs.get(video_id, project=project))).scalar_one_or_none()
    return visible(found, video_id)


def visible(job: Job | None, video_id: str) -> Job:
    """`job`, which was looked for under this id, if it may be shown.

    Raises:
        JobNotFound, JobDeleted
    """
    if job is None:
        raise no_such_video(video_id)
    if job.deleted_at is not None:
        raise JobDeleted(f"{job.id} was deleted")
    return job


async def _job(video_id: str, request: Request) -> Job:
    project = (await caller_of(request)).project
    found = await state_of(request)["lookup"].job(video_id, project=project) if is_video_id(video_id) else None
    return visible(found, video_id)


CurrentJob = Annotated[Job, Depends(_job)]
"""The job in the path, as it is committed, without a session."""


def no_such_video(video_id: str) -> JobNotFound:
    return JobNotFound(f"no video with id {printable(video_id)}")


async def _well_formed(video_id: str, request: Request) -> str:
    await caller_of(request)
    if not is_video_id(video_id):
        raise no_such_video(video_id)
    return video_id


WellFormedId = Annotated[str, Depends(_well_formed)]
"""The id in the path, which may or may not be one of a job."""


QUERY_NAMES: dict[Callable[..., Any], tuple[str, ...]] = {}
"""The parameters that each dependency made by `query` takes, for the description of the API."""
SCOPES_NEEDED: dict[Callable[..., Any], str] = {
    caller_of: "videos",
    _project: "videos",
    _job: "videos",
    _well_formed: "videos",
    _file_caller: keys.BATCHES,
    _webhook_caller: keys.WEBHOOKS,
    _admin: keys.ADMIN,
    _scraper: keys.ADMIN,
    _any_caller: "",
}
"""The scope that each dependency asks for; `videos` is `videos:read` or `videos:write`."""


_IN_MAP = re.compile(r"(\w+)\[.*\]", re.DOTALL)


def query(*names: str, several: Collection[str] = ()) -> Callable[[Request], Coroutine[Any, Any, Mapping[str, str]]]:
    """A dependency that gives the query's parameters and refuses those not in `names`, and repeated ones.

    `metadata[]` in `names` stands for every `metadata[key]`. Those in `several` may be repeated: they are joined by
    commas.
    """

    async def parameters(request: Request) -> Mapping[str, str]:
        values: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            in_map = _IN_MAP.fullmatch(name)
            if (name if in_map is None else f"{in_map[1]}[]") not in names:
                raise _unknown_parameter(name)
            if name in values and name in several:
                value = f"{values[name]},{value}"
            elif name in values:
                shown_name = printable(name)
                raise ApiError(f"{shown_name} is given twice", param=shown_name, code="duplicate_parameter")
            values[name] = value
        return values

    QUERY_NAMES[parameters] = names
    return parameters


def _unknown_parameter(name: str) -> ApiError:
    shown_name = printable(name)
    return ApiError(f"unknown query parameter: {shown_name}", param=shown_name, code="unknown_parameter")


NoQuery = Annotated[Mapping[str, str], Depends(query())]
