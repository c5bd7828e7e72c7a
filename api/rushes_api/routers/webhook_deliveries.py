"""The log of webhooks: what was delivered, every attempt, and deliveries once more."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict
from rushes_core import keys
from rushes_core.errors import TransitionRefused
from rushes_core.fields import Moment, printable, shown
from rushes_core.ids import is_campaign_id, is_delivery_id, is_endpoint_id, is_video_id, new_delivery_id
from rushes_core.listed import Listed
from rushes_core.moment import unix_or_none
from rushes_core.webhooks import deliveries
from rushes_core.webhooks.events import BATCH_TYPES, EVENT_TYPES, EventTypes
from rushes_core.webhooks.tables import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import json_body
from rushes_api.admission import KEY_HEADER
from rushes_api.deps import AppState, NoQuery, Session, WebhookCaller, query
from rushes_api.errors import ApiError, responses
from rushes_api.once import Call, SentKey, fingerprint, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, one_of, wanted_page
from rushes_api.routers.webhook_endpoints import SentMembers, find_endpoint, refuse_unless_enabled

router = APIRouter(prefix="/v1/webhook_deliveries", tags=["webhooks"])

STATUSES = ("pending", "delivering", "delivered", "failed", "cancelled")
MAX_REPLAYED = 10_000
"""Deliveries that one replay makes, and those of events of the same moment as the last one."""


class AttemptObject(BaseModel):
    """One request. `error` is null when it was taken; `excerpt` is the beginning of the answer, at most 1 KB."""

    number: int
    at: int
    url: str | None
    """Where it went, without the query; null where nobody knows any more."""
    status_code: int | None
    error: str | None
    duration_ms: int | None
    excerpt: str | None


class DeliveryObject(Listed):
    object: Literal["webhook_delivery"]
    created_at: int
    kind: str
    """`event`, `redelivery`, `replay` or `test`."""
    event_id: str
    event_type: str
    sequence: int
    video_id: str | None
    batch_id: str | None
    """Of the campaign that the event itself tells of, not of a video's."""
    webhook_endpoint_id: str | None
    """Null for a job's own `webhook_url`."""
    url: str | None
    status: str
    num_attempts: int
    last_status_code: int | None
    last_error: str | None
    next_attempt_at: int | None
    finished_at: int | None


class DeliveryWithAttempts(DeliveryObject):
    attempts: list[AttemptObject]


class DeliveryList(Page[DeliveryObject]):
    """One page, the newest first unless `order=asc` was asked for."""


class Replay(BaseModel):
    """The body of `POST /v1/webhook_deliveries/replay`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    since: Moment
    until: Moment | None = None
    """Not included."""
    webhook_endpoint_id: str | None = None
    event_types: EventTypes = list(EVENT_TYPES)


class ReplayResult(BaseModel):
    object: Literal["webhook_replay"]
    count: int
    """Deliveries that were made."""
    has_more: bool
    next_since: str | None
    """Where to go on when there is more."""


def _object(row: tuple[WebhookDelivery, WebhookEndpoint]) -> DeliveryObject:
    return DeliveryObject(**_describe(*row))


def _describe(delivery: WebhookDelivery, endpoint: WebhookEndpoint) -> dict[str, Any]:
    is_of_batch = delivery.type in BATCH_TYPES
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "created_at": unix_or_none(delivery.created_at),
        "kind": delivery.kind,
        "event_id": delivery.event_id,
        "event_type": delivery.type,
        "sequence": delivery.sequence,
        "video_id": None if is_of_batch else delivery.job_id,
        "batch_id": delivery.job_id if is_of_batch else None,
        "webhook_endpoint_id": endpoint.id if endpoint.origin is None else None,
        "url": delivery.url or endpoint.url,
        "status": delivery.state,
        "num_attempts": delivery.attempts,
        "last_status_code": delivery.last_status,
        "last_error": delivery.last_error,
        "next_attempt_at": unix_or_none(delivery.next_at) if delivery.state == "pending" else None,
        "finished_at": unix_or_none(delivery.finished_at),
    }


def _with_attempts(
    delivery: WebhookDelivery, endpoint: WebhookEndpoint, attempts: Sequence[WebhookAttempt]
) -> DeliveryWithAttempts:
    log = [
        AttemptObject(
            number=one.number,
            at=int(one.at.timestamp()),
            url=one.url,
            status_code=one.status,
            error=one.error,
            duration_ms=one.duration_ms,
            excerpt=one.excerpt,
        )
        for one in attempts
    ]
    return DeliveryWithAttempts(**_describe(delivery, endpoint), attempts=log)


async def _find(delivery_id: str, *, project: str, session: AsyncSession) -> tuple[WebhookDelivery, WebhookEndpoint]:
    found = None
    if is_delivery_id(delivery_id):
        statement = deliveries.listed(project=project).where(WebhookDelivery.id == delivery_id)
        found = (await session.execute(statement)).first()
    if found is None:
        raise ApiError(
            f"no webhook delivery with id {printable(delivery_id)}",
            code="webhook_delivery_not_found",
            status=HTTPStatus.NOT_FOUND,
        )
    return found


@router.get("")
async def list_webhook_deliveries(
    caller: WebhookCaller,
    parameters: Annotated[
        Mapping[str, str], Depends(query(*PAGE_PARAMETERS, "video_id", "batch_id", "status", "webhook_endpoint_id"))
    ],
    session: Session,
) -> DeliveryList:
    wanted = wanted_page(parameters, key_of=_delivery_id, what="a webhook delivery")
    statement = deliveries.listed(project=caller.project)
    if "status" in parameters:
        statement = statement.where(deliveries.in_state(one_of("status", parameters["status"], STATUSES)))
    for name, is_id, column in (
        ("video_id", is_video_id, WebhookDelivery.job_id),
        ("batch_id", is_campaign_id, WebhookDelivery.job_id),
        ("webhook_endpoint_id", is_endpoint_id, WebhookDelivery.endpoint_id),
    ):
        if name in parameters:
            if not is_id(parameters[name]):
                raise ApiError(f"{name} must be an id of that kind, got {shown(parameters[name])}", param=name)
            statement = statement.where(column == parameters[name])
    rows = (await session.execute(wanted.rows(statement, WebhookDelivery.id))).all()
    return DeliveryList.of(rows, _object, limit=wanted.limit)


@router.get("/{delivery_id}")
async def get_webhook_delivery(
    delivery_id: str, caller: WebhookCaller, parameters: NoQuery, session: Session
) -> DeliveryWithAttempts:
    """One delivery with every attempt."""
    delivery, endpoint = await _find(delivery_id, project=caller.project, session=session)
    attempts = (await session.execute(deliveries.attempts(delivery.id))).scalars().all()
    return _with_attempts(delivery, endpoint, attempts)


@router.post(
    "/{delivery_id}/redeliver", response_model=DeliveryWithAttempts, openapi_extra={"parameters": [KEY_HEADER]}
)
async def redeliver_webhook(
    delivery_id: str,
    request: Request,
    caller: WebhookCaller,
    parameters: NoQuery,
    key: SentKey,
    members: SentMembers,
    state: AppState,
) -> Response:
    """Deliver the same event once more, to where it went, as a new delivery with a schedule of its own."""
    keys.parse(keys.Nothing, members)
    new_id = new_delivery_id()

    async def redeliver(session: AsyncSession) -> DeliveryWithAttempts:
        delivery, endpoint = await _find(delivery_id, project=caller.project, session=session)
        if delivery.kind == "test":
            raise TransitionRefused("a test event is sent once; send another test")
        refuse_unless_enabled(endpoint)
        if (await session.execute(deliveries.event_of(delivery.event_id))).first() is None:
            raise TransitionRefused(
                f"the event is not kept any more: events are for {deliveries.RETENTION_DAYS} days, or until the video "
                "or batch is deleted"
            )
        made = (await session.execute(deliveries.redeliver(delivery, new_id=new_id))).scalar_one_or_none()
        return _with_attempts(made or await session.get_one(WebhookDelivery, new_id), endpoint, [])

    call = Call(caller, f"POST /v1/webhook_deliveries/{delivery_id}/redeliver", key, fingerprint())
    return await take_effect(call, redeliver, request=request, sessions=state["sessions"])


@router.post(
    "/replay",
    response_model=ReplayResult,
    responses=responses("webhook_endpoint_not_found"),
    openapi_extra=json_body(Replay.model_json_schema()),
)
async def replay_webhooks(
    request: Request, caller: WebhookCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Deliver every event since a time once more to whoever is to be told of it now, the oldest first.

    What waits for delivery anyway is passed over, so that a repeated replay adds nothing to one that is under way.
    """
    wanted = keys.parse(Replay, members)
    until = wanted.until or datetime.now(UTC)
    if wanted.since >= until:
        raise ApiError(
            f"since must lie before until, got {wanted.since.isoformat()} and {until.isoformat()}", param="since"
        )

    async def replay(session: AsyncSession) -> ReplayResult:
        if wanted.webhook_endpoint_id is not None:
            endpoint = await find_endpoint(wanted.webhook_endpoint_id, project=caller.project, session=session)
            refuse_unless_enabled(endpoint)
        statement = deliveries.replay(
            project=caller.project,
            since=wanted.since,
            until=until,
            endpoint_id=wanted.webhook_endpoint_id,
            types=wanted.event_types,
            limit=MAX_REPLAYED,
        )
        made = (await session.execute(statement)).scalars().all()
        has_more = len(made) >= MAX_REPLAYED
        return ReplayResult(
            object="webhook_replay",
            count=len(made),
            has_more=has_more,
            # nothing of the last moment is left
            next_since=(made[-1] + timedelta(microseconds=1)).isoformat() if has_more else None,
        )

    call = Call(caller, "POST /v1/webhook_deliveries/replay", None, "", is_harmless=True)
    return await take_effect(call, replay, request=request, sessions=state["sessions"])


def _delivery_id(text: str) -> str | None:
    return text if is_delivery_id(text) else None
