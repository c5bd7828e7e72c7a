"""From a request body to a new job: read it, check it, insert it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, Request
from rushes_core import jobs
from rushes_core.errors import InvalidRequest
from rushes_core.models import Job
from rushes_core.request import ResolvedRequest, VideoRequest, parse, printable, resolve
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.auth import Caller
from rushes_api.body import JSON, MULTIPART, URLENCODED, parse_body, read_body
from rushes_api.deps import AppState, CurrentProject, State
from rushes_api.errors import ApiError
from rushes_api.once import MAX_KEY_CHARACTERS, SentKey, fingerprint

INLINE_BYTES = 8_192
"""Bodies up to this size are checked in the event loop: that takes less time than a thread's turn."""

Admit = Callable[[AsyncSession], Awaitable[Job]]
"""Inserts a job in a transaction. Run again after its own commit, it finds the row that it made."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What was asked for, and what that means now: the answer to a repeated request may be older than its faults."""

    fingerprint: str
    resolved: ResolvedRequest | InvalidRequest


async def _submission(request: Request, project: CurrentProject, key: SentKey, state: AppState) -> Submission:
    cancel_after = _cancel_after(request)
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)

    def check() -> Submission:
        members = _members(request, body)
        seen = "" if key is None else fingerprint(parse(members), cancel_after=cancel_after)
        try:
            return Submission(seen, resolve(members, state["model"], cancel_after=cancel_after))
        except InvalidRequest as error:
            if key is None:
                raise
            return Submission(seen, error)

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


SentVideo = Annotated[Submission, Depends(_submission)]
NO_BODY = Depends(_no_members)


def admission(resolved: ResolvedRequest | InvalidRequest, *, caller: Caller, state: State) -> Admit:
    """What makes the job that `resolved` asks for. The fault that `resolved` may be is raised by it."""
    values: dict[str, Any] = {}
    if isinstance(resolved, ResolvedRequest):
        # the id is drawn once: an insert that is repeated finds the row of the first
        values = resolved.job_values(
            state["model"], project=caller.project, max_attempts=state["settings"].max_attempts
        )

    async def admit(session: AsyncSession) -> Job:
        if isinstance(resolved, InvalidRequest):
            raise resolved
        job = (await session.execute(jobs.create(**values))).scalar_one_or_none()
        return job or await session.get_one(Job, values["id"])

    return admit


def _header(name: str, about: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": about, "schema": {"type": "string", **schema}}


KEY_HEADER = _header(
    "Idempotency-Key", "Makes the request safe to send again", minLength=1, maxLength=MAX_KEY_CHARACTERS
)
CANCEL_AFTER_HEADER = _header("Cancel-After", "The deadline as a duration from now, such as 90m")
VIDEO_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        media_type: {"schema": VideoRequest.model_json_schema()} for media_type in (JSON, MULTIPART, URLENCODED)
    },
}
"""What the OpenAPI document says of a request that makes a job."""
