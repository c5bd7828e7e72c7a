"""What the routes that manage something share: bodies of JSON, times, and what is not there."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from rushes_core.fields import printable

from rushes_api.body import JSON, parse_body, read_body
from rushes_api.deps import AdminCaller, AppState, State
from rushes_api.errors import ApiError, UnsupportedMedia
from rushes_api.form import split_header


async def _members(request: Request, caller: AdminCaller, state: AppState) -> Mapping[str, Any]:
    return await read_members(request, state)


async def read_members(request: Request, state: State) -> Mapping[str, Any]:
    """The members of the JSON object that was sent; none where there is no body.

    Raises:
        ApiError
    """
    body = await read_body(request, max_bytes=state["settings"].api_max_body_bytes)
    if not body:
        return {}
    content_types = request.headers.getlist("content-type")
    # forms have no numbers and no null
    if any(split_header(one)[0] != JSON for one in content_types):
        raise UnsupportedMedia(f"Content-Type {printable(content_types[0])} is not supported here; send {JSON}")
    return parse_body(body, content_types=content_types, content_encoding=request.headers.get("content-encoding", ""))


SentMembers = Annotated[Mapping[str, Any], Depends(_members)]
"""The members of the JSON object that was sent; none where there is no body."""


def given(members: Mapping[str, Any]) -> dict[str, Any]:
    """`members` without those that are null, for bodies in which that is the same as absent."""
    return {name: value for name, value in members.items() if value is not None}


def no_such_project(name: str) -> ApiError:
    return ApiError(
        f"no project {printable(name)}", param="project", code="project_not_found", status=HTTPStatus.NOT_FOUND
    )


def json_body(schema: dict[str, Any], *, required: bool = True, null_is_absent: bool = True) -> dict[str, Any]:
    """What the OpenAPI document says of a body."""
    if null_is_absent:
        needed = schema.get("required", ())
        members: dict[str, Any] = schema["properties"]
        nullable = {
            name: one if name in needed else {"anyOf": [one, {"type": "null"}]} for name, one in members.items()
        }
        schema = schema | {"properties": nullable}
    return {"requestBody": {"required": required, "content": {JSON: {"schema": schema}}}}
