"""Figures for Prometheus."""

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from rushes_api.deps import MAY_SCRAPE, AppState, NoQuery

router = APIRouter(tags=["health"])


_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"},
}
_SECURITY: dict[str, Any] = {"security": [{"bearer": []}, {}]}


@router.get(
    "/metrics",
    response_class=Response,
    responses=_RESPONSES,
    dependencies=[MAY_SCRAPE],
    openapi_extra=_SECURITY,
)
async def get_metrics(parameters: NoQuery, state: AppState) -> Response:
    """Requests of the processes behind this port, and the queue and the replicas as the database has them.

    No key is needed where the deployment is set up so.
    """
    text = await state["metrics"].text(
        state["sessions"],
        seen_within_seconds=state["settings"].lease_seconds,
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)
