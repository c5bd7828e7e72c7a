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
from rushes_core import keys

from rushes_api.deps import QUERY_NAMES, SCOPES_NEEDED
from rushes_api.errors import MINIMAX_PREFIX
from rushes_api.openapi_errors import (
    ERRORS,
    ErrorBody,
    MiniMaxErrorBody,
    Problem,
    error_response,
    put_in_minimax_envelope,
    shared_response,
)
from rushes_api.openapi_parameters import PATH, REQUEST_ID, query_parameter

Object = dict[str, Any]

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

_FORMS = {"multipart/form-data": "Multipart", "application/x-www-form-urlencoded": "Form"}
_ALWAYS = (400, 431, 500)
_WITH_KEY = (401, 403, 429, 503)
_WITH_BODY = (408, 413, 415)
_WITH_IDEMPOTENCY_KEY = (409, 422)
_WITH_VIDEO = (404, 410)
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
    components["parameters"] = {"X-Request-Id": REQUEST_ID}
    components["responses"] = {name: shared_response(status) for status, (name, _, _) in ERRORS.items()}
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
            parameter |= PATH.get(parameter["name"], {})
    for call in calls:
        declared = {one["name"] for one in parameters if one["in"] == "query"}
        taken = QUERY_NAMES.get(call, ())
        # a map may come as one text too, which a document cannot say beside it
        names = [name for name in taken if name not in declared and f"{name}[]" not in taken]
        parameters += [query_parameter(name, route.path_format, method) for name in names]
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
        put_in_minimax_envelope(operation["responses"])


def _scope(needed: str, method: str) -> str:
    return needed if needed != "videos" else "videos:read" if method == "GET" else "videos:write"


def _calls(dependant: Dependant) -> Iterator[Any]:
    for inner in dependant.dependencies:
        yield inner.call
        yield from _calls(inner)


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
            responses[status] = error_response(int(status), response)
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
