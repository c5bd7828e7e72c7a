"""Campaigns as this deployment shows them."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from rushes_core.campaigns import forecast, foresight, statements
from rushes_core.campaigns.statements import Counts, counts_of
from rushes_core.campaigns.tables import Campaign, CampaignForecast
from rushes_core.campaigns.view import Batch, CampaignEta, batch_of, eta_of
from rushes_core.fields import printable
from rushes_core.ids import is_campaign_id
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import read_members
from rushes_api.deps import AppState, FileCaller, State
from rushes_api.errors import ApiError

_FRESH = timedelta(seconds=3 * foresight.FORESEE_SECONDS)
"""How old a forecast may be that is taken for what is seen now."""


async def batch_in(session: AsyncSession, campaign: Campaign, state: State) -> Batch:
    """One campaign as it is now."""
    return (await batches_in(session, [campaign], state))[0]


async def batches_in(session: AsyncSession, campaigns: Sequence[Campaign], state: State) -> list[Batch]:
    """Campaigns as they are now."""
    rows = (await session.execute(statements.counts([one.id for one in campaigns]))).all()
    counts = {row.campaign_id: counts_of(row) for row in rows}
    etas = await _etas(session, campaigns, counts)
    return [batch_of(one, counts.get(one.id, Counts()), eta=etas.get(one.id)) for one in campaigns]


async def _etas(
    session: AsyncSession, campaigns: Sequence[Campaign], counts: Mapping[str, Counts]
) -> dict[str, CampaignEta | None]:
    """When those are done that go on, as a dispatcher foresaw a few seconds ago."""
    going_on = {one.id: one for one in campaigns if one.state == "in_progress" and one.loaded_at is not None}
    if not going_on:
        return {}
    foreseen = (await session.execute(foresight.current(list(going_on)))).scalars().all()
    now: datetime = (await session.execute(select(func.now()))).scalar_one()

    def eta(row: CampaignForecast) -> CampaignEta | None:
        left, used = foresight.left_of(row), counts.get(row.campaign_id, Counts()).gpu_seconds
        # what nobody has looked at for long begins when somebody reads of it
        made_at = row.made_at if now - row.made_at < _FRESH else now
        ends = forecast.ends_of(going_on[row.campaign_id], left, used_gpu_seconds=used, now=now, made_at=made_at)
        return eta_of(left, ends)

    return {row.campaign_id: eta(row) for row in foreseen}


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
