"""From a request body to a new job: read it, check it, insert it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from anyio import to_thread
from fastapi import Depends, Request
from pydantic import BaseModel
from rushes_core import arrivals
from rushes_core.errors import InvalidRequest
from rushes_core.fields import printable
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.parsing import parse_as
from rushes_core.request import (
    RemixRequest,
    ResolvedRequest,
    VideoRequest,
    count_tokens,
    parse,
    resolve,
)
from rushes_core.webhooks.deliveries import NOT_TOLD_YET
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.auth import Caller
from rushes_api.body import JSON, MULTIPART, URLENCODED, parse_body, read_body
from rushes_api.deps import AppState, CurrentProject, State, caller_of, state_of
from rushes_api.errors import ApiError
from rushes_api.once import MAX_KEY_CHARACTERS, fingerprint, sent_key
from rushes_api.quota import reserve_place, take_place

INLINE_BYTES = 8_192
"""Bodies up to this size are checked in the event loop: that takes less time than a thread's turn."""

Admit = Callable[[AsyncSession], Awaitable[Job]]
"""Inserts a job in a transaction. Run again after its own commit, it finds the row that it made."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submission(Generic[T]):
    """What was asked for, and what that means now: the answer to a repeated request may be older than its faults."""

    fingerprint: str
    outcome: T | InvalidRequest

    def checked(self) -> T:
        """What is to be done, or the fault."""
        if isinstance(self.outcome, InvalidRequest):
            raise self.outcome
        return self.outcome

    async def order(self, session: AsyncSession) -> T:
        """The same within the transaction that does it."""
        return self.checked()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text of a remix."""

    text: str
    num_tokens: int


async def _video(request: Request) -> Submission[ResolvedRequest]:
    caller, key, state = await caller_of(request), await sent_key(request), state_of(request)
    cancel_after = _cancel_after(request)

    def resolved(members: dict[str, Any]) -> ResolvedRequest:
        buckets = state["settings"].output_buckets
        return resolve(members, state["model"], cancel_after=cancel_after, buckets=buckets)

    def seen(members: dict[str, Any]) -> str:
        return fingerprint(parse(members), cancel_after=cancel_after)

    sent = await submission(request, key, state, seen, resolved)
    wanted = sent.outcome
    if isinstance(wanted, ResolvedRequest) and wanted.webhook is not None:
        try:
            await state["webhooks"].check_resolves(wanted.webhook, project=caller.project)
        except InvalidRequest as error:
            if key is None:
                raise
            return Submission(sent.fingerprint, error)
    return sent


async def _remix(request: Request) -> Submission[Prompt]:
    await caller_of(request)
    key, state = await sent_key(request), state_of(request)

    def prompt(members: dict[str, Any]) -> Prompt:
        text = parse_as(RemixRequest, members).prompt
        return Prompt(text, count_tokens(text, state["model"]))

    def seen(members: dict[str, Any]) -> str:
        return fingerprint(parse_as(RemixRequest, members))

    return await submission(request, key, state, seen, prompt)


async def submission(
    request: Request,
    key: str | None,
    state: State,
    seen: Callable[[dict[str, Any]], str],
    understood: Callable[[dict[str, Any]], T],
) -> Submission[T]:
    """What the body at hand asks for.

    Args:
        seen: the fingerprint of a body's members.
        understood: what they mean.

    Raises:
        ApiError: the body cannot be read.
        InvalidRequest: of `understood`, where no `key` was sent; of `seen`.
    """
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)

    def check() -> Submission[T]:
        members = _members(request, body)
        if key is None:
            return Submission("", understood(members))
        digest = seen(members)
        try:
            return Submission(digest, understood(members))
        except InvalidRequest as error:
            return Submission(digest, error)

    return check() if len(body) <= INLINE_BYTES else await to_thread.run_sync(check)


async def _no_members(request: Request, project: CurrentProject, state: AppState) -> None:
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)
    name = next(iter(_members(request, body)), None) if body else None
    if name is not None:
        raise ApiError(f"unknown parameter: {printable(name)}", param=printable(name), code="unknown_parameter")


def _members(request: Request, body: bytes) -> dict[str, Any]:
    return parse_body(
        body,
        content_types=request.headers.getlist("content-type"),
        content_encoding=request.headers.get("content-encoding", ""),
    )


def _cancel_after(request: Request) -> str | None:
    values = request.headers.getlist("cancel-after")
    if len(values) > 1:
        raise ApiError("Cancel-After is given twice", param="Cancel-After", code="duplicate_parameter")
    return values[0] if values else None


SentVideo = Annotated[Submission[ResolvedRequest], Depends(_video)]
SentRemix = Annotated[Submission[Prompt], Depends(_remix)]
NO_BODY = Depends(_no_members)


def new_job(resolved: ResolvedRequest, *, caller: Caller, state: State) -> dict[str, Any]:
    """A job as `arrivals` takes it, with an id of its own."""
    return resolved.job_values(state["model"]) | {
        "id": new_video_id(),
        "project": caller.project,
        "api_key": caller.api_key,
        "max_attempts": state["settings"].max_attempts,
    }


def is_plain(resolved: ResolvedRequest, *, caller: Caller) -> bool:
    """Whether a job needs nothing else of the transaction that inserts it."""
    limits = (caller.max_queued, caller.max_running, caller.daily_gpu_seconds)
    return resolved.webhook is None and all(limit is None for limit in limits)


def admission(
    order: Callable[[AsyncSession], Awaitable[ResolvedRequest]],
    *,
    caller: Caller,
    state: State,
    remixed_from: str | None = None,
) -> Admit:
    """What makes the job that `order` asks for."""
    # drawn once: what is run again after a commit whose reply was lost finds the row of the first run
    video_id = new_video_id()
    was_run = False

    async def admit(session: AsyncSession) -> Job:
        nonlocal was_run
        made = await session.get(Job, video_id) if was_run else None
        if made is not None:
            return made
        was_run = True
        resolved = await order(session)
        await reserve_place(session, caller=caller, api_key=caller.api_key, priority=resolved.priority)
        values = new_job(resolved, caller=caller, state=state)
        values |= {"id": video_id, "remixed_from": remixed_from}
        if resolved.webhook is not None:
            hook = await state["webhooks"].of_job(resolved.webhook, project=caller.project, session=session)
            values |= {"request": values["request"] | {"webhook": hook}, "webhook": NOT_TOLD_YET}
        new = {"jobs": arrivals.together([arrivals.encoded(values)])}
        job = (await session.execute(arrivals.CREATE, new)).scalars().one_or_none()
        if job is None:
            # the first run's commit was still on its way when this one looked for its row
            return await session.get_one(Job, video_id)
        await take_place(session, job)
        return job

    return admit


def _header(name: str, about: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": about, "schema": {"type": "string", **schema}}


KEY_HEADER = _header(
    "Idempotency-Key", "Makes the request safe to send again", minLength=1, maxLength=MAX_KEY_CHARACTERS
)
CANCEL_AFTER_HEADER = _header("Cancel-After", "The deadline as a duration from now, such as 90m")


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    return {
        "required": True,
        "content": {media_type: {"schema": schema} for media_type in (JSON, MULTIPART, URLENCODED)},
    }


VIDEO_BODY = _body(VideoRequest)
REMIX_BODY = _body(RemixRequest)
"""What the OpenAPI document says of requests that make a job."""
