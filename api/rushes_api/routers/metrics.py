"""Figures for Prometheus."""

from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from rushes_core import keys

from rushes_api.deps import AppState, NoQuery
from rushes_api.errors import InsufficientScope

router = APIRouter(tags=["health"])


async def _may_scrape(request: Request, state: AppState) -> None:
    if state["settings"].metrics_open:
        return
    caller = await state["keys"].caller(request.headers.getlist("authorization"))
    if keys.ADMIN not in caller.scopes:
        raise InsufficientScope(keys.ADMIN)


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"},
    401: {},
    403: {},
    503: {},
}
_SECURITY: dict[str, Any] = {"security": [{"bearer": []}, {}]}


@router.get(
    "/metrics",
    response_class=Response,
    responses=_RESPONSES,
    dependencies=[Depends(_may_scrape)],
    openapi_extra=_SECURITY,
)
async def get_metrics(parameters: NoQuery, state: AppState) -> Response:
    """Requests of this process, and the queue and the replicas as the database has them.

    Needs the scope `admin`, or no key where the deployment says so.
    """
    text = await state["metrics"].text(
        state["sessions"],
        num_waiting=state["watcher"].num_waiting,
        seen_within_seconds=state["settings"].lease_seconds,
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)
