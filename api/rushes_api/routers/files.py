"""Files that clients upload: OpenAI's Files API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core import files
from rushes_core.campaigns import statements
from rushes_core.content_disposition import content_disposition
from rushes_core.ids import is_file_id, new_file_id
from rushes_core.listed import Listed
from rushes_core.models import File
from rushes_core.moment import unix_or_none
from rushes_core.object_keys import file_key
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admission import KEY_HEADER
from rushes_api.body import MULTIPART
from rushes_api.content import Representation, stream
from rushes_api.deps import AppState, FileCaller, NoQuery, Session, query
from rushes_api.errors import ApiError, responses
from rushes_api.files import check_room, find_file, find_visible
from rushes_api.once import Call, SentKey, fingerprint, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, one_of, wanted_page
from rushes_api.upload import check_head, discard, receive, seat

router = APIRouter(prefix="/v1/files", tags=["files"])

_EXPIRES_AFTER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "anchor": {"enum": ["created_at"]},
        "seconds": {
            "type": "integer",
            "minimum": files.MIN_EXPIRY_SECONDS,
            "maximum": files.MAX_EXPIRY_SECONDS,
        },
    },
    "required": ["anchor", "seconds"],
    "additionalProperties": False,
}
_BODY: dict[str, Any] = {
    "parameters": [KEY_HEADER],
    "requestBody": {
        "required": True,
        "content": {
            MULTIPART: {
                "schema": {
                    "title": "NewFile",
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(files.PURPOSES)},
                        "expires_after": _EXPIRES_AFTER,
                    },
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                }
            }
        },
    },
}


class FileObject(Listed):
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None
    sha256: str
    """Hexadecimal."""


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(Page[FileObject]):
    """One page, the newest first unless `order=asc` was asked for."""


def _object(file: File) -> FileObject:
    return FileObject(**_describe(file))


def _describe(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": unix_or_none(file.created_at),
        "expires_at": unix_or_none(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": file.sha256,
    }


@router.post(
    "",
    response_model=FileObject,
    responses=responses("file_too_large", "quota_exceeded", "storage_unavailable", "overloaded"),
    openapi_extra=_BODY,
)
async def create_file(request: Request, caller: FileCaller, key: SentKey, _: NoQuery, state: AppState) -> Response:
    """Upload a file for a later request. It is stored as it comes; the answer tells its SHA-256."""
    settings, project, limiter = state["settings"], caller.project, state["store_limiter"]
    num_declared = check_head(request, max_bytes=settings.files_max_bytes)
    if key is None:
        # what is sent again with its key is answered again, room or not
        async with state["sessions"].begin() as session:
            await check_room(session, settings, project=project, num_bytes=num_declared)
    file_id = new_file_id()
    upload = state["store"].begin(file_key(project, file_id), max_bytes=settings.files_max_bytes)
    has_row = False
    with seat(state["uploads"], upload):
        try:
            wanted = await receive(request, upload, max_bytes=settings.files_max_bytes, limiter=limiter)

            async def insert(session: AsyncSession) -> FileObject:
                nonlocal has_row
                await session.execute(files.lock_project(project))
                made = (await session.execute(files.get(file_id, project=project))).scalar_one_or_none()
                if made is None:
                    await check_room(session, settings, project=project, num_bytes=wanted.bytes)
                    after = wanted.expires_after
                    values = wanted.model_dump(exclude={"expires_after"})
                    seconds = None if after is None else after.seconds
                    create = files.create(id=file_id, project=project, expires_after_seconds=seconds, **values)
                    made = (await session.execute(create)).scalar_one()
                has_row = True
                return _object(made)

            call = Call(caller, "POST /v1/files", key, fingerprint(wanted))
            return await take_effect(call, insert, request=request, sessions=state["sessions"])
        finally:
            # an object whose row may have been committed stays: without a row it is an orphan, which the sweeper finds
            if not has_row:
                await discard(upload, limiter=limiter)
            upload.close()


@router.get("")
async def list_files(
    caller: FileCaller,
    parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS, "purpose"))],
    session: Session,
) -> FileList:
    wanted = wanted_page(parameters, key_of=lambda one: one if is_file_id(one) else None, what="a file")
    purpose = parameters.get("purpose")
    if purpose is not None:
        purpose = one_of("purpose", purpose, files.ALL_PURPOSES)
    statement = wanted.rows(files.visible(project=caller.project, purpose=purpose), File.id)
    return FileList.of((await session.execute(statement)).scalars().all(), _object, limit=wanted.limit)


@router.get("/{file_id}", responses=responses("file_not_found", "file_deleted", "file_expired"))
async def get_file(file_id: str, caller: FileCaller, _: NoQuery, session: Session) -> FileObject:
    return _object(await find_visible(file_id, project=caller.project, session=session))


@router.delete("/{file_id}", responses=responses("file_not_found", "invalid_state"))
async def delete_file(file_id: str, caller: FileCaller, _: NoQuery, session: Session) -> DeletedFile:
    """Remove the file for good, unless a campaign is still to read it. Repeated, it answers alike."""
    # who makes a campaign of a file locks this, too
    await session.execute(files.lock_project(caller.project))
    file = await find_file(file_id, project=caller.project, session=session)
    if file.deleted_at is None:
        reading = statements.reading(file_id, project=caller.project)
        if (campaign_id := (await session.execute(reading)).scalar_one_or_none()) is not None:
            raise ApiError(
                f"the campaign {campaign_id} may still be reading it: cancel that, or try again when it has",
                code="invalid_state",
                status=HTTPStatus.CONFLICT,
                headers={"x-should-retry": "false"},
            )
    await session.execute(files.delete_file(file_id, project=caller.project))
    return DeletedFile(id=file_id, object="file", deleted=True)


def _header(about: str) -> dict[str, Any]:
    return {"description": about, "schema": {"type": "string"}}


_HEADERS = {
    "Accept-Ranges": _header("`bytes`"),
    "Content-Disposition": _header("`attachment`, with the name of the file"),
    "ETag": _header("The SHA-256"),
}
_CONTENT: dict[str, Any] = {"application/octet-stream": {}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": _CONTENT, "headers": _HEADERS, "description": "The bytes of the file"},
    206: {
        "content": _CONTENT,
        "headers": _HEADERS | {"Content-Range": _header("Which bytes these are, of how many")},
        "description": "The range that was asked for",
    },
    304: {"headers": _HEADERS, "description": "It is the one that If-None-Match names"},
    412: {"description": "It is another than If-Match names"},
    416: {"description": "The range holds no byte of it"},
    **responses("file_not_found", "file_content_missing", "file_deleted", "file_expired", "storage_unavailable"),
}


_CONDITIONS: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "header", **_header(about)}
        for name, about in (
            ("Range", "One range of bytes; several, and other units, are answered with the whole"),
            ("If-Range", "An `ETag`: the range is meant of this one, and otherwise the whole"),
            ("If-None-Match", "`ETag`s: 304 when it is one of them"),
            ("If-Match", "`ETag`s: 412 unless it is one of them"),
        )
    ]
}


@router.head("/{file_id}/content", include_in_schema=False)
@router.get("/{file_id}/content", response_class=Response, responses=_RESPONSES, openapi_extra=_CONDITIONS)
async def get_file_content(file_id: str, request: Request, caller: FileCaller, _: NoQuery, state: AppState) -> Response:
    # not the request's session: a slow store or client must not hold a connection to Postgres
    async with state["sessions"].begin() as session:
        file = await find_visible(file_id, project=caller.project, session=session)
    return await stream(
        Representation(
            store=state["store"],
            key=file_key(file.project, file.id),
            num_bytes=file.bytes,
            sha256=file.sha256,
            content_type="application/octet-stream",
            disposition=content_disposition(file.filename, kind="attachment"),
            what="file",
        ),
        request,
        state,
        if_lost=ApiError(
            f"the content of {file_id} is no longer in the object store",
            code="file_content_missing",
            status=HTTPStatus.NOT_FOUND,
        ),
    )
