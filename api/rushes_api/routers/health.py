"""Liveness, which depends on nothing, and readiness, which says what is missing."""

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from rushes_api.deps import AppState
from rushes_api.errors import RETRY_AFTER_SECONDS
from rushes_api.openapi_errors import Error
from rushes_api.readiness import OK

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok"]


class Ready(Health):
    checks: dict[str, str]


class NotReady(BaseModel):
    """What is missing, by check."""

    status: Literal["unavailable"]
    checks: dict[str, str]
    error: Error


@router.get("/healthz", response_model=Health)
async def healthz() -> dict[str, str]:
    """The process runs and answers."""
    return {"status": "ok"}


@router.get("/readyz", response_model=Ready, responses={503: {"model": NotReady, "description": "What is missing"}})
async def readyz(request: Request, state: AppState) -> JSONResponse:
    """200 when a job that is sent now can be accepted, rendered and fetched; else 503 with the reasons."""
    checks = await state["readiness"].check()
    failed = {name: reason for name, reason in checks.items() if reason != OK}
    if not failed:
        return JSONResponse({"status": "ok", "checks": checks})
    error = {
        "message": "; ".join(f"{name}: {reason}" for name, reason in failed.items()),
        "type": "server_error",
        "param": None,
        "code": "not_ready",
        "details": [{"loc": [name], "msg": reason} for name, reason in failed.items()],
        "request_id": request.scope["request_id"],
    }
    return JSONResponse(
        {"status": "unavailable", "checks": checks, "error": error},
        status_code=503,
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
    )
