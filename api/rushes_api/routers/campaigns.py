"""Campaigns: batches, with everything that is not OpenAI's."""

from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from rushes_core.campaigns import statements
from rushes_core.campaigns.options import CampaignChanges, CampaignRequest, PauseRequest, RetryRequest
from rushes_core.campaigns.statements import PARTS
from rushes_core.campaigns.view import Batch, CampaignItem, item_of, line_of_id
from rushes_core.content_disposition import content_disposition
from rushes_core.models import Job
from rushes_core.parsing import parse_as
from rushes_core.states import JobState, states_with_status
from rushes_core.video import Video, video_of

from rushes_api import campaign_changes as changes
from rushes_api.admin import json_body
from rushes_api.admission import KEY_HEADER
from rushes_api.answer import answer
from rushes_api.body import JSON, MULTIPART
from rushes_api.campaign_archive import MAX_CLIPS, Archive, SeatedResponse
from rushes_api.campaign_options import OPTION_PARAMETERS
from rushes_api.campaign_pages import Chosen, items, manifest
from rushes_api.campaign_view import NO_MEMBERS, BatchId, CurrentCampaign, SentMembers, batch_in
from rushes_api.campaigns import FORMATS, INLINE, submit
from rushes_api.deps import AppState, FileCaller, NoQuery, Session, State, query
from rushes_api.errors import ApiError, responses
from rushes_api.once import SentKey
from rushes_api.page import Page, is_set, one_of, wanted_page
from rushes_api.routers.batches import BATCH_RESPONSES, LIST_PARAMETERS, SUBMIT_RESPONSES, BatchList, listed

router = APIRouter(prefix="/v1/campaigns", tags=["campaigns"])

_STATUSES = tuple(dict.fromkeys(state.public_status for state in JobState))
_CHANGED = BATCH_RESPONSES | responses("invalid_state")
_WITH_KEY: dict[str, Any] = {"parameters": [KEY_HEADER]}


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = CampaignRequest.model_json_schema() | {"title": "NewCampaign"}
    lines = {"type": "array", "minItems": 1, "items": {"type": "object"}, "description": "The lines themselves"}
    return schema | {"properties": schema["properties"] | {INLINE: lines}}


def _form_schema() -> dict[str, Any]:
    schema: dict[str, Any] = CampaignRequest.model_json_schema() | {"title": "NewCampaignFile"}
    members = {name: one for name, one in schema["properties"].items() if name not in ("input_file_id", "endpoint")}
    return schema | {
        "properties": {"file": {"type": "string", "format": "binary"}, **members},
        "required": ["file"],
    }


_EXAMPLE: dict[str, Any] = {
    "name": "Tuesday night",
    INLINE: [{"custom_id": "shot-001", "prompt": "Waves roll against a lighthouse at dusk", "seconds": "5"}],
    "defaults": {"size": "1344x768"},
    "window": {"timezone": "Europe/Berlin", "days": ["mo", "tu"], "start": "22:00", "end": "06:00"},
    "budget": {"gpu_seconds": 90_000},
    "proof": {"count": 4, "auto_continue_after": "30m"},
}
_CREATE: dict[str, Any] = {
    "parameters": [KEY_HEADER],
    "requestBody": {
        "required": True,
        "description": "The options as JSON with the id of a file, or with the lines in it; a form with the file; or "
        "the file itself, with the options in the query. A body that is the file may be packed, `Content-Encoding: "
        "gzip`.",
        "content": {
            JSON: {"schema": _schema(), "example": _EXAMPLE},
            MULTIPART: {"schema": _form_schema()},
            **{
                media_type: {"schema": {"title": f"Lines{number}", "type": "string", "format": "binary"}}
                for number, media_type in enumerate(FORMATS)
            },
        },
    },
}


class ItemList(Page[CampaignItem]):
    """One page in the order of lines."""


class BatchDeleted(BaseModel):
    """A campaign that is gone, or with `dry_run` what would go."""

    id: str
    object: Literal["batch.deleted"]
    deleted: bool
    jobs: int | None
    """Null where they were not counted."""
    clips: int | None
    bytes: int | None
    estimated: bool
    """They were not counted one by one: `jobs` has those that were deleted singly, too, and `clips` and `bytes` go by
    some of them."""


@router.post("", response_model=Batch, responses=SUBMIT_RESPONSES, openapi_extra=_CREATE)
async def create_campaign(
    request: Request,
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*OPTION_PARAMETERS))],
    key: SentKey,
    state: AppState,
) -> Response:
    """Accept a campaign. It is committed before this is answered, and its lines are read afterwards."""
    return await submit(request, caller=caller, key=key, query=parameters, state=state, is_batch=False)


@router.get("", response_model=BatchList)
async def list_campaigns(
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*LIST_PARAMETERS))],
    session: Session,
    state: AppState,
) -> Response:
    return await listed(parameters, project=caller.project, session=session, state=state)


@router.get("/{batch_id}", response_model=Batch, responses=BATCH_RESPONSES)
async def get_campaign(campaign: CurrentCampaign, caller: FileCaller, _: NoQuery, state: AppState) -> Response:
    async with state["sessions"].begin() as session:
        return answer(await batch_in(session, campaign, state))


@router.patch(
    "/{batch_id}",
    response_model=Batch,
    responses=_CHANGED | responses("priority_not_allowed"),
    openapi_extra=json_body(CampaignChanges.model_json_schema(), required=False),
)
async def change_campaign(
    batch_id: BatchId, request: Request, caller: FileCaller, _: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Change it while it runs: what is absent stays, what is null is taken away. Felt at the next claim."""
    return await changes.patch(batch_id, members, request, caller=caller, state=state)


@router.post(
    "/{batch_id}/pause",
    response_model=Batch,
    responses=_CHANGED,
    openapi_extra=_WITH_KEY | json_body(PauseRequest.model_json_schema(), required=False),
)
async def pause_campaign(
    batch_id: BatchId,
    request: Request,
    caller: FileCaller,
    _: NoQuery,
    key: SentKey,
    members: SentMembers,
    state: AppState,
) -> Response:
    """Have no more of its jobs start. What runs is finished, or with `drain` false given back."""
    wanted = parse_as(PauseRequest, members)
    return await changes.pause(batch_id, wanted, request, caller=caller, key=key, state=state)


@router.post(
    "/{batch_id}/resume",
    response_model=Batch,
    responses=_CHANGED,
    dependencies=[NO_MEMBERS],
    openapi_extra=_WITH_KEY,
)
async def resume_campaign(
    batch_id: BatchId, request: Request, caller: FileCaller, _: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Let its jobs start again."""
    return await changes.resume(batch_id, request, caller=caller, key=key, state=state)


@router.post(
    "/{batch_id}/cancel",
    response_model=Batch,
    responses=_CHANGED,
    dependencies=[NO_MEMBERS],
    openapi_extra=_WITH_KEY,
)
async def cancel_campaign(
    batch_id: BatchId, request: Request, caller: FileCaller, _: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Have no more of its jobs start, cancel those that wait, and ask those that run to stop."""
    return await changes.cancel(batch_id, request, caller=caller, key=key, state=state)


@router.post(
    "/{batch_id}/approve",
    response_model=Batch,
    responses=_CHANGED,
    dependencies=[NO_MEMBERS],
    openapi_extra=_WITH_KEY,
)
async def approve_campaign(
    batch_id: BatchId, request: Request, caller: FileCaller, _: NoQuery, key: SentKey, state: AppState
) -> Response:
    """Let what waits for the proof go on."""
    return await changes.approve(batch_id, request, caller=caller, key=key, state=state)


@router.post(
    "/{batch_id}/retry_failed",
    response_model=Batch,
    responses=_CHANGED,
    openapi_extra=_WITH_KEY | json_body(RetryRequest.model_json_schema(), required=False),
)
async def retry_failed(
    batch_id: BatchId,
    request: Request,
    caller: FileCaller,
    _: NoQuery,
    key: SentKey,
    members: SentMembers,
    state: AppState,
) -> Response:
    """Queue failed jobs again, each in place: the same id, a new generation. Lines that could not become jobs stay as
    they are. `retrying` is true while some are left."""
    wanted = parse_as(RetryRequest, members)
    return await changes.retry(batch_id, wanted, request, caller=caller, key=key, state=state)


@router.delete("/{batch_id}", response_model=BatchDeleted, responses=BATCH_RESPONSES)
async def delete_campaign(
    batch_id: BatchId,
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query("dry_run"))],
    session: Session,
) -> Response:
    """Hide it, its jobs and its output files for good; one that goes on is cancelled first. Clips are removed from the
    store afterwards. The file that it was made from stays unless it came in the request that made it. Repeated, it
    answers alike. With `dry_run`, nothing happens.
    """
    is_dry = is_set("dry_run", parameters)
    found: dict[str, Any] = {"jobs": None, "clips": None, "bytes": None, "estimated": False}
    if is_dry:
        found = await changes.would_delete(batch_id, caller=caller, session=session)
    else:
        await changes.delete(batch_id, caller=caller, session=session)
    return answer(BatchDeleted(id=batch_id, object="batch.deleted", deleted=not is_dry, **found))


@router.get("/{batch_id}/items", response_model=ItemList, responses=BATCH_RESPONSES)
async def list_items(
    campaign: CurrentCampaign,
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query("after", "limit", "status"))],
    session: Session,
) -> Response:
    """Its lines, those that could not become jobs too, as far as they are."""
    wanted = wanted_page(parameters, key_of=line_of_id, what="an item", descending=False)
    chosen = Chosen(None, True)
    if "status" in parameters:
        words = [one_of("status", word, _STATUSES) for word in parameters["status"].split(",")]
        states = dict.fromkeys(state for word in words for state in states_with_status(word))
        chosen = Chosen(tuple(states), "failed" in words)
    found, _ = await items(session, campaign.id, chosen, after=wanted.after or 0, limit=wanted.limit + 1)
    return answer(ItemList.of(found, item_of, limit=wanted.limit))


_JSONL = "application/jsonl"
_CSV = "text/csv"
_MANIFEST: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {_JSONL: {"schema": {"type": "string"}}, _CSV: {"schema": {"type": "string"}}},
        "description": "One line for each item: as in OpenAI's output and error files, or a table. In the table, text "
        "that a spreadsheet would take for a formula has an apostrophe before it.",
    },
    **BATCH_RESPONSES,
}


@router.head("/{batch_id}/manifest", include_in_schema=False)
@router.get("/{batch_id}/manifest", response_class=Response, responses=_MANIFEST)
async def get_manifest(
    campaign: CurrentCampaign,
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query("format", "part"))],
    request: Request,
    state: AppState,
) -> Response:
    """Its items as they are now, while it runs and afterwards."""
    form = one_of("format", parameters.get("format", "jsonl"), ("jsonl", "csv"))
    part = one_of("part", parameters.get("part", "all"), tuple(PARTS))
    is_csv = form == "csv"
    pieces = manifest(state["sessions"], campaign.id, Chosen.part(part), is_csv=is_csv, show=_shown(state))
    headers = {
        "Content-Disposition": content_disposition(f"{campaign.id}-{part}.{form}", kind="attachment"),
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    return _streamed(pieces, request, headers=headers, media_type=_CSV if is_csv else _JSONL)


_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
        "description": "Every clip that there is, named after its `custom_id`, `manifest.csv`, and `missing.csv` if "
        "some could not be had",
    },
    **BATCH_RESPONSES,
    **responses("archive_too_large", "overloaded", "storage_unavailable"),
}


@router.head("/{batch_id}/archive", include_in_schema=False)
@router.get("/{batch_id}/archive", response_class=Response, responses=_ARCHIVE)
async def get_archive(
    campaign: CurrentCampaign, caller: FileCaller, _: NoQuery, request: Request, state: AppState
) -> Response:
    """Its clips in one file, while it runs and afterwards. It is made as it is sent: its size is not known before."""
    async with state["sessions"].begin() as session:
        row = (await session.execute(statements.counts([campaign.id]))).one_or_none()
    num_clips = 0 if row is None else statements.counts_of(row).completed
    if num_clips > MAX_CLIPS:
        raise ApiError(
            f"an archive may have {MAX_CLIPS} clips, and {campaign.id} has {num_clips}; fetch them one by one, as "
            "`rushes campaign download` does",
            code="archive_too_large",
            status=HTTPStatus.CONFLICT,
        )
    archive = Archive(
        campaign,
        sessions=state["sessions"],
        store=state["store"],
        show=_shown(state),
        limiter=state["store_limiter"],
    )
    headers = {
        "Content-Disposition": content_disposition(f"{campaign.name or campaign.id}.zip", kind="attachment"),
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    if request.method == "HEAD":
        return _head(headers=headers, media_type="application/zip")
    return SeatedResponse(state["archives"], archive.stream(), headers=headers, media_type="application/zip")


def _streamed(
    pieces: AsyncIterator[bytes], request: Request, *, headers: Mapping[str, str], media_type: str
) -> Response:
    """`pieces`, or for HEAD none of them: nothing is made of what is not begun."""
    if request.method == "HEAD":
        return _head(headers=headers, media_type=media_type)
    return StreamingResponse(pieces, HTTPStatus.OK, headers=headers, media_type=media_type)


def _head(*, headers: Mapping[str, str], media_type: str) -> Response:
    """The head of what is made as it is sent, without a length."""

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    return StreamingResponse(nothing(), HTTPStatus.OK, headers=headers, media_type=media_type)


def _shown(state: State) -> Any:
    model, retention_days = state["model"], state["settings"].retention_days

    def show(job: Job) -> Video:
        return video_of(job, model, retention_days=retention_days)

    return show
