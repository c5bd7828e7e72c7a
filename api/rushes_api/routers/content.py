"""The content of a finished video."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from rushes_core.variants import VARIANTS, VIDEO

from rushes_api.content import check_finished, deliver, find_variant, variant_named
from rushes_api.deps import AppState, CurrentProject, find_job, query

router = APIRouter(prefix="/v1/videos", tags=["videos"])


class ContentAddress(BaseModel):
    """Where the store has it, for whoever has the URL."""

    url: str
    expires_at: int


def _header(about: str) -> dict[str, Any]:
    return {"description": about, "schema": {"type": "string"}}


def _parameter(name: str, about: str) -> dict[str, Any]:
    return {"name": name, "in": "header", **_header(about)}


_CONTENT: dict[str, Any] = {variant.content_type: {} for variant in VARIANTS.values()}
_HEADERS = {
    "Accept-Ranges": _header("`bytes`"),
    "Content-Disposition": _header("`inline`, with a file name made of the prompt"),
    "ETag": _header("The SHA-256"),
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ContentAddress,
        "content": _CONTENT,
        "headers": _HEADERS,
        "description": "The clip, or the variant that was asked for; with `redirect=false` its address as JSON",
    },
    206: {
        "content": _CONTENT,
        "headers": _HEADERS | {"Content-Range": _header("Which bytes these are, of how many")},
        "description": "The range that was asked for",
    },
    302: {"headers": {"Location": _header("A signed URL of the store")}, "description": "Where it lies"},
    304: {"headers": _HEADERS, "description": "It is the one that If-None-Match names"},
    404: {"description": "There is no such video, it has no such variant, or its object was lost"},
    409: {"description": "There is no clip: not yet, or never"},
    410: {"description": "The clip was removed, or the video deleted"},
    412: {"description": "It is another than If-Match names"},
    416: {"description": "The range holds no byte of it"},
}
_CONDITIONS: dict[str, Any] = {
    "parameters": [
        _parameter("Range", "One range of bytes; several, and other units, are answered with the whole"),
        _parameter("If-Range", "An `ETag`: the range is meant of this one, and otherwise the whole"),
        _parameter("If-None-Match", "`ETag`s: 304 when it is one of them"),
        _parameter("If-Match", "`ETag`s: 412 unless it is one of them"),
    ]
}


@router.head("/{video_id}/content", include_in_schema=False)
@router.get("/{video_id}/content", response_class=Response, responses=_RESPONSES, openapi_extra=_CONDITIONS)
async def get_content(
    video_id: str,
    request: Request,
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query("variant", "redirect"))],
    state: AppState,
) -> Response:
    variant = variant_named(parameters.get("variant", VIDEO.name))
    # not the request's session: a slow store or client must not hold a connection to Postgres
    async with state["sessions"].begin() as session:
        job = await find_job(video_id, project=project, session=session)
    check_finished(job)
    return await deliver(job, find_variant(job, variant), request, state, redirect=parameters.get("redirect"))
