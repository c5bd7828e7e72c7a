"""The OpenAPI document: FastAPI's, with what the routes do not say themselves.

Routes check bodies and queries with dependencies of their own, so that every fault is answered in OpenAI's shape, and
FastAPI sees none of that. What routes have in common is added here: security, ids, and errors as shared components.
"""

from collections.abc import Iterator
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, cast

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel, ConfigDict
from rushes_core import keys
from rushes_core.campaigns.statements import PARTS
from rushes_core.campaigns.tables import STATES
from rushes_core.files import ALL_PURPOSES

from rushes_api.campaign_options import MAPS, OPTIONS
from rushes_api.deps import QUERY_NAMES, SCOPES_NEEDED
from rushes_api.errors import MINIMAX_PREFIX, PROBLEM_JSON
from rushes_api.minimax_task import STATES as TASK_STATES
from rushes_api.minimax_task import TASK_TYPES

Object = dict[str, Any]

_ULID = "[0-7][0-9A-HJKMNP-TV-Z]{25}"
VIDEO_ID = f"^video_{_ULID}$"
FILE_ID = f"^file_{_ULID}$"
KEY_ID = f"^key_{_ULID}$"
BATCH_ID = f"^batch_{_ULID}$"
ENDPOINT_ID = f"^whe_{_ULID}$"
DELIVERY_ID = "^whd_[0-9a-f]{32}$"
WORKER_ID = "^[A-Za-z0-9._-]{1,200}~[0-9]{1,10}-[0-9a-f]{1,16}$"
PROJECT = "^[a-z0-9][a-z0-9-]{0,62}$"


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


_DESCRIPTION = """\
OpenAI's Videos API, served by FastH3, with additions. The official `openai` SDK works unmodified, lines 2.x and 3.x.

Every answer has the header `x-request-id`: the one that was sent, if it is a token of at most 128 characters, or a new
one. A `traceparent` is noted in the log. Unknown query parameters and fields are refused by name. Errors are OpenAI's
envelope; with `Accept: application/problem+json` they are RFC 9457 and still hold it. Below `/v2` they are MiniMax's.
`HEAD` is served wherever `GET` is, except for event streams."""

_TAGS = {
    "videos": "Jobs: accepted, followed, cancelled, fetched",
    "files": "What is uploaded",
    "campaigns": "Thousands of jobs from one file; OpenAI calls them batches",
    "queue": "What waits, and whether it may start",
    "workers": "Replicas of the model, for operators",
    "minimax": "MiniMax's video API, for clients that were written for it",
    "models": "What is served, and its limits",
    "projects": "Whose jobs are apart from each other's, for operators",
    "api keys": "Who may send requests, and how many",
    "webhooks": "Who is told of what happens to jobs, and how that went",
    "health": "For load balancers, supervisors and Prometheus",
}

_ERRORS = {
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
_FORMS = {"multipart/form-data": "Multipart", "application/x-www-form-urlencoded": "Form"}
_ALWAYS = (400, 431, 500)
_WITH_KEY = (401, 403, 429, 503)
_WITH_BODY = (408, 413, 415)
_WITH_IDEMPOTENCY_KEY = (409, 422)
_WITH_VIDEO = (404, 410)

_RETRY_AFTER: Object = {"$ref": "#/components/headers/Retry-After"}
_HEADERS_OF_STATUS = {
    401: {"WWW-Authenticate": {"description": "`Bearer`", "schema": {"type": "string"}}},
    409: {"Retry-After": _RETRY_AFTER},
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": _RETRY_AFTER},
}
_HEADERS: Object = {
    "x-request-id": {
        "description": "Id of the request, for questions about it",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    },
    "Retry-After": {
        "description": "Whole seconds after which it is worth asking again",
        "schema": {"type": "string", "pattern": "^[1-9][0-9]?$"},
    },
    "openai-poll-after-ms": {
        "description": "While the job goes on: milliseconds after which it is worth asking again",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "Idempotent-Replayed": {
        "description": "`true`: this was answered before, to a request with the same `Idempotency-Key`",
        "schema": {"type": "string", "const": "true"},
    },
    "Preference-Applied": {
        "description": "`wait=N`: the answer waited for the end of the job, or N seconds",
        "schema": {"type": "string", "pattern": "^wait=[0-9]+$"},
    },
    "x-should-retry": {
        "description": "Whether sending the same request again may help; the `openai` SDK obeys it",
        "schema": {"enum": ["true", "false"]},
    },
    "x-ratelimit-limit-requests": {
        "description": "Requests per minute that the API key may send; absent when it has no limit",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "x-ratelimit-remaining-requests": {
        "description": "How many of them are left",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "x-ratelimit-reset-requests": {
        "description": "When all of them will be there again",
        "schema": {"type": "string"},
    },
}
_REQUEST_ID: Object = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Id of this request, chosen by the client; what is no such token is replaced",
    "schema": {"type": "string"},
}

_TIME: Object = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0}]}
_QUERY: dict[str, Object] = {
    "after": {"description": "Id of the last one of the page before"},
    "limit": {
        "description": "How many at most",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    "order": {"description": "By creation, the newest or the oldest first", "schema": {"enum": ["asc", "desc"]}},
    "status": {
        "description": "Only those with one of these statuses",
        "style": "form",
        "explode": False,
        "schema": {
            "type": "array",
            "minItems": 1,
            "items": {"enum": ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]},
        },
    },
    "model": {"description": "Only those of this model", "schema": {"type": "string"}},
    "created_after": {"description": "Only those that were created in a later second", "schema": _TIME},
    "created_before": {"description": "Only those that were created in an earlier second", "schema": _TIME},
    "metadata[]": {
        "name": "metadata",
        "description": "Only those whose metadata has all of these pairs: `metadata[key]=value`",
        "style": "deepObject",
        "explode": True,
        "schema": {
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    },
    "campaign_id": {
        "description": "Only those of this campaign",
        "schema": {"type": "string", "pattern": BATCH_ID},
    },
    "custom_id": {
        "description": "Only those with this `custom_id`",
        "schema": {"type": "string", "minLength": 1, "maxLength": 256},
    },
    "compat": {
        "description": "`openai`: show `cancelled` and `expired` as `failed`, with the same `error.code`",
        "schema": {"enum": ["openai"]},
    },
    "variant": {
        "description": "What to fetch",
        "schema": {"enum": ["video", "thumbnail", "spritesheet", "audio"], "default": "video"},
    },
    "redirect": {
        "description": "`false`: the URL and its end as JSON instead of a redirect",
        "schema": {"enum": ["true", "false"]},
    },
    "project": {"description": "Only those of this project", "schema": {"type": "string", "pattern": PROJECT}},
}
_QUERY_OF_DELIVERIES: dict[str, Object] = {
    "video_id": {
        "description": "Only those that tell of this video",
        "schema": {"type": "string", "pattern": VIDEO_ID},
    },
    "batch_id": {
        "description": "Only those that tell of this batch itself, not of its videos",
        "schema": {"type": "string", "pattern": f"^batch_{_ULID}$"},
    },
    "webhook_endpoint_id": {
        "description": "Only those to this endpoint",
        "schema": {"type": "string", "pattern": ENDPOINT_ID},
    },
    "status": {
        "description": "Only those with this status",
        "schema": {"enum": ["pending", "delivering", "delivered", "failed", "cancelled"]},
    },
}
_QUERY_OF_FILES: dict[str, Object] = {
    "purpose": {"description": "Only those for this purpose", "schema": {"enum": list(ALL_PURPOSES)}},
}
_DRY_RUN: Object = {
    "description": "Say what would be, and do nothing; of a list: only dry runs, which it has not otherwise",
    "schema": {"enum": ["0", "1", "true", "false"]},
}
_QUERY_OF_OPTIONS: dict[str, Object] = {
    **{
        name: {"description": f"As `{name}` in a body of JSON", "schema": {"type": "string"}}
        for name in OPTIONS
        if name not in MAPS
    },
    **{
        f"{name}[]": {
            "name": name,
            "description": f"As `{name}` in a body of JSON: `{name}[key]=value`",
            "style": "deepObject",
            "explode": True,
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
        for name in MAPS
    },
}
_QUERY_OF_CAMPAIGNS: dict[str, Object] = {
    "status": {
        "description": "Only those with one of these statuses",
        "style": "form",
        "explode": False,
        "schema": {"type": "array", "minItems": 1, "items": {"enum": list(STATES)}},
    },
    "dry_run": _DRY_RUN,
    "validate": {
        "description": "`strict`: one bad line fails the whole campaign",
        "schema": {"enum": ["lines", "strict"]},
    },
    "format": {
        "description": "Lines of JSON, or a table",
        "schema": {"enum": ["jsonl", "csv"], "default": "jsonl"},
    },
    "part": {
        "description": "Items that completed, those that ended without a clip, or all",
        "schema": {"enum": list(PARTS), "default": "all"},
    },
}
_QUERY_OF_QUEUE: dict[str, Object] = {
    "project": {
        "description": "Another project than the key's own, or `*` for all; needs the scope `admin`",
        "schema": {"type": "string", "pattern": rf"^\*$|{PROJECT}"},
    }
}
_QUERY_OF_TASKS: dict[str, Object] = {
    "page_num": {
        "description": "Which page",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 1},
    },
    "page_size": {
        "description": "How many at most",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    "filter.status": {"description": "Only those with this status", "schema": {"enum": list(TASK_STATES)}},
    "filter.model": {"description": "Only those of this model", "schema": {"type": "string"}},
    "filter.task_type": {"description": "Only those of this kind", "schema": {"enum": list(TASK_TYPES)}},
    "filter.task_ids": {
        "description": "Only these",
        "schema": {"type": "array", "items": {"type": "string", "pattern": VIDEO_ID}},
    },
}
_AFTER = {
    "/v1/videos": VIDEO_ID,
    "/v1/videos/{video_id}/attempts": "^attempt_[0-9]{1,18}$",
    "/v1/files": FILE_ID,
    "/v1/batches": BATCH_ID,
    "/v1/campaigns": BATCH_ID,
    "/v1/campaigns/{batch_id}/items": "^item_[0-9]{1,12}$",
    "/v1/projects": PROJECT,
    "/v1/api_keys": KEY_ID,
    "/v1/workers": WORKER_ID,
    "/v1/webhook_endpoints": ENDPOINT_ID,
    "/v1/webhook_deliveries": DELIVERY_ID,
}
_PATH: dict[str, Object] = {
    "video_id": {"description": "Id of a video", "schema": {"type": "string", "pattern": VIDEO_ID}},
    "file_id": {"description": "Id of a file", "schema": {"type": "string", "pattern": FILE_ID}},
    "batch_id": {"description": "Id of a batch", "schema": {"type": "string", "pattern": BATCH_ID}},
    "key_id": {"description": "Id of an API key", "schema": {"type": "string", "pattern": KEY_ID}},
    "endpoint_id": {"description": "Id of a webhook endpoint", "schema": {"type": "string", "pattern": ENDPOINT_ID}},
    "delivery_id": {"description": "Id of a webhook delivery", "schema": {"type": "string", "pattern": DELIVERY_ID}},
    "model_id": {"description": "Name of a model, slashes included", "schema": {"type": "string"}},
    "name": {"description": "Name of a project", "schema": {"type": "string", "pattern": PROJECT}},
    "worker_id": {"description": "Id of a replica", "schema": {"type": "string", "pattern": WORKER_ID}},
}


def describe(app: FastAPI) -> Object:
    """The document of `app`."""
    document = get_openapi(
        title="Rushes",
        version=version("rushes"),
        openapi_version="3.1.0",
        summary="An asynchronous render queue for FastH3",
        description=_DESCRIPTION,
        routes=app.routes,
    )
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    components: Object = document["components"]
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer", "description": "An API key"}}
    components["headers"] = _HEADERS
    components["parameters"] = {"X-Request-Id": _REQUEST_ID}
    components["responses"] = {name: _shared(status) for status, (name, _, _) in _ERRORS.items()}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for model in (ErrorBody, Problem, MiniMaxErrorBody):
        _add_schema(model.model_json_schema(), components["schemas"])
    for route, method in _documented(app):
        operation = document["paths"][route.path_format][method.lower()]
        _complete(operation, route, method, components["schemas"])
    used = {tag for path in document["paths"].values() for one in path.values() for tag in one["tags"]}
    document["tags"] = [{"name": name, "description": about} for name, about in _TAGS.items() if name in used]
    document["security"] = [{"bearer": []}]
    return document


def operation_id(route: APIRoute) -> str:
    """The name of the endpoint: stable while its path changes, and unique."""
    return route.name


def _documented(app: FastAPI) -> Iterator[tuple[APIRoute, str]]:
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods or ()):
                yield route, method


def _complete(operation: Object, route: APIRoute, method: str, schemas: Object) -> None:
    calls = set(_calls(route.dependant))
    scopes = [SCOPES_NEEDED[call] for call in calls if call in SCOPES_NEEDED]
    parameters: list[Object] = operation.setdefault("parameters", [])
    for parameter in parameters:
        if parameter["in"] == "path":
            parameter |= _PATH.get(parameter["name"], {})
    for call in calls:
        declared = {one["name"] for one in parameters if one["in"] == "query"}
        taken = QUERY_NAMES.get(call, ())
        # a map may come as one text too, which a document cannot say beside it
        names = [name for name in taken if name not in declared and f"{name}[]" not in taken]
        parameters += [_query_parameter(name, route.path_format, method) for name in names]
    parameters.sort(key=lambda one: (("path", "query", "header").index(one["in"]), one["name"]))
    if scopes:
        parameters.append({"$ref": "#/components/parameters/X-Request-Id"})
        # of a key with `admin` nothing else is asked
        scope = keys.ADMIN if keys.ADMIN in scopes else scopes[0]
        needed = "Any API key will do." if "" in scopes else f"Needs the scope `{_scope(scope, method)}`."
        operation["description"] = "\n\n".join(filter(None, [operation.get("description", ""), needed]))
    else:
        operation.setdefault("security", [])
    if "requestBody" in operation:
        _complete_body(operation["requestBody"], schemas)
    _complete_responses(operation, has_body=method in ("POST", "PATCH"), has_key=bool(scopes))
    if route.path_format.startswith(MINIMAX_PREFIX):
        _put_errors_in_minimax_envelope(operation["responses"])


def _scope(needed: str, method: str) -> str:
    return needed if needed != "videos" else "videos:read" if method == "GET" else "videos:write"


def _calls(dependant: Dependant) -> Iterator[Any]:
    for inner in dependant.dependencies:
        yield inner.call
        yield from _calls(inner)


def _query_parameter(name: str, path: str, method: str) -> Object:
    known = _QUERY
    if path == "/v1/webhook_deliveries":
        known = _QUERY | _QUERY_OF_DELIVERIES
    elif path == "/v1/files":
        known = _QUERY | _QUERY_OF_FILES
    elif path == "/v1/campaigns/{batch_id}/items":
        known = _QUERY
    elif path.startswith(("/v1/batches", "/v1/campaigns")):
        known = _QUERY_OF_OPTIONS | _QUERY_OF_CAMPAIGNS if method == "POST" else _QUERY | _QUERY_OF_CAMPAIGNS
    elif path.startswith("/v1/queue"):
        known = _QUERY | _QUERY_OF_QUEUE
    elif path.startswith(MINIMAX_PREFIX):
        known = _QUERY_OF_TASKS
    about: Object = {"schema": {"type": "string"}, **known.get(name, {})}
    if name == "after" and path in _AFTER:
        about["schema"] = {"type": "string", "pattern": _AFTER[path]}
    return {"name": name, "in": "query", **about}


def _complete_body(body: Object, schemas: Object) -> None:
    for media_type, content in cast("dict[str, Object]", body["content"]).items():
        name = _add_schema(content["schema"], schemas)
        if media_type in _FORMS:
            # generators choose the media type by the class of what they are given
            name, schema = f"{name}{_FORMS[media_type]}", schemas[name]
            schemas[name] = schema | {"title": name}
            maps = [field for field, one in schema["properties"].items() if _takes_object(one, schemas)]
            if maps:
                content["encoding"] = {field: {"style": "deepObject", "explode": True} for field in maps}
        content["schema"] = {"$ref": f"#/components/schemas/{name}"}


def _takes_object(schema: Object, schemas: Object) -> bool:
    if "$ref" in schema:
        return _takes_object(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return schema.get("type") == "object" or any(_takes_object(one, schemas) for one in schema.get("anyOf", ()))


def _add_schema(schema: Object, schemas: Object) -> str:
    """Move `schema` and what it defines among the shared ones; its name there."""
    title: str = schema["title"]
    if title not in schemas:
        own: Object = schema.get("$defs", {})
        # a request and an answer may have things of the same name that are not the same
        names = {name: name if schemas.get(name, inner) == inner else f"{title}{name}" for name, inner in own.items()}
        # generators name classes by the title
        schemas |= {name: _relocated(own[old], names) | {"title": name} for old, name in names.items()}
        schemas[title] = _relocated({name: inner for name, inner in schema.items() if name != "$defs"}, names)
    return title


def _relocated(value: Any, names: dict[str, str]) -> Any:
    """A copy of a schema whose references point at the shared schemas."""
    if isinstance(value, dict):
        return {
            name: f"#/components/schemas/{names[inner.rpartition('/')[2]]}"
            if name == "$ref"
            else _relocated(inner, names)
            for name, inner in cast("Object", value).items()
        }
    return [_relocated(inner, names) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def _complete_responses(operation: Object, *, has_body: bool, has_key: bool) -> None:
    responses: Object = operation["responses"]
    responses.pop("422", None)
    statuses = {*_ALWAYS}
    if has_key:
        statuses |= {*_WITH_KEY}
    names = {parameter.get("name") for parameter in operation["parameters"]}
    if has_body:
        statuses |= {*_WITH_BODY}
    if "Idempotency-Key" in names:
        statuses |= {*_WITH_IDEMPOTENCY_KEY}
    in_path = {parameter["name"] for parameter in operation["parameters"] if parameter.get("in") == "path"}
    statuses |= {*_WITH_VIDEO} if "video_id" in in_path else {404} if in_path else set()
    for status in statuses:
        responses.setdefault(str(status), {})
    for status, response in list(responses.items()):
        if int(status) >= HTTPStatus.BAD_REQUEST and "content" not in response:
            responses[status] = _error(int(status), response)
        else:
            response.setdefault("headers", {})["x-request-id"] = {"$ref": "#/components/headers/x-request-id"}
            _complete_success(response, operation, names)
    operation["responses"] = dict(sorted(responses.items()))


def _complete_success(response: Object, operation: Object, names: set[Any]) -> None:
    headers = response["headers"]
    if "Idempotency-Key" in names:
        headers["Idempotent-Replayed"] = {"$ref": "#/components/headers/Idempotent-Replayed"}
    if "Prefer" in names:
        headers["Preference-Applied"] = {"$ref": "#/components/headers/Preference-Applied"}
    if operation["operationId"] == "get_video":
        headers["openai-poll-after-ms"] = {"$ref": "#/components/headers/openai-poll-after-ms"}
    if operation.get("security") != []:
        for name in ("limit", "remaining", "reset"):
            header = f"x-ratelimit-{name}-requests"
            headers[header] = {"$ref": f"#/components/headers/{header}"}


def _error(status: int, declared: Object) -> Object:
    """The shared response, with the description and the headers that the route adds to it."""
    name, _, _ = _ERRORS[status]
    if "headers" in declared:
        shared = _shared(status)
        return shared | declared | {"headers": shared["headers"] | declared["headers"]}
    reference: Object = {"$ref": f"#/components/responses/{name}"}
    return reference if not declared.get("description") else reference | {"description": declared["description"]}


def _put_errors_in_minimax_envelope(responses: Object) -> None:
    schema = {"$ref": f"#/components/schemas/{MiniMaxErrorBody.__name__}"}
    for status in [status for status in responses if int(status) >= HTTPStatus.BAD_REQUEST]:
        responses[status] = _shared(int(status)) | {"content": {"application/json": {"schema": schema}}}


def _shared(status: int) -> Object:
    _, code, about = _ERRORS[status]
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
