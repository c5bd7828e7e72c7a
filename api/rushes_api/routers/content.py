"""The content of a finished video."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from rushes_api.content import check_finished, check_variant, deliver
from rushes_api.deps import AppState, CurrentProject, find_job, query
from rushes_api.video import CONTENT_TYPE

router = APIRouter(prefix="/v1/videos", tags=["videos"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {}}, "description": "The clip"},
    206: {"content": {CONTENT_TYPE: {}}, "description": "The range that was asked for"},
    302: {"description": "Where the clip lies"},
    304: {"description": "The clip is the one that If-None-Match names"},
    409: {"description": "There is no clip: not yet, or never"},
    416: {"description": "The range holds no byte of the clip"},
}


@router.head("/{video_id}/content", include_in_schema=False)
@router.get("/{video_id}/content", response_class=Response, responses=_RESPONSES)
async def get_content(
    video_id: str,
    request: Request,
    project: CurrentProject,
    parameters: Annotated[Mapping[str, str], Depends(query("variant", "redirect"))],
    state: AppState,
) -> Response:
    check_variant(parameters.get("variant", "video"))
    # not the request's session: a slow store or client must not hold a connection to Postgres
    async with state["sessions"].begin() as session:
        job = await find_job(video_id, project=project, session=session)
    check_finished(job)
    return await deliver(job, request, state, redirect=parameters.get("redirect"))
