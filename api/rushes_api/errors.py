"""Every error as the client sees it: OpenAI's envelope, and RFC 9457 beside it for those who ask; below /v2 MiniMax's.

ApiError                        status, code, message and headers of one answer
├── Unauthorized           401
├── InsufficientScope      403
├── UnsupportedMedia       415
├── BodyTooLarge           413
├── NotReady               409  the clip does not exist yet
├── GenerationFailed       409  the clip will never exist
├── RangeNotSatisfiable    416
└── Unavailable            503  a server behind the API cannot be reached, or schema and code do not match
    └── OutcomeUnknown     503  ... and it may have done what was asked: nothing must repeat it by itself
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import psycopg
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from psycopg.errors import UndefinedColumn, UndefinedFunction, UndefinedTable
from rushes_core.errors import InvalidRequest, JobDeleted, JobNotFound, RushesError, StorageError, TransitionRefused
from rushes_core.fields import printable
from rushes_core.log import get_logger
from rushes_core.parsing import InvalidFields
from rushes_core.request import ModelNotFound
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

log = get_logger(__name__)

RETRY_AFTER_SECONDS = 5
PROBLEM_JSON = "application/problem+json"
MAX_DETAILS = 20

MINIMAX_PREFIX = "/v2/"
_MINIMAX_ERRORS = {
    HTTPStatus.BAD_REQUEST: ("bad_request_error", 2013),
    HTTPStatus.UNAUTHORIZED: ("authorized_error", 1004),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", 1002),
    HTTPStatus.INTERNAL_SERVER_ERROR: ("server_error", 1000),
}
"""By status, MiniMax's word and number for an error."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CODES = {
    "model_not_found": HTTPStatus.NOT_FOUND,
    "project_not_found": HTTPStatus.NOT_FOUND,
    "api_key_not_found": HTTPStatus.NOT_FOUND,
    "worker_not_found": HTTPStatus.NOT_FOUND,
    "file_not_found": HTTPStatus.NOT_FOUND,
    "file_content_missing": HTTPStatus.NOT_FOUND,
    "file_deleted": HTTPStatus.GONE,
    "file_expired": HTTPStatus.GONE,
    "file_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "batch_not_found": HTTPStatus.NOT_FOUND,
    "batch_deleted": HTTPStatus.GONE,
    "archive_too_large": HTTPStatus.CONFLICT,
    "priority_not_allowed": HTTPStatus.FORBIDDEN,
    "queue_full": HTTPStatus.TOO_MANY_REQUESTS,
    "quota_exceeded": HTTPStatus.TOO_MANY_REQUESTS,
    "storage_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "overloaded": HTTPStatus.SERVICE_UNAVAILABLE,
    "webhook_secret_missing": HTTPStatus.NOT_FOUND,
    "webhook_endpoint_not_found": HTTPStatus.NOT_FOUND,
    "invalid_state": HTTPStatus.CONFLICT,
    "project_exists": HTTPStatus.CONFLICT,
    "precondition_failed": HTTPStatus.PRECONDITION_FAILED,
}


def responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document is to say of errors that a route has and others have not."""
    declared: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        about = declared.setdefault(_CODES[code].value, {"description": ""})
        about["description"] = ", ".join(filter(None, [about["description"], f"`{code}`"]))
    return declared


class ApiError(RushesError):
    """An answer that is an error."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: HTTPStatus | None = None,
        details: list[dict[str, Any]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.details = details
        self.headers = dict(headers or {})


class Unauthorized(ApiError):
    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"WWW-Authenticate": 'Bearer realm="rushes"'})


class InsufficientScope(ApiError):
    status = HTTPStatus.FORBIDDEN
    code = "insufficient_scope"

    def __init__(self, scope: str) -> None:
        super().__init__(f"this API key lacks the scope {scope}")


class UnsupportedMedia(ApiError):
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_media_type"


class BodyTooLarge(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "file_too_large"


class NotReady(ApiError):
    status = HTTPStatus.CONFLICT
    code = "video_not_ready"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after), "x-should-retry": "false"})


class GenerationFailed(ApiError):
    status = HTTPStatus.CONFLICT
    code = "generation_failed"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code, headers={"x-should-retry": "false"})


class RangeNotSatisfiable(ApiError):
    status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    code = "invalid_range"

    def __init__(self, message: str, *, num_bytes: int) -> None:
        super().__init__(message, param="Range", headers={"Content-Range": f"bytes */{num_bytes}"})


class Unavailable(ApiError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "service_unavailable"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(
            message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS), "x-should-retry": "true"}
        )


class OutcomeUnknown(Unavailable):
    code = "outcome_unknown"

    def __init__(self) -> None:
        super().__init__(
            "The database went away while the request was being committed: it may have taken effect. "
            "Look before you send it again, or send it with an Idempotency-Key."
        )
        self.headers["x-should-retry"] = "false"


def body_too_slow(rule: str = "") -> ApiError:
    """The answer to a body that does not arrive; `rule` says how fast it must."""
    return ApiError(
        f"The request body did not arrive in time{rule and f': {rule}'}.",
        code="request_timeout",
        status=HTTPStatus.REQUEST_TIMEOUT,
        # the rest of the body may still come
        headers={"Connection": "close"},
    )


def database_unavailable() -> Unavailable:
    """The answer while the database cannot be reached, or does not answer."""
    return Unavailable("The database did not answer. Try again later.", code="database_unavailable")


def _maintenance() -> Unavailable:
    return Unavailable("The database schema is not up to date. Try again later.", code="maintenance")


def is_database_gone(error: Exception) -> bool:
    """Whether `error` tells of a database that was not reached, or not to the end."""
    match error:
        case OperationalError() | InterfaceError() | PoolTimeout():
            return True
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return True
        case DBAPIError():
            return error.connection_invalidated
        case _:
            return False


def to_api_error(error: Exception) -> ApiError | None:
    """The answer that `error` stands for; None for what nobody raised on purpose."""
    match error:
        case ApiError():
            return error
        case ModelNotFound():
            return ApiError(str(error), param=error.param, code=error.code, status=HTTPStatus.NOT_FOUND)
        case InvalidFields():
            return ApiError(str(error), param=error.param, code=error.code, details=error.details[:MAX_DETAILS])
        case InvalidRequest():
            return ApiError(str(error), param=error.param, code=error.code)
        case JobNotFound():
            return ApiError(str(error), code=error.code, status=HTTPStatus.NOT_FOUND)
        case JobDeleted():
            return ApiError(str(error), code=error.code, status=HTTPStatus.GONE)
        case TransitionRefused():
            wait = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            return ApiError(
                str(error), code=error.code, status=HTTPStatus.CONFLICT, headers={"x-should-retry": "false"} | wait
            )
        case StorageError():
            return Unavailable("The object store did not answer. Try again later.", code="storage_unavailable")
        case ProgrammingError(orig=UndefinedTable() | UndefinedColumn() | UndefinedFunction()):
            return _maintenance()
        case UndefinedTable() | UndefinedColumn() | UndefinedFunction():
            return _maintenance()
        case _ if is_database_gone(error):
            return database_unavailable()
        case RequestValidationError():
            return _invalid_parameters(error)
        case _:
            return None


def _invalid_parameters(error: RequestValidationError) -> ApiError:
    found = [{"loc": [str(part) for part in detail["loc"]], "msg": str(detail["msg"])} for detail in error.errors()]
    first = found[0]
    param = printable(first["loc"][-1])
    return ApiError(f"{param}: {first['msg']}", param=param, details=found[:MAX_DETAILS])


def render(error: ApiError, *, request_id: str, path: str, accept: str) -> Response:
    """The response for `error`. Its body is ASCII whatever the message holds."""
    status = HTTPStatus(error.status)
    if path.startswith(MINIMAX_PREFIX):
        return Response(
            json.dumps(_minimax_body(error, status, request_id)),
            status.value,
            headers=error.headers,
            media_type="application/json",
        )
    envelope = {
        "message": str(error),
        "type": _error_type(status),
        "param": error.param,
        "code": error.code,
        "details": error.details or [],
        "request_id": request_id,
    }
    body: dict[str, Any] = {"error": envelope}
    media_type = "application/json"
    if _wants_problem(accept):
        media_type = PROBLEM_JSON
        body = {
            "type": "about:blank",
            "title": status.phrase,
            "status": status.value,
            "detail": str(error),
            "instance": path,
            "code": error.code,
            "param": error.param,
            "request_id": request_id,
            **body,
        }
    return Response(json.dumps(body), status.value, headers=error.headers, media_type=media_type)


def _error_type(status: HTTPStatus) -> str:
    if status is HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def _minimax_body(error: ApiError, status: HTTPStatus, request_id: str) -> dict[str, Any]:
    """MiniMax's envelope, whose messages end with a number that its clients look for; `code` and `param` are additions.

    The contract: https://platform.minimax.io/docs/api-reference/errorcode
    """
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    other = _MINIMAX_ERRORS[HTTPStatus.INTERNAL_SERVER_ERROR if is_ours else HTTPStatus.BAD_REQUEST]
    kind, number = _MINIMAX_ERRORS.get(status, other)
    detail = {
        "type": kind,
        "message": f"{error} ({number})",
        "http_code": str(status.value),
        "code": error.code,
        "param": error.param,
    }
    return {"type": "error", "error": detail, "request_id": request_id}


def _wants_problem(accept: str) -> bool:
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        if media_type == PROBLEM_JSON:
            return not any(p.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for p in parameters)
    return False


def respond(request: Request, error: ApiError) -> Response:
    """`render` for the request at hand."""
    return render(
        error,
        request_id=request.scope.get("request_id", ""),
        path=ascii(request.scope["path"])[1:-1],
        accept=request.headers.get("accept", ""),
    )


def internal_error() -> ApiError:
    """The answer to a fault of ours; what happened is in the log, under the request's id."""
    return ApiError(
        "The server had an error while processing the request.",
        code="internal_error",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def install(app: FastAPI) -> None:
    """Answer every known error of `app` through `respond`. Unknown ones are left to the outermost boundary."""

    async def known(request: Request, error: Exception) -> Response:
        answer = to_api_error(error)
        if answer is None:
            raise error
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.warning("request_refused", code=answer.code, error=str(error).splitlines()[0])
        return respond(request, answer)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return respond(request, _routing_error(request, error))

    for kind in (RushesError, DBAPIError, psycopg.Error, PoolTimeout, RequestValidationError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http_error)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    path: str = request.scope["path"]
    where = f"{printable(request.method)} {printable(path)}"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(f"unknown route: {where}", code="unknown_url", status=HTTPStatus.NOT_FOUND)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed_methods(request)
        headers["Allow"] = ", ".join(allowed)
        message = f"{where} is not supported; allowed: {', '.join(allowed)}"
        return ApiError(message, code="method_not_allowed", status=HTTPStatus.METHOD_NOT_ALLOWED, headers=headers)
    return ApiError(
        printable(str(error.detail)), code="invalid_request", status=HTTPStatus(error.status_code), headers=headers
    )


def _allowed_methods(request: Request) -> list[str]:
    """The methods that some route has for the request's path."""
    routed = {method for method in _METHODS if _is_routed({**request.scope, "method": method}, request.app)}
    if "GET" in routed and is_get_without_body(request.scope["path"]):
        routed.add("HEAD")
    return [method for method in _METHODS if method in routed]


def is_get_without_body(path: str) -> bool:
    """Whether HEAD of this path is its GET without the body. A clip answers HEAD by itself, and so does what takes long
    to make; a stream would not end."""
    return not path.endswith(("/content", "/events", "/manifest", "/archive"))


def _is_routed(scope: dict[str, Any], app: FastAPI) -> bool:
    found = next((route for route in app.routes if route.matches(scope)[0] is Match.FULL), None)
    return found is not None and getattr(found, "endpoint", None) is not _refuse_method


async def _refuse_method(request: Request) -> Response:
    raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)


def reserve_literal_paths(app: FastAPI) -> None:
    """Have paths without parameters be nothing else: `GET /v1/videos/validate` asks for no video of that name."""
    routes = [context.original_route for context in iter_route_contexts(app.routes)]
    known = [route for route in routes if isinstance(route, APIRoute)]
    for path in {route.path for route in known if "{" not in route.path}:
        own = {method for route in known if route.path == path for method in route.methods or ()}
        if any(route.path != path and route.path_regex.match(path) for route in known):
            others = [method for method in _METHODS if method not in own]
            app.router.routes.insert(0, Route(path, _refuse_method, methods=others, include_in_schema=False))
