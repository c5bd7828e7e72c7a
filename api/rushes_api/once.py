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
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

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


async def sent_key(request: Request) -> str | None:
    """The idempotency key that the client sent.

    Raises:
        ApiError: it is none.
    """
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


SentKey = Annotated[str | None, Depends(sent_key)]


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
    said = json.dumps({"fields": fields, "cancel_after": cancel_after}, sort_keys=True, default=str)
    return sha256(said.encode()).hexdigest()


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
    await session.execute(_REMEMBER, _which(call) | {"status": HTTPStatus.OK.value, "body": body})
    return json_response(body)


_WHICH = "project = :project AND api_key = :api_key AND route = :route AND key = :key"
# as text: SQLAlchemy takes longer to build them than Postgres to run them
_RESERVE = text("""
INSERT INTO idempotency_keys AS held (project, api_key, route, key, fingerprint)
VALUES (:project, :api_key, :route, :key, :fingerprint)
ON CONFLICT ON CONSTRAINT pk_idempotency_keys DO UPDATE
SET fingerprint = excluded.fingerprint, status = NULL, body = NULL, created_at = now()
WHERE held.created_at < now() - CAST(:kept AS interval)
RETURNING key
""")
_REMEMBER = text(f"UPDATE idempotency_keys SET status = :status, body = :body WHERE {_WHICH}")
_STORED = text(f"SELECT fingerprint, status, body FROM idempotency_keys WHERE {_WHICH}")


async def _reserve(call: Call, session: AsyncSession) -> bool:
    """Whether the key is new, or so old that it is forgotten. Waits for a transaction that has just taken it."""
    values = _which(call) | {"fingerprint": call.fingerprint, "kept": IDEMPOTENCY_KEYS_KEPT}
    try:
        return (await session.execute(_RESERVE, values)).first() is not None
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
    stored = (await session.execute(_STORED, _which(call))).one()
    if stored.fingerprint != call.fingerprint:
        raise ApiError(
            f"this {_HEADER} was sent with another request; use a new one",
            param=_HEADER,
            code="idempotency_key_reused",
            status=HTTPStatus.UNPROCESSABLE_ENTITY,
        )
    return json_response(stored.body, stored.status, {} if is_own else {"Idempotent-Replayed": "true"})


def _which(call: Call) -> dict[str, Any]:
    return {"project": call.caller.project, "api_key": call.caller.api_key, "route": call.route, "key": call.key}


def json_response(body: str, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type="application/json")
