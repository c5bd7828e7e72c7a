"""From a request to a new campaign: its file is stored, and then a row says that somebody is to read it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from anyio import to_thread
from fastapi import Request, Response
from rushes_core import files
from rushes_core.campaigns import loading, statements
from rushes_core.campaigns.options import CampaignRequest
from rushes_core.campaigns.tables import Campaign
from rushes_core.campaigns.view import Batch
from rushes_core.errors import InvalidRequest
from rushes_core.fields import shown
from rushes_core.ids import new_campaign_id, new_file_id
from rushes_core.models import File
from rushes_core.object_keys import file_key
from rushes_core.store_upload import Upload
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import Submission
from rushes_api.answer import answer
from rushes_api.auth import Caller
from rushes_api.body import JSON, MULTIPART, parse_json_object, read_body
from rushes_api.campaign_options import OPTION_PARAMETERS, joined, options_of
from rushes_api.campaign_view import batch_in
from rushes_api.deps import State
from rushes_api.errors import ApiError, UnsupportedMedia
from rushes_api.files import check_room, find_visible
from rushes_api.form import split_header
from rushes_api.limits import WINDOW_SECONDS, too_many
from rushes_api.once import Call, take_effect
from rushes_api.quota import QUEUE_FULL_RETRY_SECONDS, check_day, check_priority
from rushes_api.upload import (
    FileForm,
    check_head,
    declared_bytes,
    discard,
    receive_body,
    receive_form,
    seat,
    store_bytes,
)

FORMATS: dict[str, str | None] = {
    "text/csv": "csv",
    "application/jsonl": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/gzip": None,
}
"""Media types of a body that is the file itself, and the format that each tells."""
INLINE = "requests"
"""The member that has the lines of a campaign in its body."""
INLINE_FORMAT = "jsonl"
"""What they are stored as."""
MAX_ACTIVE = 1_000
"""Campaigns of a project that have not ended."""
MAX_MEMBERS = 100_000
MAX_DEPTH = 18
"""Of a body with its lines in it."""
DRY_RUN_SECONDS = 6.0
"""How long the answer to a dry run waits for what it finds."""
_MAX_OPTION_BYTES = 16_384
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class _Sent:
    """A file that came with its campaign, in the store."""

    id: str
    filename: str
    num_bytes: int
    sha256: str
    has_row: bool = False
    """Whether its row may have been committed."""

    @property
    def columns(self) -> dict[str, Any]:
        return {"id": self.id, "filename": self.filename, "bytes": self.num_bytes, "sha256": self.sha256}


class _Form(FileForm):
    """A file and the options of its campaign.

    Args:
        options: what the query says.
        is_judged: the options that come before the file are looked at before it is read.
    """

    def __init__(self, max_bytes: int, options: dict[str, Any], *, is_judged: bool) -> None:
        super().__init__(max_bytes, fields=OPTION_PARAMETERS, max_text_bytes=_MAX_OPTION_BYTES)
        self._options = options
        self._is_judged = is_judged

    def begin_file(self) -> None:
        if self._is_judged:
            CampaignRequest.check_so_far(self.members())

    def members(self) -> dict[str, Any]:
        """The options so far."""
        return joined(options_of(self.texts), self._options)


async def submit(
    request: Request, *, caller: Caller, key: str | None, query: Mapping[str, str], state: State, is_batch: bool
) -> Response:
    """Accept a campaign and answer with it, or as the same request was answered before.

    Raises:
        ApiError, InvalidRequest, StorageError
    """
    response = await _submit(request, caller=caller, key=key, query=query, state=state, is_batch=is_batch)
    accepted = json.loads(bytes(response.body))
    if accepted["dry_run"] and accepted["status"] == "validating":
        return await _when_read(response, accepted["id"], project=caller.project, state=state)
    return response


async def _submit(
    request: Request, *, caller: Caller, key: str | None, query: Mapping[str, str], state: State, is_batch: bool
) -> Response:
    options = options_of(query.items())
    media_type = _media_type(request, is_batch=is_batch)
    if media_type != JSON:
        return await _with_file(request, media_type, options, caller=caller, key=key, state=state)
    members, lines = await _read_json(request, state)
    members = joined(members, options)
    if lines is None:
        return await _accept(request, members, None, caller=caller, key=key, state=state, is_batch=is_batch)
    if is_batch:
        raise ApiError(f"unknown parameter: {INLINE}", param=INLINE, code="unknown_parameter")
    if members.get("input_file_id") is not None:
        raise ApiError(f"{INLINE} and input_file_id exclude each other", param=INLINE)
    if (told := members.get("input_format")) not in (None, INLINE_FORMAT):
        raise ApiError(f"input_format must be {INLINE_FORMAT} with {INLINE}, got {shown(told)}", param="input_format")

    async def store(upload: Upload) -> tuple[str, dict[str, Any]]:
        await store_bytes(lines, upload, limiter=state["store_limiter"])
        return f"{INLINE}.{INLINE_FORMAT}", members | {"input_format": INLINE_FORMAT}

    return await _stored(request, store, caller=caller, key=key, state=state)


def _media_type(request: Request, *, is_batch: bool) -> str:
    supported = (JSON,) if is_batch else (JSON, MULTIPART, *FORMATS)
    content_types = request.headers.getlist("content-type")
    if len(content_types) != 1:
        what = "missing" if not content_types else "given more than once"
        raise UnsupportedMedia(f"Content-Type is {what}; supported: {', '.join(supported)}")
    media_type, parameters = split_header(content_types[0])
    if media_type not in supported:
        raise UnsupportedMedia(
            f"Content-Type {shown(media_type)} is not supported here; supported: {', '.join(supported)}"
        )
    charset = parameters.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia(f"charset {shown(charset)} is not supported; send UTF-8")
    encoding = request.headers.get("content-encoding", "").lower()
    if encoding not in ("", "identity") and (encoding != "gzip" or media_type not in FORMATS):
        known = "packed with gzip, or " if media_type in FORMATS else ""
        raise UnsupportedMedia(
            f"Content-Encoding {shown(encoding)} is not supported here; send the body {known}as it is"
        )
    return media_type


async def _read_json(request: Request, state: State) -> tuple[dict[str, Any], bytes | None]:
    """The members of the body, and the lines that are in it."""
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)
    return await to_thread.run_sync(_parsed, body)


def _parsed(body: bytes) -> tuple[dict[str, Any], bytes | None]:
    if not body:
        raise ApiError("the request body is empty", code="invalid_body")
    members = parse_json_object(body, max_depth=MAX_DEPTH, max_members=MAX_MEMBERS)
    found: object = members.pop(INLINE, None)
    if found is None:
        return members, None
    lines = cast("list[object]", found) if isinstance(found, list) else []
    if not lines:
        got = shown(cast("object", found))
        raise ApiError(f"{INLINE} must be a list of one or more requests, got {got}", param=INLINE)
    # a lone surrogate stays escaped: it is an error of its line
    return members, "".join(f"{json.dumps(line)}\n" for line in lines).encode()


async def _with_file(
    request: Request, media_type: str, options: dict[str, Any], *, caller: Caller, key: str | None, state: State
) -> Response:
    settings, limiter = state["settings"], state["store_limiter"]
    max_bytes = settings.files_max_bytes
    if media_type == MULTIPART:
        num_declared = check_head(request, max_bytes=max_bytes)
    else:
        num_declared = declared_bytes(request, max_bytes=max_bytes)
    if key is None:
        # what is sent again with its key is answered again, right or not, room or not
        if media_type != MULTIPART:
            CampaignRequest.parse(options)
        else:
            CampaignRequest.check_so_far(options)
        async with state["sessions"].begin() as session:
            await check_room(session, settings, project=caller.project, num_bytes=num_declared)

    async def store(upload: Upload) -> tuple[str, dict[str, Any]]:
        if media_type == MULTIPART:
            form = _Form(max_bytes, options, is_judged=key is None)
            await receive_form(request, upload, form, max_bytes=max_bytes, limiter=limiter)
            return form.filename, form.members()
        await receive_body(request, upload, max_bytes=max_bytes, limiter=limiter)
        told = FORMATS[media_type]
        if told is not None and options.get("input_format") not in (None, told):
            raise ApiError(f"input_format and Content-Type {media_type} disagree", param="input_format")
        found = told or options.get("input_format")
        is_packed = told is None or request.headers.get("content-encoding", "").lower() == "gzip"
        name = f"campaign{'' if found is None else f'.{found}'}{'.gz' if is_packed else ''}"
        return name, options | ({} if found is None else {"input_format": found})

    return await _stored(request, store, caller=caller, key=key, state=state)


async def _stored(
    request: Request,
    store: Callable[[Upload], Awaitable[tuple[str, dict[str, Any]]]],
    *,
    caller: Caller,
    key: str | None,
    state: State,
) -> Response:
    """Accept a campaign with its file.

    Args:
        store: stores the file; its name, and the members of the request.
    """
    limiter = state["store_limiter"]
    file_id = new_file_id()
    upload = state["store"].begin(file_key(caller.project, file_id), max_bytes=state["settings"].files_max_bytes)
    sent: _Sent | None = None
    with seat(state["uploads"], upload):
        try:
            filename, members = await store(upload)
            sent = _Sent(file_id, filename, upload.num_bytes, upload.sha256)
            return await _accept(request, members, sent, caller=caller, key=key, state=state)
        finally:
            # an object whose row may have been committed stays: without a row it is an orphan, which the sweeper finds
            if sent is None or not sent.has_row:
                await discard(upload, limiter=limiter)
            upload.close()


async def _accept(
    request: Request,
    members: dict[str, Any],
    sent: _Sent | None,
    *,
    caller: Caller,
    key: str | None,
    state: State,
    is_batch: bool = False,
) -> Response:
    if sent is not None and members.get("input_file_id") is not None:
        raise ApiError("input_file_id names a file, and another one is sent along", param="input_file_id")
    submission = await _checked(members, sent, caller=caller, key=key, state=state, is_batch=is_batch)
    campaign_id = new_campaign_id()
    was_run = False

    async def accept(session: AsyncSession) -> Batch:
        nonlocal was_run
        found = statements.get(campaign_id, project=caller.project)
        campaign = (await session.execute(found)).scalar_one_or_none() if was_run else None
        was_run = True
        if campaign is None:
            wanted = submission.checked()
            columns = wanted.columns(state["model"])
            check_priority(columns["priority"], caller=caller)
            await session.execute(files.lock_project(caller.project))
            if caller.daily_gpu_seconds is not None:
                await check_day(session, api_key=caller.api_key, daily_gpu_seconds=caller.daily_gpu_seconds)
            await _check_place(session, state, project=caller.project)
            if sent is None:
                columns["input_file_id"] = await _input(wanted, session, project=caller.project)
            else:
                await check_room(session, state["settings"], project=caller.project, num_bytes=sent.num_bytes)
                await session.execute(files.create(project=caller.project, purpose="batch", **sent.columns))
                columns |= {"input_file_id": sent.id, "owns_input": True}
            if wanted.webhook is not None:
                columns["webhook"] = await state["webhooks"].of_job(
                    wanted.webhook, project=caller.project, session=session
                )
            create = statements.create(id=campaign_id, project=caller.project, api_key=caller.api_key, **columns)
            campaign = (await session.execute(create)).scalar_one_or_none()
            if sent is not None:
                # nothing refuses it any more: from here on the row may be there
                sent.has_row = True
        # the first run's commit was still on its way when this one looked for its row
        return await batch_in(session, campaign or await session.get_one(Campaign, campaign_id), state)

    route = "POST /v1/batches" if is_batch else "POST /v1/campaigns"
    call = Call(caller, route, key, submission.fingerprint)
    return await take_effect(call, accept, request=request, sessions=state["sessions"])


async def _checked(
    members: dict[str, Any], sent: _Sent | None, *, caller: Caller, key: str | None, state: State, is_batch: bool
) -> Submission[CampaignRequest]:
    given = {name: value for name, value in members.items() if value is not None}
    text = json.dumps({"members": given, "file": None if sent is None else sent.sha256}, sort_keys=True)
    digest = sha256(text.encode()).hexdigest()
    try:
        wanted = CampaignRequest.parse(members, is_batch=is_batch)
        if sent is None and wanted.input_file_id is None:
            raise InvalidRequest(
                f"input_file_id is required, or {INLINE}, or a file in the body",
                param="input_file_id",
                code="missing_required_parameter",
            )
        if wanted.webhook is not None:
            await state["webhooks"].check_resolves(wanted.webhook, project=caller.project)
    except InvalidRequest as error:
        if key is None:
            raise
        return Submission(digest, error)
    return Submission(digest, wanted)


async def _check_place(session: AsyncSession, state: State, *, project: str) -> None:
    """
    Raises:
        ApiError: 429 `quota_exceeded` or `queue_full`: the project may not have another campaign now.
    """
    num_active = statements.num_active(project=project, at_most=MAX_ACTIVE)
    if (await session.execute(num_active)).scalar_one() >= MAX_ACTIVE:
        raise too_many(
            f"a project may have {MAX_ACTIVE} campaigns that have not ended, and this one has",
            code="quota_exceeded",
            retry_after=WINDOW_SECONDS,
            headers={"x-should-retry": "false"},
        )
    most = state["settings"].campaign_max_queued
    if (await session.execute(loading.num_queued(project))).scalar_one() >= most:
        raise too_many(
            f"the campaigns of a project may have {most} jobs waiting together, and those of this one have",
            code="queue_full",
            retry_after=QUEUE_FULL_RETRY_SECONDS,
        )


async def _input(wanted: CampaignRequest, session: AsyncSession, *, project: str) -> str:
    """The id of the file that is named.

    Raises:
        ApiError: there is none, or it is none to be read.
    """
    assert wanted.input_file_id is not None
    try:
        file: File = await find_visible(wanted.input_file_id, project=project, session=session)
    except ApiError as error:
        error.param = "input_file_id"
        raise
    if file.purpose not in files.PURPOSES:
        raise ApiError(
            f"input_file_id must name a file whose purpose is {' or '.join(files.PURPOSES)}, got {file.purpose}",
            param="input_file_id",
        )
    return file.id


async def _when_read(response: Response, campaign_id: str, *, project: str, state: State) -> Response:
    """The same answer with what reading the file found, if that is known in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + DRY_RUN_SECONDS
    kept = {name: value for name, value in response.headers.items() if name == "idempotent-replayed"}
    while loop.time() < until:
        await asyncio.sleep(_LOOK_SECONDS)
        async with state["sessions"].begin() as session:
            found = (await session.execute(statements.get(campaign_id, project=project))).scalar_one_or_none()
            if found is None or found.state != "validating":
                return response if found is None else answer(await batch_in(session, found, state), headers=kept)
    return response
