"""What is done with a campaign after it was accepted. Each is one transaction that takes the same time whatever the
campaign's size: what is open of it is closed there and then, and the rest follows by itself."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from rushes_core import files
from rushes_core.campaigns import closing, events, feeder, statements
from rushes_core.campaigns.options import CampaignChanges, PauseRequest, RetryRequest
from rushes_core.campaigns.statements import CHANGED_AT_ONCE, ENDED_STATES, OPEN_STATES
from rushes_core.campaigns.tables import Campaign
from rushes_core.errors import TransitionRefused
from rushes_core.fields import PRIORITIES
from sqlalchemy import case, func, null, select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.auth import Caller
from rushes_api.campaign_view import batch_in, find_campaign, lock_campaign, no_such_batch
from rushes_api.deps import State
from rushes_api.once import Call, fingerprint, take_effect
from rushes_api.quota import check_priority

Change = Callable[[AsyncSession, Campaign], Awaitable[Any]]
"""Changes a campaign that is locked, in its transaction. Run again after its own commit, it changes nothing more."""

_STOPPABLE = (*OPEN_STATES, "finalizing")


async def _change(
    campaign_id: str,
    change: Change,
    request: Request,
    *,
    name: str,
    caller: Caller,
    key: str | None,
    state: State,
    wanted: BaseModel | None = None,
) -> Response:
    async def effect(session: AsyncSession) -> BaseModel:
        campaign = await lock_campaign(campaign_id, project=caller.project, session=session)
        await change(session, campaign)
        await session.refresh(campaign)
        return await batch_in(session, campaign, state)

    route = f"{name} /v1/batches/{campaign_id}"
    call = Call(caller, route, key, fingerprint(wanted), is_harmless=True)
    return await take_effect(call, effect, request=request, sessions=state["sessions"])


def _check_state(campaign: Campaign, *, what: str, states: tuple[str, ...] = OPEN_STATES) -> None:
    """
    Raises:
        TransitionRefused
    """
    if campaign.state not in states:
        raise TransitionRefused(f"{campaign.id} is {campaign.state}: it cannot be {what}")


async def patch(
    campaign_id: str, members: Mapping[str, Any], request: Request, *, caller: Caller, state: State
) -> Response:
    """Change what was asked for. What is open of it is opened again as it is now wanted."""
    wanted, columns = CampaignChanges.parse(members)
    if wanted.priority is not None:
        check_priority(PRIORITIES[wanted.priority], caller=caller)

    async def change(session: AsyncSession, campaign: Campaign) -> None:
        if not columns:
            return
        if columns.keys() - {"name", "metadata_"}:
            _check_state(campaign, what="changed but for its name and metadata")
        await session.execute(statements.change(campaign_id, **columns))
        if columns.keys() - {"name", "metadata_"}:
            await session.execute(feeder.close_open(campaign_id))

    return await _change(campaign_id, change, request, name="PATCH", caller=caller, key=None, state=state)


async def pause(
    campaign_id: str, wanted: PauseRequest, request: Request, *, caller: Caller, key: str | None, state: State
) -> Response:
    async def change(session: AsyncSession, campaign: Campaign) -> None:
        _check_state(campaign, what="paused")
        if campaign.paused_at is None:
            values = {"paused_at": func.now(), "pause_reason": "request", "hold_reason": "paused"}
            await session.execute(statements.change(campaign_id, **values))
            await session.execute(feeder.close_open(campaign_id))
            await session.execute(events.tell(campaign_id, "batch.paused", {"reason": "request"}))
        if wanted.drain is False:
            await session.execute(feeder.stop_running(campaign_id))

    return await _change(campaign_id, change, request, name="pause", caller=caller, key=key, state=state, wanted=wanted)


async def resume(campaign_id: str, request: Request, *, caller: Caller, key: str | None, state: State) -> Response:
    async def change(session: AsyncSession, campaign: Campaign) -> None:
        _check_state(campaign, what="resumed")
        if campaign.paused_at is not None:
            await session.execute(feeder.resume(campaign_id))

    return await _change(campaign_id, change, request, name="resume", caller=caller, key=key, state=state)


async def approve(campaign_id: str, request: Request, *, caller: Caller, key: str | None, state: State) -> Response:
    async def change(session: AsyncSession, campaign: Campaign) -> None:
        _check_state(campaign, what="approved")
        if campaign.proof_count is None:
            raise TransitionRefused(f"{campaign.id} has no proof that could be approved")
        if campaign.proof_state != "approved":
            reason = case((Campaign.hold_reason == "approval", null()), else_=Campaign.hold_reason)
            await session.execute(statements.change(campaign_id, proof_state="approved", hold_reason=reason))

    return await _change(campaign_id, change, request, name="approve", caller=caller, key=key, state=state)


async def cancel(campaign_id: str, request: Request, *, caller: Caller, key: str | None, state: State) -> Response:
    async def change(session: AsyncSession, campaign: Campaign) -> None:
        if campaign.state in ("cancelling", "cancelled"):
            return
        _check_state(campaign, what="cancelled any more", states=_STOPPABLE)
        await _stop(session, campaign_id)

    return await _change(campaign_id, change, request, name="cancel", caller=caller, key=key, state=state)


async def retry(
    campaign_id: str, wanted: RetryRequest, request: Request, *, caller: Caller, key: str | None, state: State
) -> Response:
    """Queue failed jobs again: some at once, what is left after that by whoever loads campaigns."""
    before: float | None = None

    async def change(session: AsyncSession, campaign: Campaign) -> None:
        nonlocal before
        _check_state(campaign, what="retried", states=(*OPEN_STATES, *ENDED_STATES, "finalizing"))
        include = bool(wanted.include_cancelled)
        found = statements.retryable(campaign_id, codes=wanted.codes, include_cancelled=include)
        if before is None:
            if not (await session.execute(found)).scalar_one():
                raise TransitionRefused(f"{campaign.id} has no jobs that this would retry")
            before = float((await session.execute(select(func.extract("epoch", func.now())))).scalar_one())
        # run again, it finds the jobs that the first run did not queue
        ask = statements.ask_retry(
            campaign_id,
            codes=wanted.codes,
            include_cancelled=include,
            new_seeds=bool(wanted.new_seeds),
            before=before,
        )
        await session.execute(ask)
        retried: int = (await session.execute(statements.retry_some(campaign_id))).scalar_one()
        if retried < CHANGED_AT_ONCE:
            await session.execute(statements.retry_done(campaign_id))

    return await _change(
        campaign_id, change, request, name="retry_failed", caller=caller, key=key, state=state, wanted=wanted
    )


async def _stop(session: AsyncSession, campaign_id: str) -> None:
    for statement in closing.request_stop(campaign_id):
        await session.execute(statement)


async def delete(campaign_id: str, *, caller: Caller, session: AsyncSession) -> None:
    """Hide a campaign and its files for good; one that goes on is cancelled. Its jobs are deleted afterwards.

    Raises:
        ApiError: there never was one.
    """
    found = await session.execute(statements.lock(campaign_id, project=caller.project))
    campaign = found.scalar_one_or_none()
    if campaign is None:
        raise no_such_batch(campaign_id)
    if campaign.deleted_at is not None:
        return
    if campaign.state in _STOPPABLE:
        await _stop(session, campaign_id)
    await session.execute(statements.delete(campaign_id))
    await session.execute(statements.delete_input(campaign_id))
    for file_id in (campaign.output_file_id, campaign.error_file_id):
        if file_id is not None:
            await session.execute(files.delete_file(file_id, project=caller.project))


async def would_delete(campaign_id: str, *, caller: Caller, session: AsyncSession) -> dict[str, Any]:
    """What `delete` would take, in a time that does not go by the size of the campaign: the members of `BatchDeleted`.

    Raises:
        ApiError
    """
    await find_campaign(campaign_id, project=caller.project, session=session)
    row = (await session.execute(statements.counts([campaign_id]))).one_or_none()
    counts = statements.Counts() if row is None else statements.counts_of(row)
    num_jobs = counts.total - counts.invalid
    if num_jobs <= statements.COUNTED_AT_ONCE:
        jobs, clips, num_bytes = (await session.execute(statements.would_delete(campaign_id))).one()
        return {"jobs": jobs, "clips": clips, "bytes": num_bytes, "estimated": False}
    part, mean_bytes = (await session.execute(statements.sample_clips(campaign_id))).one()
    clips, num_bytes = round(counts.completed * part), round(counts.completed * mean_bytes)
    return {"jobs": num_jobs, "clips": clips, "bytes": num_bytes, "estimated": True}
