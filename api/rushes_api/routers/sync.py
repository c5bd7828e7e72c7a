"""A video in one request: the answer is the clip itself."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from rushes_core.models import Job
from rushes_core.variants import VIDEO
from rushes_core.video import CONTENT_TYPE

from rushes_api.admission import CANCEL_AFTER_HEADER, KEY_HEADER, VIDEO_BODY, SentVideo
from rushes_api.content import check_finished, deliver, find_variant
from rushes_api.deps import AppState, CurrentCaller, NoQuery, visible
from rushes_api.errors import ApiError, responses
from rushes_api.once import SentKey
from rushes_api.routers.videos import accepted, video_call
from rushes_api.view import CurrentView
from rushes_api.waiting import send_headers, until_over, video_id_of

router = APIRouter(prefix="/v1/videos", tags=["videos"])

CLIENT_GONE = 499
"""What the log says of a client that hung up. Nobody receives it."""

_CONDITIONS = {b"range", b"if-range", b"if-match", b"if-none-match"}

_CREATE: dict[str, Any] = {"parameters": [KEY_HEADER, CANCEL_AFTER_HEADER], "requestBody": VIDEO_BODY}
_ID_HEADER = {"x-video-id": {"schema": {"type": "string"}, "description": "Id of the job"}}
_RESPONSES: dict[int | str, dict[str, Any]] = responses("model_not_found") | {
    200: {"content": {CONTENT_TYPE: {}}, "description": "The clip", "headers": _ID_HEADER},
    303: {"description": "Where the clip lies", "headers": _ID_HEADER},
    404: {"description": "The model is not served, or the clip was lost from the store"},
    410: {"description": "The job was deleted, or its clip was removed", "headers": _ID_HEADER},
    409: {"description": "The job ended without a clip", "headers": _ID_HEADER},
    504: {"description": "The job goes on, but not within this request", "headers": _ID_HEADER},
}


class NotInTime(ApiError):
    """The job had not ended when the request had to."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "sync_timeout"

    def __init__(self, job: Job) -> None:
        super().__init__(
            f"{job.id} is still {job.state.public_status}. It goes on: ask GET /v1/videos/{job.id} for it.",
            details=[{"loc": ["id"], "msg": job.id}],
        )


@router.post(
    "/sync", response_class=Response, responses=_RESPONSES | responses("model_not_found"), openapi_extra=_CREATE
)
async def create_and_fetch(
    request: Request,
    caller: CurrentCaller,
    parameters: NoQuery,
    key: SentKey,
    sent: SentVideo,
    state: AppState,
    view: CurrentView,
) -> Response:
    """Accept a job as `POST /v1/videos` does, wait until it has ended, and answer with its clip.

    The job goes on when its client goes away.
    """
    seconds = state["settings"].sync_timeout_seconds
    # the seat first: who cannot wait makes no job
    with state["watcher"].seat(caller.api_key) as seat:
        response = await accepted(request, video_call(caller, key, sent), sent, state=state, shown_as=view.accepted)
        video_id = video_id_of(response)
        send_headers(request, {"x-video-id": video_id})
        if key is None:
            # whatever comes now, to send the request again would make another job
            send_headers(request, {"x-should-retry": "false"})
        job = await until_over(video_id, seat, request, state=state, project=caller.project, seconds=seconds)
    job = visible(job, video_id)
    if not job.state.is_final:
        if await request.is_disconnected():
            return Response(status_code=CLIENT_GONE)
        raise NotInTime(job)
    check_finished(job)
    send_headers(request, _measured(job))
    # what a POST asks for is the whole clip
    headers = [(name, value) for name, value in request.scope["headers"] if name not in _CONDITIONS]
    fetch = Request({**request.scope, "method": "GET", "headers": headers}, request.receive)
    response = await deliver(job, find_variant(job, VIDEO), fetch, state, redirect=None)
    if response.status_code == HTTPStatus.FOUND:
        response.status_code = HTTPStatus.SEE_OTHER
    return response


def _measured(job: Job) -> dict[str, str]:
    assert job.started_at is not None
    assert job.finished_at is not None
    return {
        "x-model": job.model,
        "x-inference-time-s": f"{(job.finished_at - job.started_at).total_seconds():.3f}",
    }
