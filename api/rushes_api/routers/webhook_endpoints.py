"""OpenAI's webhook endpoints: registered, changed, rotated, tested; and the secret of jobs' own `webhook_url`s."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field
from rushes_core import keys
from rushes_core.errors import TransitionRefused
from rushes_core.fields import printable, shown
from rushes_core.ids import is_endpoint_id, new_delivery_id, new_test_event_id
from rushes_core.listed import Listed
from rushes_core.moment import unix_or_none
from rushes_core.webhooks import deliveries, endpoints
from rushes_core.webhooks.events import EVENT_TYPES
from rushes_core.webhooks.signing import SigningSecret
from rushes_core.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookSecret
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from rushes_api.admin import given, json_body, read_members
from rushes_api.deps import AppState, NoQuery, Session, WebhookCaller, query
from rushes_api.errors import ApiError, Unavailable, responses
from rushes_api.once import Call, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page
from rushes_api.routers.api_keys import SHOWS_SECRET

router = APIRouter(tags=["webhooks"])

TEST_SECONDS = 8.0
"""How long the answer to a test event is waited for."""
_LOOK_SECONDS = 0.1


class EndpointObject(Listed):
    """OpenAI's members, and how the endpoint fares."""

    object: Literal["webhook_endpoint"]
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    enabled: bool
    disabled_reason: str | None
    """`gone` after a 410, `failing` after days of failures, `request`."""
    consecutive_failures: int
    paused_until: int | None
    """Nothing is sent before."""
    previous_secret_until: int | None


class EndpointWithSecret(EndpointObject):
    """The only answers that hold the secret."""

    signing_secret: str


class EndpointList(Page[EndpointObject]):
    """One page, the newest first unless `order=asc` was asked for."""


class EndpointDeleted(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: bool


class EndpointTestResult(BaseModel):
    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    success: bool
    """That an answer came; `status_code` says which."""
    status_code: int
    delivery_id: str


class EventTypeList(BaseModel):
    object: Literal["list"]
    data: list[str]


class ProjectSecret(BaseModel):
    """What deliveries to the `webhook_url`s of a project's jobs are signed with."""

    object: Literal["webhook_secret"]
    signing_secret_hint: str
    created_at: int
    updated_at: int
    previous_secret_until: int | None


class ProjectSecretShown(ProjectSecret):
    signing_secret: str


class PublicKeySet(BaseModel):
    """A JSON Web Key Set."""

    keys: list[dict[str, str]] = Field(description="Ed25519 keys, the one that signs first")


async def _members(request: Request, caller: WebhookCaller, state: AppState) -> Mapping[str, Any]:
    return given(await read_members(request, state))


SentMembers = Annotated[Mapping[str, Any], Depends(_members)]


def _object(endpoint: WebhookEndpoint) -> EndpointObject:
    return EndpointObject(**_describe(endpoint))


def _describe(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": unix_or_none(endpoint.created_at),
        "updated_at": unix_or_none(endpoint.updated_at),
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
        "enabled": endpoint.state == "enabled",
        "disabled_reason": endpoint.disabled_reason,
        "consecutive_failures": endpoint.failures,
        "paused_until": unix_or_none(endpoint.open_until),
        "previous_secret_until": unix_or_none(endpoint.previous_until),
    }


def no_such_endpoint(endpoint_id: str) -> ApiError:
    return ApiError(
        f"no webhook endpoint with id {printable(endpoint_id)}",
        code="webhook_endpoint_not_found",
        status=HTTPStatus.NOT_FOUND,
    )


async def find_endpoint(endpoint_id: str, *, project: str, session: AsyncSession) -> WebhookEndpoint:
    """The registered endpoint of the project.

    Raises:
        ApiError
    """
    found = None
    if is_endpoint_id(endpoint_id):
        found = (await session.execute(endpoints.get(endpoint_id, project=project))).scalar_one_or_none()
    if found is None:
        raise no_such_endpoint(endpoint_id)
    return found


@router.post(
    "/v1/webhook_endpoints",
    response_model=EndpointWithSecret,
    dependencies=[SHOWS_SECRET],
    openapi_extra=json_body(endpoints.NewEndpoint.model_json_schema()),
)
async def create_webhook_endpoint(
    request: Request, caller: WebhookCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Register an endpoint. Its secret is shown this once."""
    webhooks = state["webhooks"]
    webhooks.check_configured()
    wanted = keys.parse(endpoints.NewEndpoint, members)
    target = await webhooks.target(wanted.url, project=caller.project)
    secret = SigningSecret.new()
    values = endpoints.endpoint_values(wanted, target, secret, webhooks.vault)

    async def create(session: AsyncSession) -> EndpointWithSecret:
        await session.execute(endpoints.lock(project=caller.project))
        count = (await session.execute(endpoints.count(project=caller.project))).scalar_one()
        endpoint = await session.get(WebhookEndpoint, values["id"])
        if endpoint is None:
            if count >= endpoints.MAX_ENDPOINTS:
                raise ApiError(
                    f"a project has at most {endpoints.MAX_ENDPOINTS} webhook endpoints: delete one",
                    code="too_many_webhook_endpoints",
                )
            endpoint = (await session.execute(endpoints.create(project=caller.project, **values))).scalar_one()
        return EndpointWithSecret(**_describe(endpoint), signing_secret=secret.text)

    call = Call(caller, "POST /v1/webhook_endpoints", None, "")
    return await take_effect(call, create, request=request, sessions=state["sessions"])


@router.get("/v1/webhook_endpoints")
async def list_webhook_endpoints(
    caller: WebhookCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS))],
    session: Session,
) -> EndpointList:
    wanted = wanted_page(parameters, key_of=_endpoint_id, what="a webhook endpoint")
    statement = endpoints.listed(project=caller.project)
    rows = (await session.execute(wanted.rows(statement, WebhookEndpoint.id))).scalars().all()
    return EndpointList.of(rows, _object, limit=wanted.limit)


@router.get("/v1/webhook_endpoints/{endpoint_id}")
async def get_webhook_endpoint(
    endpoint_id: str, caller: WebhookCaller, parameters: NoQuery, session: Session
) -> EndpointObject:
    return _object(await find_endpoint(endpoint_id, project=caller.project, session=session))


@router.post(
    "/v1/webhook_endpoints/{endpoint_id}",
    response_model=EndpointObject,
    openapi_extra=json_body(endpoints.EndpointChanges.model_json_schema()),
)
async def change_webhook_endpoint(
    endpoint_id: str,
    request: Request,
    caller: WebhookCaller,
    parameters: NoQuery,
    members: SentMembers,
    state: AppState,
) -> Response:
    """Change what was sent. `enabled` false cancels what waits; true tries anew, whatever failed before."""
    wanted = keys.parse(endpoints.EndpointChanges, members)
    values = wanted.model_dump(exclude_none=True, exclude={"enabled"})
    if wanted.url is not None:
        values["url"] = (await state["webhooks"].target(wanted.url, project=caller.project)).url
    if wanted.enabled is not None:
        values |= endpoints.ENABLED if wanted.enabled else endpoints.DISABLED

    async def change(session: AsyncSession) -> EndpointObject:
        found = await find_endpoint(endpoint_id, project=caller.project, session=session)
        changed = (
            await session.execute(endpoints.change(endpoint_id, values, project=caller.project))
        ).scalar_one_or_none()
        if wanted.enabled is False:
            await cancel_all(endpoint_id, reason="endpoint_disabled", session=session)
        return _object(changed or found)

    call = Call(caller, f"POST /v1/webhook_endpoints/{endpoint_id}", None, "", is_harmless=True)
    return await take_effect(call, change, request=request, sessions=state["sessions"])


@router.delete("/v1/webhook_endpoints/{endpoint_id}", response_model=EndpointDeleted)
async def delete_webhook_endpoint(
    endpoint_id: str, request: Request, caller: WebhookCaller, parameters: NoQuery, state: AppState
) -> Response:
    """End an endpoint and what waits for it. Its deliveries stay in the log. Repeated, it answers alike."""

    async def delete(session: AsyncSession) -> EndpointDeleted:
        deleted = None
        if is_endpoint_id(endpoint_id):
            statement = endpoints.delete(endpoint_id, project=caller.project)
            deleted = (await session.execute(statement)).scalar_one_or_none()
        if deleted is None:
            raise no_such_endpoint(endpoint_id)
        await cancel_all(endpoint_id, reason="endpoint_deleted", session=session)
        return EndpointDeleted(id=endpoint_id, object="webhook_endpoint.deleted", deleted=True)

    call = Call(caller, f"DELETE /v1/webhook_endpoints/{endpoint_id}", None, "", is_harmless=True)
    return await take_effect(call, delete, request=request, sessions=state["sessions"])


@router.post(
    "/v1/webhook_endpoints/{endpoint_id}/rotate_secret",
    response_model=EndpointWithSecret,
    dependencies=[SHOWS_SECRET],
    openapi_extra=json_body(endpoints.SecretRotation.model_json_schema(), required=False),
)
async def rotate_webhook_endpoint(
    endpoint_id: str,
    request: Request,
    caller: WebhookCaller,
    parameters: NoQuery,
    members: SentMembers,
    state: AppState,
) -> Response:
    """Give an endpoint another secret, which is shown this once. While the old one is active both sign."""
    state["webhooks"].check_configured()
    keeps = keys.parse(endpoints.SecretRotation, members).keep_old_secret_active_for_24_hours
    secret = SigningSecret.new()
    is_done = False

    async def rotate(session: AsyncSession) -> EndpointWithSecret:
        nonlocal is_done
        endpoint = await find_endpoint(endpoint_id, project=caller.project, session=session)
        if not (is_done and _is_same(endpoint.secret, secret, state)):
            statement = endpoints.rotate(
                endpoint_id, secret, vault=state["webhooks"].vault, keeps=keeps, project=caller.project
            )
            endpoint = (await session.execute(statement)).scalar_one()
            is_done = True
        return EndpointWithSecret(**_describe(endpoint), signing_secret=secret.text)

    call = Call(caller, f"POST /v1/webhook_endpoints/{endpoint_id}/rotate_secret", None, "")
    return await take_effect(call, rotate, request=request, sessions=state["sessions"])


@router.post(
    "/v1/webhook_endpoints/{endpoint_id}/test",
    openapi_extra=json_body(endpoints.EndpointTest.model_json_schema()),
)
async def test_webhook_endpoint(
    endpoint_id: str, caller: WebhookCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> EndpointTestResult:
    """Send an event that tells of nothing, once, and say what was answered."""
    wanted = keys.parse(endpoints.EndpointTest, members).event_type
    if wanted not in EVENT_TYPES:
        raise ApiError(f"event_type must be one of {', '.join(EVENT_TYPES)}, got {shown(wanted)}", param="event_type")
    delivery_id = new_delivery_id()
    async with state["sessions"].begin() as session:
        endpoint = await find_endpoint(endpoint_id, project=caller.project, session=session)
        await session.execute(deliveries.test(endpoint, new_id=delivery_id, event_id=new_test_event_id(), type=wanted))
    delivery = await _wait_until_tried(delivery_id, project=caller.project, sessions=state["sessions"])
    if delivery.last_status is None:
        raise ApiError(
            f"the endpoint did not answer: {delivery.last_error}; see /v1/webhook_deliveries/{delivery_id}",
            code="webhook_test_failed",
            headers={"x-should-retry": "false"},
        )
    return EndpointTestResult(
        object="webhook_endpoint.test",
        webhook_endpoint_id=endpoint_id,
        event_type=wanted,
        success=True,
        status_code=delivery.last_status,
        delivery_id=delivery_id,
    )


async def _wait_until_tried(
    delivery_id: str, *, project: str, sessions: async_sessionmaker[AsyncSession]
) -> WebhookDelivery:
    deadline = asyncio.get_running_loop().time() + TEST_SECONDS
    while True:
        # no connection is held between two looks
        async with sessions() as session:
            delivery = (await session.execute(deliveries.get(delivery_id, project=project))).scalar_one()
        if delivery.finished_at is not None:
            return delivery
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    # nobody waits for it any more
    async with sessions.begin() as session:
        withdrawn = (await session.execute(deliveries.withdraw_test(delivery_id))).first()
    if withdrawn is None:
        raise ApiError(
            f"the endpoint has not answered within {TEST_SECONDS:g} seconds; see /v1/webhook_deliveries/{delivery_id}",
            code="webhook_test_failed",
            headers={"x-should-retry": "false"},
        )
    unavailable = Unavailable("no process that delivers webhooks took the test", code="sender_unavailable")
    unavailable.headers["x-should-retry"] = "false"
    raise unavailable


async def cancel_all(endpoint_id: str, *, reason: str, session: AsyncSession) -> None:
    """Cancel what waits for an endpoint, however much it is."""
    while len((await session.execute(deliveries.cancel_pending([endpoint_id], reason=reason))).all()) == (
        deliveries.MAX_AT_ONCE
    ):
        pass


@router.get("/v1/webhook_event_types")
async def list_webhook_event_types(caller: WebhookCaller, parameters: NoQuery) -> EventTypeList:
    return EventTypeList(object="list", data=list(EVENT_TYPES))


@router.get("/v1/webhook_secret", responses=responses("webhook_secret_missing"))
async def get_webhook_secret(caller: WebhookCaller, parameters: NoQuery, session: Session) -> ProjectSecret:
    """Whether the project has a secret for its jobs' `webhook_url`s, without the secret."""
    found = (await session.execute(endpoints.secret_of(caller.project))).scalar_one_or_none()
    if found is None:
        raise ApiError(
            "the project has no webhook secret: make one with POST /v1/webhook_secret/rotate",
            code="webhook_secret_missing",
            status=HTTPStatus.NOT_FOUND,
        )
    return ProjectSecret(**_describe_secret(found))


@router.post(
    "/v1/webhook_secret/rotate",
    response_model=ProjectSecretShown,
    dependencies=[SHOWS_SECRET],
    openapi_extra=json_body(endpoints.SecretRotation.model_json_schema(), required=False),
)
async def rotate_webhook_secret(
    request: Request, caller: WebhookCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Give the project another secret for its jobs' `webhook_url`s, or its first. It is shown this once."""
    webhooks = state["webhooks"]
    webhooks.check_configured()
    keeps = keys.parse(endpoints.SecretRotation, members).keep_old_secret_active_for_24_hours
    secret = SigningSecret.new()
    is_done = False

    async def rotate(session: AsyncSession) -> ProjectSecretShown:
        nonlocal is_done
        found = (await session.execute(endpoints.secret_of(caller.project))).scalar_one_or_none()
        if found is None or not (is_done and _is_same(found.secret, secret, state)):
            statement = endpoints.rotate_secret(caller.project, secret, vault=webhooks.vault, keeps=keeps)
            found = (await session.execute(statement, execution_options={"populate_existing": True})).scalar_one()
            is_done = True
        return ProjectSecretShown(**_describe_secret(found), signing_secret=secret.text)

    call = Call(caller, "POST /v1/webhook_secret/rotate", None, "")
    return await take_effect(call, rotate, request=request, sessions=state["sessions"])


@router.get("/.well-known/jwks.json")
async def get_jwks(parameters: NoQuery, state: AppState) -> PublicKeySet:
    """Public keys of the signatures `v1a`. Needs no key."""
    return PublicKeySet(**state["webhooks"].public_keys.jwks())


def _describe_secret(found: WebhookSecret) -> dict[str, Any]:
    return {
        "object": "webhook_secret",
        "signing_secret_hint": found.hint,
        "created_at": unix_or_none(found.created_at),
        "updated_at": unix_or_none(found.updated_at),
        "previous_secret_until": unix_or_none(found.previous_until),
    }


def _is_same(stored: bytes | None, secret: SigningSecret, state: AppState) -> bool:
    """Whether `secret` is the one that is stored: a rotation that is run again after its own commit changes nothing."""
    return stored is not None and state["webhooks"].vault.unlock(stored) == secret


def _endpoint_id(text: str) -> str | None:
    return text if is_endpoint_id(text) else None


def refuse_unless_enabled(endpoint: WebhookEndpoint | None) -> None:
    """
    Raises:
        TransitionRefused: nothing may be sent there.
    """
    if endpoint is None or endpoint.deleted_at is not None or endpoint.state != "enabled":
        raise TransitionRefused("the webhook endpoint is disabled or deleted: nothing is sent there")
