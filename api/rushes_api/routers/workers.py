"""The replicas that render. For keys with the scope `admin`."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import replicas
from rushes_core.fields import printable
from rushes_core.listed import Listed
from rushes_core.models import Job, Replica
from rushes_core.moment import unix_or_none
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.dml import ReturningUpdate

from rushes_api.admission import NO_BODY
from rushes_api.auth import Caller
from rushes_api.deps import AdminCaller, AppState, NoQuery, Session, State, query
from rushes_api.errors import ApiError
from rushes_api.once import Call, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page

router = APIRouter(prefix="/v1/workers", tags=["workers"])

_ID = re.compile(r"[A-Za-z0-9._-]{1,200}~[0-9]{1,10}-[0-9a-f]{1,16}", re.ASCII)


class Device(BaseModel):
    """What one rank runs on."""

    name: str
    memory_used_bytes: int
    """After its last job, or when its weights were loaded."""
    memory_total_bytes: int
    """Of the GPU, or of the process and the machine where there is none."""


class Checkpoint(BaseModel):
    """What a replica has loaded."""

    model_id: str
    revision: str | None
    """Hash of the export's content, or the revision that its base components are of."""


class WeightsLoading(BaseModel):
    """How far a replica's slowest rank is on the way to its first job."""

    stage: str
    """What it does now, for people."""
    percent: int | None
    """Of the weights; null before they are known."""
    gb_per_second: float | None
    """Of the rank's own share, lately."""
    seconds_left: float | None
    """Until all weights are loaded, at that rate."""


class Worker(Listed):
    """One replica: a supervisor and its ranks. Times are Unix seconds."""

    object: Literal["worker"]
    name: str
    """The same after a restart; `id` is not."""
    status: str
    """`starting`, `ready`, `busy`, `full`, `draining`, `drained` or `stopping` as it said last; `silent` when nothing
    was heard of it for `RUSHES_LEASE_SECONDS` and its jobs are given to others, `lost` when that is ten times as long
    ago. One that is `full` takes no jobs until there is room in its `RUSHES_SCRATCH`."""
    silent_seconds: int | None
    """Since it was heard of last, by the database's clock; null unless it is `silent` or `lost`."""
    model: str
    version: str | None
    """Of Rushes; null until it first had ranks."""
    pool: str
    layout: str
    checkpoint: Checkpoint | None
    """Null until it first had ranks."""
    precision: str | None
    """What its ranks compute in, for people; null while it has none."""
    devices: list[Device]
    job_id: str | None
    """On its ranks now."""
    stage: str | None
    """Of that job: `encoding`, `denoising`, `decoding`, `muxing`, `uploading`. `loading` while it loads."""
    loading: WeightsLoading | None
    """Null unless it loads."""
    started_at: int
    last_seen_at: int
    drain_requested_at: int | None
    rank_groups: int
    """That it has started, which is its epoch: 1 unless one ended."""
    restarts: int
    """Rank groups that took another's place."""
    failures_in_a_row: int
    """Rank groups that ended without a completed job between them."""
    trouble: str | None
    """Why the last one ended; null when another one is ready."""
    crashed_jobs: list[str]
    """Of the last half hour. With `RUSHES_DRAIN_AFTER_CRASHES` of them it drains itself."""


class WorkerList(Page[Worker]):
    """One page by id, from the first unless `order=desc` was asked for."""


@router.get("")
async def list_workers(
    caller: AdminCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS))],
    session: Session,
    state: AppState,
) -> WorkerList:
    """Every replica that has not stopped, a lost one for another hour."""
    wanted = wanted_page(parameters, key_of=_replica_id, what="a worker", descending=False)
    lease_seconds = state["settings"].lease_seconds
    known = replicas.up(seen_within_seconds=replicas.forgotten_after(lease_seconds))
    rows = (await session.execute(wanted.rows(known, Replica.id))).scalars().all()
    now = await _now(session)
    stages = await _stages(session, rows)
    return WorkerList.of(rows, lambda row: _worker(row, now, stages, lease_seconds), limit=wanted.limit)


@router.post("/{worker_id}/drain", response_model=Worker, dependencies=[NO_BODY])
async def drain_worker(
    worker_id: str, request: Request, caller: AdminCaller, parameters: NoQuery, state: AppState
) -> Response:
    """Have a replica finish the job on its ranks, give back what it has not started, and take no more."""
    return await _change(worker_id, "drain", replicas.request_drain, request=request, caller=caller, state=state)


@router.post("/{worker_id}/resume", response_model=Worker, dependencies=[NO_BODY])
async def resume_worker(
    worker_id: str, request: Request, caller: AdminCaller, parameters: NoQuery, state: AppState
) -> Response:
    """Have a replica take jobs again, also one that drained itself."""
    return await _change(worker_id, "resume", replicas.cancel_drain, request=request, caller=caller, state=state)


async def _change(
    worker_id: str, name: str, statement: Any, *, request: Request, caller: Caller, state: State
) -> Response:
    replica_id = _replica_id(worker_id)

    async def change(session: AsyncSession) -> Worker:
        found: Replica | None = None
        if replica_id is not None:
            update: ReturningUpdate[Replica] = statement(replica_id)
            found = (await session.execute(update)).scalar_one_or_none()
        if found is None:
            raise ApiError(f"no worker {printable(worker_id)}", code="worker_not_found", status=HTTPStatus.NOT_FOUND)
        stages = await _stages(session, [found])
        return _worker(found, await _now(session), stages, state["settings"].lease_seconds)

    call = Call(caller, f"POST /v1/workers/{worker_id}/{name}", None, "", is_harmless=True)
    return await take_effect(call, change, request=request, sessions=state["sessions"])


async def _now(session: AsyncSession) -> datetime:
    now: datetime = (await session.execute(select(func.now()))).scalar_one()
    return now


async def _stages(session: AsyncSession, rows: Sequence[Replica]) -> Mapping[tuple[str | None, str], str | None]:
    """The phases of the jobs on these replicas' ranks, by replica and job, but for those that they have lost."""
    job_ids = [row.job_id for row in rows if row.job_id is not None]
    if not job_ids:
        return {}
    held = select(Job.lease_owner, Job.id, Job.phase).where(Job.id.in_(job_ids), Job.lease_owner.is_not(None))
    return {(owner, job_id): phase for owner, job_id, phase in (await session.execute(held)).all()}


def _worker(
    replica: Replica, now: datetime, stages: Mapping[tuple[str | None, str], str | None], lease_seconds: float
) -> Worker:
    detail = replica.detail
    devices = detail.get("devices", [])
    checkpoint = detail.get("checkpoint")
    loading = detail.get("loading") if replica.state == "starting" else None
    job_id = replica.job_id if (replica.id, replica.job_id) in stages else None
    stage = None if job_id is None else stages[replica.id, job_id]
    unheard_seconds = (now - replica.last_seen).total_seconds()
    is_silent = unheard_seconds >= lease_seconds
    is_lost = unheard_seconds >= replicas.lost_after(lease_seconds)
    return Worker(
        id=replica.id.replace("#", "~"),
        object="worker",
        name=replicas.name_of(replica.id),
        status="lost" if is_lost else "silent" if is_silent else _status(replica),
        silent_seconds=int(unheard_seconds) if is_silent else None,
        model=replica.model,
        version=detail.get("version"),
        pool=replica.pool,
        layout=replica.layout,
        checkpoint=None if checkpoint is None else Checkpoint.model_validate(checkpoint),
        precision=devices[0].get("precision") if devices else None,
        devices=[
            Device(
                name=str(device["device"]),
                memory_used_bytes=device["memory_used_bytes"],
                memory_total_bytes=device["memory_total_bytes"],
            )
            for device in devices
        ],
        job_id=job_id,
        stage=stage if loading is None else "loading",
        loading=None if loading is None else WeightsLoading.model_validate(loading),
        started_at=int(replica.started_at.timestamp()),
        last_seen_at=int(replica.last_seen.timestamp()),
        drain_requested_at=unix_or_none(replica.drain_requested_at),
        rank_groups=replica.epoch,
        restarts=max(0, replica.epoch - 1),
        failures_in_a_row=int(detail.get("failures", 0)),
        trouble=detail.get("trouble"),
        crashed_jobs=[str(job_id) for job_id in detail.get("crashed_jobs", [])],
    )


def _status(replica: Replica) -> str:
    """Its state as it was told last, which it hears of with its next heartbeat."""
    is_asked_to_drain = replica.drain_requested_at is not None
    if is_asked_to_drain and replica.state in ("ready", "busy", "full"):
        return "draining"
    return "ready" if replica.state == "drained" and not is_asked_to_drain else replica.state


def _replica_id(worker_id: str) -> str | None:
    """A replica's id from one that a path can carry; None for what is no such id."""
    return worker_id.replace("~", "#") if _ID.fullmatch(worker_id) else None
