"""Answers that wait for the end of a job: `Prefer: wait=N` (RFC 7240), and what `/v1/videos/sync` does."""

import json
import re
import time
from asyncio import create_task
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from rushes_core.events import Glimpse
from rushes_core.ids import is_video_id
from rushes_core.log import get_logger
from rushes_core.models import Job
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rushes_api.auth import Caller
from rushes_api.boundary import ANSWER_HEADERS, ANSWER_WITHIN
from rushes_api.deps import State, caller_of, state_of
from rushes_api.errors import ApiError
from rushes_api.view import View
from rushes_api.watch import Closing, Gone, Seat, until_gone

log = get_logger(__name__)

MAX_WAIT_SECONDS = 60
_ROUND_SECONDS = 20.0
"""What an answer may take beside the time that it waits for the job."""
# a quote that nothing closes takes all the rest: to look for its end from each quote again would take seconds
_ELEMENT = re.compile(r'(?:"(?:[^"\\]|\\.?)*(?:"|$)|[^",])+')
_DIGITS = re.compile(r"[0-9]{1,6}", re.ASCII)

PREFER_HEADER: dict[str, Any] = {
    "name": "Prefer",
    "in": "header",
    "description": f"`wait=N`: answer when the job has ended, or after N seconds (1 to {MAX_WAIT_SECONDS})",
    "schema": {"type": "string"},
}
"""What the OpenAPI document says of the header."""


async def _wait_seconds(request: Request) -> int | None:
    return preferred_wait(request.headers.getlist("prefer"))


PreferredWait = Annotated[int | None, Depends(_wait_seconds)]
"""Seconds that the client would wait for the end of the job; None: it did not say so in a way that is served."""


def preferred_wait(headers: list[str]) -> int | None:
    """N of the first `wait=N` in these Prefer headers, if it is served. Whatever else they hold is ignored."""
    for element in _ELEMENT.findall(",".join(headers)):
        name, _, value = element.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":
            digits = value.strip()
            if len(digits) > 1 and digits[0] == digits[-1] == '"':
                digits = digits[1:-1]
            seconds = int(digits) if _DIGITS.fullmatch(digits) else 0
            return seconds if 1 <= seconds <= MAX_WAIT_SECONDS else None
    return None


async def _wait_first(video_id: str, request: Request) -> None:
    caller, state = await caller_of(request), state_of(request)
    seconds = await _wait_seconds(request) if "prefer" in request.headers else None
    if seconds is None or not is_video_id(video_id):
        return
    with state["watcher"].maybe_seat(caller.api_key) as seat:
        if seat is not None:
            job = await until_over(video_id, seat, request, state=state, project=caller.project, seconds=seconds)
            if job is not None:
                _note_applied(request, seconds)


WAIT_FIRST = Depends(_wait_first)
"""Does nothing until the job in the path has ended, or the time that the client prefers to wait has passed."""


async def answer_later(
    response: Response, seconds: int | None, *, request: Request, caller: Caller, state: State, view: View
) -> Response:
    """`response`, which shows a job that was accepted, or how the job is after `seconds` at most.

    The job is accepted, whatever happens here: then it is shown as it was.
    """
    if seconds is None:
        return response
    with state["watcher"].maybe_seat(caller.api_key) as seat:
        if seat is None:
            return response
        try:
            job = await until_over(
                video_id_of(response), seat, request, state=state, project=caller.project, seconds=seconds
            )
        except (ApiError, DBAPIError, PoolTimeout, OSError) as error:
            log.warning("wait_failed", error=str(error).splitlines()[0])
            return response
    if job is None or job.deleted_at is not None:
        return response
    _note_applied(request, seconds)
    kept = {name: value for name, value in response.headers.items() if name == "idempotent-replayed"}
    video = view.video(job, num_ahead=await state["lookup"].num_ahead_or_none(job))
    return Response(video.model_dump_json(), headers=kept, media_type="application/json")


async def until_over(
    video_id: str, seat: Seat, request: Request, *, state: State, project: str, seconds: float
) -> Job | None:
    """The job when it has ended or was deleted, when `seconds` have passed, or when nobody may wait any longer: the
    client has gone, or the process is about to stop. None: the project has no such job.

    Holds no connection to the database while it waits.
    """
    request.scope[ANSWER_WITHIN] = seconds + _ROUND_SECONDS
    ends_at = time.monotonic() + seconds
    story = await state["watcher"].story(video_id, project=project)
    if story is None or _is_over(Glimpse.of(story.job)):
        return None if story is None else story.job
    job = story.job
    seat.follow(Glimpse.of(job))
    gone = create_task(until_gone(request.receive))
    try:
        while (left := ends_at - time.monotonic()) > 0:
            update = await seat.next(gone, timeout_seconds=left)
            if update is not None and (update.glimpse is None or _is_over(update.glimpse)):
                break
    except (Closing, Gone):
        return job
    finally:
        gone.cancel()
    story = await state["watcher"].story(video_id, project=project)
    return None if story is None else story.job


def video_id_of(response: Response) -> str:
    """The id of the job that an answer shows."""
    video_id: str = json.loads(bytes(response.body))["id"]
    return video_id


def send_headers(request: Request, headers: Mapping[str, str]) -> None:
    """Have the answer to `request` carry these headers, whatever it is."""
    request.scope[ANSWER_HEADERS] = {**request.scope.get(ANSWER_HEADERS, {}), **headers}


def _note_applied(request: Request, seconds: int) -> None:
    send_headers(request, {"Preference-Applied": f"wait={seconds}"})


def _is_over(glimpse: Glimpse) -> bool:
    return glimpse.state.is_final or glimpse.deleted_at is not None
