"""What waits, and for how long; pausing it and resuming."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import backlog, keys
from rushes_core.fields import PRIORITIES
from rushes_core.models import Job
from rushes_core.moment import unix_or_none
from rushes_core.states import JobState
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import no_such_project
from rushes_api.admission import NO_BODY
from rushes_api.auth import Caller
from rushes_api.deps import AppState, CurrentCaller, State, query
from rushes_api.errors import InsufficientScope
from rushes_api.eta import Outlook
from rushes_api.once import Call, take_effect

router = APIRouter(prefix="/v1/queue", tags=["queue"])


class QueueClass(BaseModel):
    """The jobs of one class."""

    priority: str
    queued: int
    in_progress: int
    reasons: dict[str, int]
    """Of the queued jobs, those that may not be claimed yet: `paused`, `drained`, `not_before`, `concurrency`,
    `campaign`."""
    oldest_waiting_s: float | None
    """Since when the first job might have been claimed."""


class QueueObject(BaseModel):
    """What waits and runs, of one project or of all (`*`). Very long queues are counted up to a bound."""

    object: Literal["queue"]
    project: str
    paused: bool
    paused_at: int | None
    queued: int
    in_progress: int
    reasons: dict[str, int]
    classes: list[QueueClass]
    oldest_waiting_s: float | None
    empty_at: int | None
    """About when the last of the queued jobs will have started; null while none waits, or nobody knows."""


async def _project(
    parameters: Annotated[Mapping[str, str], Depends(query("project"))], caller: CurrentCaller, state: AppState
) -> str:
    wanted = parameters.get("project", caller.project)
    if wanted == caller.project:
        return wanted
    if keys.ADMIN not in caller.scopes:
        raise InsufficientScope(keys.ADMIN)
    if wanted != backlog.EVERYBODY and not await _is_there(wanted, state):
        raise no_such_project(wanted)
    return wanted


async def _is_there(project: str, state: State) -> bool:
    if not keys.is_project(project):
        return False
    async with state["sessions"].begin() as session:
        return (await session.execute(keys.project(project))).first() is not None


WantedProject = Annotated[str, Depends(_project)]
_RESPONSES: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such project"}}


@router.get("", responses=_RESPONSES)
async def get_queue(project: WantedProject, state: AppState) -> QueueObject:
    """What waits and runs, by class and by what it waits for."""
    async with state["sessions"].begin() as session:
        return await _view(project, session, state)


@router.post("/pause", response_model=QueueObject, dependencies=[NO_BODY], responses=_RESPONSES)
async def pause_queue(request: Request, caller: CurrentCaller, project: WantedProject, state: AppState) -> Response:
    """Have no more jobs start until the queue is resumed. What a worker holds already goes on."""

    async def pause(session: AsyncSession) -> QueueObject:
        await session.execute(backlog.pause_queue(project))
        return await _view(project, session, state)

    return await _change(pause, "pause", request=request, caller=caller, state=state)


@router.post("/resume", response_model=QueueObject, dependencies=[NO_BODY], responses=_RESPONSES)
async def resume_queue(request: Request, caller: CurrentCaller, project: WantedProject, state: AppState) -> Response:
    """Let jobs start again. A project stays paused while all are."""

    async def resume(session: AsyncSession) -> QueueObject:
        await session.execute(backlog.resume_queue(project))
        return await _view(project, session, state)

    return await _change(resume, "resume", request=request, caller=caller, state=state)


async def _change(effect: Any, name: str, *, request: Request, caller: Caller, state: State) -> Response:
    call = Call(caller, f"POST /v1/queue/{name}", None, "", is_harmless=True)
    return await take_effect(call, effect, request=request, sessions=state["sessions"])


async def _view(project: str, session: AsyncSession, state: State) -> QueueObject:
    is_all = project == backlog.EVERYBODY
    rows = (await session.execute(backlog.overview(None if is_all else project))).all()
    pauses = (await session.execute(backlog.queue_pauses(project))).scalars().all()
    obstacle = "paused" if pauses else "drained" if state["forecast"].is_drained else None
    classes = [
        _class([row for row in rows if row.priority == value], name, obstacle=obstacle)
        for name, value in PRIORITIES.items()
    ]
    queued, reasons = sum(each.queued for each in classes), _sum(each.reasons for each in classes)
    waiting = [each.oldest_waiting_s for each in classes if each.oldest_waiting_s is not None]
    outlook = state["forecast"].outlook
    empty_at = None
    if outlook is not None and queued and not reasons:
        num_ahead = queued if is_all else await _num_ahead_of_newcomer(project, session, state)
        empty_at = _empty_at(outlook, num_ahead)
    return QueueObject(
        object="queue",
        project=project,
        paused=bool(pauses),
        paused_at=unix_or_none(min((pause.paused_at for pause in pauses), default=None)),
        queued=queued,
        in_progress=sum(each.in_progress for each in classes),
        reasons=reasons,
        classes=classes,
        oldest_waiting_s=max(waiting, default=None),
        empty_at=empty_at,
    )


def _class(rows: Sequence[Any], name: str, *, obstacle: str | None) -> QueueClass:
    """The class of `rows`; `obstacle`: why none of its jobs may be claimed, whatever each waits for itself."""
    queued = [row for row in rows if row.state == JobState.QUEUED]
    reasons: Counter[str] = Counter()
    for row in queued:
        if row.hold is not None:
            reasons[row.hold] += row.num_jobs
        else:
            reasons["not_before"] += row.num_early
            why = "paused" if row.is_paused else obstacle
            if why is not None:
                reasons[why] += row.num_jobs - row.num_early
    waiting = [row.waiting_seconds for row in queued if row.waiting_seconds is not None]
    return QueueClass(
        priority=name,
        queued=sum(row.num_jobs for row in queued),
        in_progress=sum(row.num_jobs for row in rows if row.state != JobState.QUEUED),
        reasons=_sum([reasons]),
        oldest_waiting_s=max(waiting, default=None),
    )


def _sum(each: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for reasons in each:
        total.update(reasons)
    return {name: count for name, count in sorted(total.items()) if count}


async def _num_ahead_of_newcomer(project: str, session: AsyncSession, state: State) -> int:
    """Jobs that would be before one of the least urgent class that this project sent now."""
    now: datetime = (await session.execute(select(func.now()))).scalar_one()
    newcomer = Job(
        id="~", project=project, model=state["model"].name, priority=max(PRIORITIES.values()), run_at=now, hold=None
    )
    return (await session.execute(backlog.num_ahead(newcomer))).scalar_one()


def _empty_at(outlook: Outlook, num_ahead: int) -> int | None:
    seconds = outlook.wait_seconds(num_ahead)
    if seconds is None:
        return None
    return math.ceil(max(outlook.now(), outlook.at + timedelta(seconds=seconds)).timestamp())
