"""Requests that change something take effect once, however often they are sent and whatever is lost on the way.

The key that a client sends, what its request does and the answer to it are committed together. A commit whose reply is
lost is resolved by doing the same again: every effect finds its own trace.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Annotated, Any

import psycopg
from fastapi import Depends, Request, Response
from psycopg.errors import LockNotAvailable
from pydantic import BaseModel
from rushes_core.fields import shown
from rushes_core.jobs import IDEMPOTENCY_KEYS_KEPT
from rushes_core.log import get_logger
from rushes_core.models import IdempotencyKey
from sqlalchemy import and_, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.sql.elements import ColumnElement

from rushes_api.auth import Caller
from rushes_api.errors import ApiError, OutcomeUnknown, is_database_gone

log = get_logger(__name__)

MAX_KEY_CHARACTERS = 255
OUTCOME_UNKNOWN = "rushes_outcome_unknown"
"""Set in a request's scope while a commit that must not be repeated has been sent and not been answered."""

_HEADER = "Idempotency-Key"
_KEY = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARACTERS}}}", re.ASCII)
_FIXED = ("fps", "n", "guidance_scale", "num_inference_steps", "flow_shift", "audio_flow_shift")
# a restarted Postgres is back within seconds, and the request is given up after ten
_PAUSES_SECONDS = (0.1, 0.5, 1.5)

Effect = Callable[[AsyncSession], Awaitable[BaseModel]]
"""Changes rows and says what to answer. Run again after its own commit, it changes nothing and answers alike."""


async def _key(request: Request) -> str | None:
    keys = request.headers.getlist(_HEADER)
    if not keys:
        return None
    if len(keys) > 1:
        raise ApiError(f"{_HEADER} is given twice", param=_HEADER, code="duplicate_parameter")
    if not _KEY.fullmatch(keys[0]):
        got = shown(keys[0]) if len(keys[0]) <= MAX_KEY_CHARACTERS else f"{len(keys[0])} characters"
        raise ApiError(
            f"{_HEADER} must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters, got {got}", param=_HEADER
        )
    return keys[0]


SentKey = Annotated[str | None, Depends(_key)]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as far as it decides whether another one is the same."""

    caller: Caller
    route: str
    key: str | None
    fingerprint: str
    is_harmless: bool = False
    """Sent again without a key it changes nothing more."""


def fingerprint(wanted: BaseModel | None = None, *, cancel_after: str | None = None) -> str:
    """SHA-256 of a parsed request, the same for every kind of body that says the same."""
    fields: dict[str, Any] = {} if wanted is None else wanted.model_dump(exclude_none=True)
    # a form has no numbers
    fields |= {name: _plain(fields[name]) for name in _FIXED if name in fields}
    text = json.dumps({"fields": fields, "cancel_after": cancel_after}, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    try:
        return float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value
    except (ValueError, OverflowError):
        return value


class Commit:
    """The commit of a request, as far as anybody knows of it."""

    def __init__(self, call: Call, request: Request) -> None:
        self.must_not_repeat = call.key is None and not call.is_harmless
        self.was_sent = False
        self._request = request

    def note_sent(self) -> None:
        """It is about to be sent: from now on it may have taken effect, whatever is heard of it."""
        self.was_sent = True
        self._request.scope[OUTCOME_UNKNOWN] = self.must_not_repeat


async def take_effect(
    call: Call, effect: Effect, *, request: Request, sessions: async_sessionmaker[AsyncSession]
) -> Response:
    """Commit `effect` and answer with what it returns, or answer as the same call was answered before.

    Raises:
        ApiError: the key belongs to another request, or to one that is still being answered.
        OutcomeUnknown: the database went away during the commit and stays away, and to ask again could repeat it.
    """

    async def attempt(commit: Commit) -> Response:
        async with sessions.begin() as session:
            response = await _answer(call, effect, session, is_own=commit.was_sent)
            commit.note_sent()
        return response

    return await settled(call, attempt, request=request)


async def settled(call: Call, attempt: Callable[[Commit], Awaitable[Response]], *, request: Request) -> Response:
    """The answer of `attempt`, which commits a transaction, and is run again while the reply to that is missing.

    Raises:
        OutcomeUnknown: as `take_effect`.
    """
    commit = Commit(call, request)
    for pause in (*_PAUSES_SECONDS, None):
        try:
            return await attempt(commit)
        except (DBAPIError, PoolTimeout, psycopg.Error) as error:
            if not commit.was_sent or not is_database_gone(error):
                raise
            log.warning("commit_unanswered", route=call.route, error=str(error).splitlines()[0])
            if pause is None:
                if commit.must_not_repeat:
                    raise OutcomeUnknown from error
                raise
            await asyncio.sleep(pause)
    raise AssertionError("the last pause is None")


async def _answer(call: Call, effect: Effect, session: AsyncSession, *, is_own: bool) -> Response:
    if call.key is None:
        return json_response((await effect(session)).model_dump_json())
    if not await _reserve(call, session):
        return await _replay(call, session, is_own=is_own)
    body = (await effect(session)).model_dump_json()
    await session.execute(update(IdempotencyKey).where(_is(call)).values(status=HTTPStatus.OK.value, body=body))
    return json_response(body)


async def _reserve(call: Call, session: AsyncSession) -> bool:
    """Whether the key is new, or so old that it is forgotten. Waits for a transaction that has just taken it."""
    new = {"fingerprint": call.fingerprint, "status": None, "body": None, "created_at": func.now()}
    statement = (
        insert(IdempotencyKey)
        .values(
            project=call.caller.project,
            api_key=call.caller.api_key,
            route=call.route,
            key=call.key,
            fingerprint=call.fingerprint,
        )
        .on_conflict_do_update(
            constraint="pk_idempotency_keys",
            set_=new,
            where=IdempotencyKey.created_at < func.now() - IDEMPOTENCY_KEYS_KEPT,
        )
        .returning(IdempotencyKey.key)
    )
    try:
        return (await session.execute(statement)).scalar_one_or_none() is not None
    except OperationalError as error:
        if isinstance(error.orig, LockNotAvailable):
            raise ApiError(
                f"a request with this {_HEADER} is still being answered",
                param=_HEADER,
                code="idempotency_in_progress",
                status=HTTPStatus.CONFLICT,
                headers={"Retry-After": "1"},
            ) from error
        raise


async def _replay(call: Call, session: AsyncSession, *, is_own: bool) -> Response:
    stored = (await session.execute(select(IdempotencyKey).where(_is(call)))).scalar_one()
    if stored.fingerprint != call.fingerprint:
        raise ApiError(
            f"this {_HEADER} was sent with another request; use a new one",
            param=_HEADER,
            code="idempotency_key_reused",
            status=HTTPStatus.UNPROCESSABLE_ENTITY,
        )
    assert stored.status is not None
    assert stored.body is not None
    return json_response(stored.body, stored.status, {} if is_own else {"Idempotent-Replayed": "true"})


def _is(call: Call) -> ColumnElement[bool]:
    return and_(
        IdempotencyKey.project == call.caller.project,
        IdempotencyKey.api_key == call.caller.api_key,
        IdempotencyKey.route == call.route,
        IdempotencyKey.key == call.key,
    )


def json_response(body: str, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type="application/json")
