"""OpenAI's Batches: a file of requests that are done in their own time. A batch and a campaign are one thing."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from rushes_core.campaigns import statements
from rushes_core.campaigns.options import ENDPOINT, CampaignRequest
from rushes_core.campaigns.statements import Filters
from rushes_core.campaigns.tables import STATES, Campaign
from rushes_core.campaigns.view import Batch
from rushes_core.ids import is_campaign_id
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import KEY_HEADER
from rushes_api.answer import answer
from rushes_api.body import JSON
from rushes_api.campaign_changes import cancel
from rushes_api.campaign_view import NO_MEMBERS, BatchId, CurrentCampaign, batch_in, batches_in
from rushes_api.campaigns import submit
from rushes_api.deps import AppState, FileCaller, NoQuery, Session, State, query
from rushes_api.errors import responses
from rushes_api.once import SentKey
from rushes_api.page import PAGE_PARAMETERS, Page, is_set, one_of, wanted_page
from rushes_api.video_filters import metadata_filter

router = APIRouter(prefix="/v1/batches", tags=["campaigns"])

LIST_PARAMETERS = (*PAGE_PARAMETERS, "status", "metadata[]", "dry_run")
SUBMIT_PARAMETERS = ("dry_run", "validate")
SUBMIT_RESPONSES = responses(
    "file_not_found", "model_not_found", "quota_exceeded", "queue_full", "priority_not_allowed", "file_deleted"
)
BATCH_RESPONSES = responses("batch_not_found", "batch_deleted")
_BODY: dict[str, Any] = {
    "parameters": [KEY_HEADER],
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": CampaignRequest.model_json_schema() | {"title": "NewBatch"},
                "example": {
                    "input_file_id": "file_01K0Z8W5T3N9F6Q2RJ4XCB7MEH",
                    "endpoint": ENDPOINT,
                    "completion_window": "24h",
                    "metadata": {"client": "acme"},
                },
            }
        },
    },
}


class BatchList(Page[Batch]):
    """One page, the newest first unless `order=asc` was asked for."""


@router.post("", response_model=Batch, responses=SUBMIT_RESPONSES, openapi_extra=_BODY)
async def create_batch(
    request: Request,
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*SUBMIT_PARAMETERS))],
    key: SentKey,
    state: AppState,
) -> Response:
    """Accept a batch of the requests in a file. It is committed before this is answered, and read afterwards."""
    return await submit(request, caller=caller, key=key, query=parameters, state=state, is_batch=True)


@router.get("", response_model=BatchList)
async def list_batches(
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*LIST_PARAMETERS))],
    session: Session,
    state: AppState,
) -> Response:
    return await listed(parameters, project=caller.project, session=session, state=state)


async def listed(parameters: Mapping[str, str], *, project: str, session: AsyncSession, state: State) -> Response:
    """One page of the campaigns of a project."""
    wanted = wanted_page(parameters, key_of=lambda one: one if is_campaign_id(one) else None, what="a batch")
    states = None
    if "status" in parameters:
        states = tuple(one_of("status", word, STATES) for word in parameters["status"].split(","))
    filters = Filters(states, metadata_filter(parameters), dry_runs=is_set("dry_run", parameters))
    statement = statements.listed(project=project, filters=filters)
    rows = (await session.execute(wanted.rows(statement, Campaign.id))).scalars().all()
    shown = await batches_in(session, rows, state)
    return answer(BatchList.of(shown, lambda one: one, limit=wanted.limit))


@router.get("/{batch_id}", response_model=Batch, responses=BATCH_RESPONSES)
async def get_batch(campaign: CurrentCampaign, caller: FileCaller, _: NoQuery, state: AppState) -> Response:
    async with state["sessions"].begin() as session:
        return answer(await batch_in(session, campaign, state))


@router.post(
    "/{batch_id}/cancel",
    response_model=Batch,
    responses=BATCH_RESPONSES | responses("invalid_state"),
    dependencies=[NO_MEMBERS],
    openapi_extra={"parameters": [KEY_HEADER]},
)
async def cancel_batch(
    batch_id: BatchId, request: Request, caller: FileCaller, _: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Have no more of its jobs start, cancel those that wait, and ask those that run to stop."""
    return await cancel(batch_id, request, caller=caller, key=key, state=state)
