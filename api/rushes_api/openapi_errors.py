"""Errors in the OpenAPI document: their bodies, what each status means, and the headers that come with it."""

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict

from rushes_api.errors import PROBLEM_JSON

Object = dict[str, Any]


class Error(BaseModel):
    """What went wrong. The official SDKs read `message`, `type`, `param` and `code`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    type: str
    """`invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """The field, parameter or header that is at fault."""
    code: str
    details: list[dict[str, Any]]
    """Every fault, when there are several: `loc` and `msg`."""
    request_id: str


class ErrorBody(BaseModel):
    """Every answer of 400 and above."""

    error: Error


class Problem(BaseModel):
    """RFC 9457, for those who send `Accept: application/problem+json`."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    param: str | None
    request_id: str
    error: Error


class MiniMaxError(BaseModel):
    """What went wrong, to MiniMax's clients."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """`bad_request_error`, `authorized_error`, `rate_limit_error` or `server_error`."""
    message: str
    """Ends with MiniMax's number for it."""
    http_code: str
    code: str
    param: str | None
    """The field, parameter or header that is at fault."""


class MiniMaxErrorBody(BaseModel):
    """Every answer of 400 and above below /v2."""

    type: str
    error: MiniMaxError
    request_id: str


ERRORS = {
    400: ("BadRequest", "invalid_value", "A parameter, a header or the body is wrong; `param` names it"),
    401: ("Unauthorized", "invalid_api_key", "There is no API key, or it does not work"),
    403: ("Forbidden", "insufficient_scope", "The API key lacks the scope"),
    404: ("NotFound", "video_not_found", "There is no such thing, or it belongs to another project"),
    408: ("RequestTimeout", "request_timeout", "The body did not arrive in time"),
    409: ("Conflict", "invalid_state", "The state of the thing does not allow it, or a request with the same key runs"),
    410: ("Gone", "video_deleted", "It was there and was removed"),
    412: ("PreconditionFailed", "precondition_failed", "It is another than `If-Match` names"),
    413: ("ContentTooLarge", "file_too_large", "The body is larger than the deployment reads"),
    415: ("UnsupportedMediaType", "unsupported_media_type", "The body is of a type that is not read here"),
    416: ("RangeNotSatisfiable", "invalid_range", "The range holds no byte"),
    422: ("UnprocessableContent", "idempotency_key_reused", "The `Idempotency-Key` was sent with another request"),
    429: ("TooManyRequests", "rate_limit_exceeded", "A limit of the API key is reached"),
    431: ("HeadersTooLarge", "headers_too_large", "The request has too many headers, or too long ones"),
    500: ("InternalError", "internal_error", "A fault of the service; the log has it under the request's id"),
    503: ("Unavailable", "database_unavailable", "A server behind the API cannot be reached, or does not answer"),
    504: ("SyncTimeout", "sync_timeout", "The job goes on, but not within this request"),
}

_RETRY_AFTER: Object = {"$ref": "#/components/headers/Retry-After"}
_HEADERS_OF_STATUS = {
    401: {"WWW-Authenticate": {"description": "`Bearer`", "schema": {"type": "string"}}},
    409: {"Retry-After": _RETRY_AFTER},
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": _RETRY_AFTER},
}


def error_response(status: int, declared: Object) -> Object:
    """The shared response, with the description and the headers that the route adds to it."""
    name, _, _ = ERRORS[status]
    if "headers" in declared:
        shared = shared_response(status)
        return shared | declared | {"headers": shared["headers"] | declared["headers"]}
    reference: Object = {"$ref": f"#/components/responses/{name}"}
    return reference if not declared.get("description") else reference | {"description": declared["description"]}


def put_in_minimax_envelope(responses: Object) -> None:
    """Have the errors among `responses` be MiniMax's."""
    schema = {"$ref": f"#/components/schemas/{MiniMaxErrorBody.__name__}"}
    for status in [status for status in responses if int(status) >= HTTPStatus.BAD_REQUEST]:
        responses[status] = shared_response(int(status)) | {"content": {"application/json": {"schema": schema}}}


def shared_response(status: int) -> Object:
    """What every route answers with this status."""
    _, code, about = ERRORS[status]
    error: Object = {
        "message": about.replace("`", ""),
        "type": "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error",
        "param": None,
        "code": code,
        "details": [],
        "request_id": "req_01K0Z8W5T3N9F6Q2RJ4XCB7MEH",
    }
    return {
        "description": about,
        "headers": {
            "x-request-id": {"$ref": "#/components/headers/x-request-id"},
            "x-should-retry": {"$ref": "#/components/headers/x-should-retry"},
            **_HEADERS_OF_STATUS.get(status, {}),
        },
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/ErrorBody"},
                "example": {"error": error},
            },
            PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}},
        },
    }
