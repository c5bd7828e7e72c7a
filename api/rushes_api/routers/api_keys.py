"""API keys: made, changed, rotated and revoked by keys with the scope `admin`; any key may look at itself."""

from collections.abc import Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import keys
from rushes_core.errors import TransitionRefused
from rushes_core.fields import PRIORITIES, printable, shown
from rushes_core.ids import is_key_id
from rushes_core.listed import Listed
from rushes_core.log import get_logger
from rushes_core.models import ApiKey, ApiKeyUsage
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import SentMembers, given, json_body, no_such_project
from rushes_api.auth import Caller
from rushes_api.deps import AdminCaller, AnyCaller, AppState, NoQuery, Session, query
from rushes_api.errors import ApiError, responses
from rushes_api.once import Call, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page

log = get_logger(__name__)

router = APIRouter(prefix="/v1/api_keys", tags=["api keys"])


class Usage(BaseModel):
    """What attempts that ended on this day, in UTC, took."""

    day: str
    gpu_seconds: float
    attempts: int


class KeyObject(Listed):
    object: Literal["api_key"]
    project: str
    name: str
    hint: str | None
    """The last characters of the secret."""
    scopes: list[str]
    priorities: list[str]
    compat: str | None
    requests_per_minute: int | None
    max_queued: int | None
    max_running: int | None
    daily_gpu_seconds: int | None
    created_at: int | None
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    previous_secret_until: int | None
    """Until when the secret before the last rotation works."""
    usage: Usage


class KeyWithSecret(KeyObject):
    """The only answer that holds the secret."""

    secret: str


class KeyList(Page[KeyObject]):
    """One page, the newest first unless `order=asc` was asked for."""


def _object(row: tuple[ApiKey, ApiKeyUsage | None]) -> KeyObject:
    return KeyObject(**keys.describe(*row))


async def _refuse_idempotency_key(request: Request, caller: AnyCaller) -> None:
    if "idempotency-key" in request.headers:
        raise ApiError(
            "Idempotency-Key is not supported here: answers are kept for it, and this one holds a secret. If an answer "
            "was lost, look at the list, and revoke or rotate the key",
            param="Idempotency-Key",
        )


SHOWS_SECRET = Depends(_refuse_idempotency_key)


async def _find(key_id: str, session: AsyncSession) -> tuple[ApiKey, ApiKeyUsage | None]:
    found = None
    if is_key_id(key_id):
        found = (await session.execute(keys.with_usage().where(ApiKey.id == key_id))).first()
    if found is None:
        raise ApiError(f"no API key with id {printable(key_id)}", code="api_key_not_found", status=HTTPStatus.NOT_FOUND)
    return found


@router.post(
    "",
    response_model=KeyWithSecret,
    dependencies=[SHOWS_SECRET],
    responses=responses("project_not_found"),
    openapi_extra=json_body(keys.NewKey.model_json_schema()),
)
async def create_api_key(
    request: Request, caller: AdminCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Make a key. Its secret is shown this once."""
    wanted = keys.parse(keys.NewKey, given(members))
    secret = keys.Secret.new()
    # the id is drawn once: an insert that is repeated finds the row of the first
    values = keys.key_values(wanted, secret)

    async def create(session: AsyncSession) -> KeyWithSecret:
        if (await session.execute(keys.project(wanted.project))).first() is None:
            raise no_such_project(wanted.project)
        key = (await session.execute(keys.create(**values))).scalar_one_or_none()
        key = key or await session.get_one(ApiKey, values["id"])
        return KeyWithSecret(**keys.describe(key, None), secret=secret.text)

    call = Call(caller, "POST /v1/api_keys", None, "")
    answer = await take_effect(call, create, request=request, sessions=state["sessions"])
    log.info("api_key_created", api_key=values["id"], project=wanted.project, by=caller.api_key)
    return answer


@router.get("", responses=responses("project_not_found"))
async def list_api_keys(
    caller: AdminCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS, "project"))],
    session: Session,
) -> KeyList:
    wanted = wanted_page(parameters, key_of=_key_id, what="an API key")
    statement = keys.with_usage()
    if "project" in parameters:
        if not keys.is_project(parameters["project"]):
            raise ApiError(f"project must be the name of one, got {shown(parameters['project'])}", param="project")
        if (await session.execute(keys.project(parameters["project"]))).first() is None:
            raise no_such_project(parameters["project"])
        statement = statement.where(ApiKey.project == parameters["project"])
    rows = (await session.execute(wanted.rows(statement, ApiKey.id))).all()
    return KeyList.of(rows, _object, limit=wanted.limit)


@router.get("/me")
async def get_own_api_key(caller: AnyCaller, parameters: NoQuery, state: AppState) -> KeyObject:
    """The key that the request was sent with, its limits, and what it used today."""
    if not caller.is_stored:
        return _operator(caller)
    async with state["sessions"].begin() as session:
        return _object(await _find(caller.api_key, session))


@router.get("/{key_id}")
async def get_api_key(key_id: str, caller: AdminCaller, parameters: NoQuery, session: Session) -> KeyObject:
    return _object(await _find(key_id, session))


@router.patch(
    "/{key_id}",
    response_model=KeyObject,
    openapi_extra=json_body(keys.KeyChanges.model_json_schema(), required=False, null_is_absent=False),
)
async def change_api_key(
    key_id: str, request: Request, caller: AdminCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Change what was sent; a limit that is null is taken away."""
    values = keys.parse(keys.KeyChanges, members).model_dump(exclude_unset=True)

    async def change(session: AsyncSession) -> KeyObject:
        found, usage = await _find(key_id, session)
        if values:
            found = (await session.execute(keys.change(key_id, values))).scalar_one()
        return _object((found, usage))

    call = Call(caller, f"PATCH /v1/api_keys/{key_id}", None, "", is_harmless=True)
    answer = await take_effect(call, change, request=request, sessions=state["sessions"])
    state["keys"].forget()
    log.info("api_key_changed", api_key=key_id, fields=sorted(values), by=caller.api_key)
    return answer


@router.post(
    "/{key_id}/rotate",
    response_model=KeyWithSecret,
    dependencies=[SHOWS_SECRET],
    responses=responses("invalid_state"),
    openapi_extra=json_body(keys.Rotation.model_json_schema(), required=False),
)
async def rotate_api_key(
    key_id: str, request: Request, caller: AdminCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Give a key another secret, which is shown this once. The old one goes on working for `overlap_seconds`."""
    overlap = timedelta(seconds=keys.parse(keys.Rotation, given(members)).overlap_seconds)
    secret = keys.Secret.new()

    async def rotate(session: AsyncSession) -> KeyWithSecret:
        found, usage = await _find(key_id, session)
        key = (await session.execute(keys.rotate(key_id, secret, overlap=overlap))).scalar_one_or_none()
        if key is None and found.digest != secret.columns["digest"]:
            raise TransitionRefused(f"{key_id} was revoked or has expired: make a new key")
        return KeyWithSecret(**keys.describe(key or found, usage), secret=secret.text)

    call = Call(caller, f"POST /v1/api_keys/{key_id}/rotate", None, "")
    answer = await take_effect(call, rotate, request=request, sessions=state["sessions"])
    state["keys"].forget()
    log.info("api_key_rotated", api_key=key_id, by=caller.api_key)
    return answer


@router.post("/{key_id}/revoke", response_model=KeyObject)
async def revoke_api_key(
    key_id: str, request: Request, caller: AdminCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """End a key for good. Its jobs go on. Revoking it again changes nothing."""
    keys.parse(keys.Nothing, members)

    async def revoke(session: AsyncSession) -> KeyObject:
        _, usage = await _find(key_id, session)
        return _object(((await session.execute(keys.revoke(key_id))).scalar_one(), usage))

    call = Call(caller, f"POST /v1/api_keys/{key_id}/revoke", None, "", is_harmless=True)
    answer = await take_effect(call, revoke, request=request, sessions=state["sessions"])
    state["keys"].forget()
    log.info("api_key_revoked", api_key=key_id, by=caller.api_key)
    return answer


def _operator(caller: Caller) -> KeyObject:
    """The key of `RUSHES_API_KEY`, which is no row."""
    return KeyObject(
        id=caller.api_key,
        object="api_key",
        project=caller.project,
        name="RUSHES_API_KEY",
        hint=None,
        scopes=list(keys.SCOPES),
        priorities=list(PRIORITIES),
        compat=None,
        **dict.fromkeys(keys.LIMITS),
        created_at=None,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
        previous_secret_until=None,
        usage=Usage(**keys.describe_usage(None)),
    )


def _key_id(text: str) -> str | None:
    return text if is_key_id(text) else None
