"""Campaigns as this deployment shows them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from rushes_core.campaigns import forecast, statements
from rushes_core.campaigns.statements import Counts, counts_of
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.view import Batch, CampaignEta, batch_of, eta_of
from rushes_core.fields import printable
from rushes_core.ids import is_campaign_id
from rushes_core.measured import RunTimes
from rushes_core.measured import measured as measured_times
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import read_members
from rushes_api.deps import AppState, FileCaller, State
from rushes_api.errors import ApiError


async def batch_in(session: AsyncSession, campaign: Campaign, state: State) -> Batch:
    """One campaign as it is now."""
    return (await batches_in(session, [campaign], state))[0]


async def batches_in(session: AsyncSession, campaigns: Sequence[Campaign], state: State) -> list[Batch]:
    """Campaigns as they are now."""
    rows = (await session.execute(statements.counts([one.id for one in campaigns]))).all()
    counts = {row.campaign_id: counts_of(row) for row in rows}
    etas = await _etas(session, campaigns, counts, state)
    return [batch_of(one, counts.get(one.id, Counts()), eta=etas.get(one.id)) for one in campaigns]


async def _etas(
    session: AsyncSession, campaigns: Sequence[Campaign], counts: Mapping[str, Counts], state: State
) -> dict[str, CampaignEta | None]:
    """When those are done that go on."""
    going_on = [
        one
        for one in campaigns
        if one.state == "in_progress" and one.loaded_at is not None and one.model == state["model"].name
    ]
    if not going_on:
        return {}
    measured = (await session.execute(measured_times(state["model"].name))).scalars().all()
    times = RunTimes.of(measured)
    if times.num_jobs < forecast.MIN_MEASURED:
        return {}
    wanted = forecast.capacities([one.id for one in going_on], seen_within_seconds=state["settings"].lease_seconds)
    capacities = {row[0]: forecast.Capacity(*row[1:]) for row in (await session.execute(wanted)).all()}
    now: datetime = (await session.execute(select(func.now()))).scalar_one()

    def eta(campaign: Campaign) -> CampaignEta | None:
        has = counts.get(campaign.id, Counts())
        left = {"num_jobs": has.queued + has.in_progress, "cost": has.remaining_cost}
        return eta_of(forecast.of_campaign(campaign, **left, times=times, capacity=capacities[campaign.id], now=now))

    return {one.id: eta(one) for one in going_on}


def no_such_batch(campaign_id: str) -> ApiError:
    return ApiError(f"no batch with id {printable(campaign_id)}", code="batch_not_found", status=HTTPStatus.NOT_FOUND)


def visible(campaign: Campaign | None, campaign_id: str) -> Campaign:
    """`campaign`, which was looked for under this id, if it may be shown.

    Raises:
        ApiError
    """
    if campaign is None:
        raise no_such_batch(campaign_id)
    if campaign.deleted_at is not None:
        raise ApiError(f"{campaign.id} was deleted", code="batch_deleted", status=HTTPStatus.GONE)
    return campaign


async def find_campaign(campaign_id: str, *, project: str, session: AsyncSession) -> Campaign:
    """The campaign of this project with this id.

    Raises:
        ApiError
    """
    found = None
    if is_campaign_id(campaign_id):
        found = (await session.execute(statements.get(campaign_id, project=project))).scalar_one_or_none()
    return visible(found, campaign_id)


async def lock_campaign(campaign_id: str, *, project: str, session: AsyncSession) -> Campaign:
    """The same; until the transaction ends, nobody else changes it.

    Raises:
        ApiError
    """
    return visible(
        (await session.execute(statements.lock(campaign_id, project=project))).scalar_one_or_none(), campaign_id
    )


async def _well_formed(batch_id: str, caller: FileCaller) -> str:
    if not is_campaign_id(batch_id):
        raise no_such_batch(batch_id)
    return batch_id


BatchId = Annotated[str, Depends(_well_formed)]
"""The id in the path, which may or may not be one of a campaign."""


async def _members(request: Request, caller: FileCaller, state: AppState) -> Mapping[str, Any]:
    return await read_members(request, state)


SentMembers = Annotated[Mapping[str, Any], Depends(_members)]
"""The members of the JSON object that was sent; none where there is no body."""


async def _no_members(members: SentMembers) -> None:
    name = next((printable(name) for name in members), None)
    if name is not None:
        raise ApiError(f"unknown parameter: {name}", param=name, code="unknown_parameter")


NO_MEMBERS = Depends(_no_members)


async def _campaign(batch_id: BatchId, caller: FileCaller, state: AppState) -> Campaign:
    # not the request's session: what follows may take long
    async with state["sessions"].begin() as session:
        return await find_campaign(batch_id, project=caller.project, session=session)


CurrentCampaign = Annotated[Campaign, Depends(_campaign)]
"""The campaign in the path, as it is committed, without a session."""
