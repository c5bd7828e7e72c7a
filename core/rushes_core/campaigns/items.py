"""From a line of a campaign's file to the job that it asks for, through the same checks as `POST /v1/videos`."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from rushes_core.campaigns.lines import CUSTOM_ID, OF_CAMPAIGNS, LineError
from rushes_core.errors import InvalidRequest
from rushes_core.fields import PRIORITIES, is_storable, shown
from rushes_core.parsing import unsupported
from rushes_core.request import bound_tokens, resolve
from rushes_core.served_model import ServedModel

MAX_CUSTOM_ID = 256
METHOD = "POST"
URL = "/v1/videos"
"""What every line of an OpenAI batch file asks for."""

_ENVELOPE = ("body", "method", "url")
_PRIORITY_NAMES = {value: name for name, value in PRIORITIES.items()}
_DURATION = (("seconds", None), ("num_frames", None), ("target", "duration_seconds"))
_CANVAS = (("size", None), ("target", "short_edge"), ("target", "aspect_ratio"))
"""Members that say the same: a line that has one of them does without the campaign's."""


@dataclass(frozen=True, slots=True)
class Item:
    """A line that can become a job: what of its row is not the campaign's."""

    custom_id: str | None
    prompt: str
    seed: int
    width: int
    height: int
    num_frames: int
    priority: int | None
    """None: the campaign's."""
    request: str
    """JSON."""
    deadline_at: datetime | None
    retention_seconds: int | None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a campaign says of all its lines.

    Args:
        defaults: members that every line has unless it says otherwise.
        priorities: words of the classes that its key's jobs may have; None: all.
        buckets: names of the buckets that `output` may name.
    """

    model: ServedModel
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    priorities: Collection[str] | None = None
    buckets: Collection[str] = ()


def resolve_line(value: Mapping[str, Any], terms: Terms) -> Item | LineError:
    """The job that a line asks for, or why there is none.

    Args:
        value: a line of an OpenAI batch file, or a request with perhaps a `custom_id`.
    """
    try:
        custom_id, body = _unwrapped(value)
        return _item(custom_id, body, terms)
    except InvalidRequest as error:
        return LineError.of(error)


def custom_id_of(value: Mapping[str, Any] | None) -> str | None:
    """The `custom_id` that a line has, if it can be told of."""
    custom_id = None if value is None else value.get(CUSTOM_ID)
    if isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID and is_storable(custom_id):
        return custom_id
    return None


def _unwrapped(value: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    is_openai = any(name in value for name in _ENVELOPE)
    custom_id = _custom_id(value, is_required=is_openai)
    if not is_openai:
        return custom_id, {name: member for name, member in value.items() if name != CUSTOM_ID}
    for name, wanted in (("method", METHOD), ("url", URL)):
        given = value.get(name)
        if given is None:
            raise InvalidRequest(f"{name} is required", param=name, code="missing_required_parameter")
        if given != wanted:
            raise InvalidRequest(f"{name} must be {wanted}, got {shown(given)}", param=name)
    for name in value:
        if name not in (CUSTOM_ID, *_ENVELOPE):
            raise InvalidRequest(
                f"unknown parameter: {shown(name)}; the members of the request belong into body",
                param=shown(name)[1:-1],
                code="unknown_parameter",
            )
    body = value.get("body")
    if body is None:
        raise InvalidRequest("body is required", param="body", code="missing_required_parameter")
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, got {shown(body)}", param="body")
    return custom_id, cast("dict[str, Any]", body)


def _custom_id(value: Mapping[str, Any], *, is_required: bool) -> str | None:
    custom_id = value.get(CUSTOM_ID)
    if custom_id is None:
        if is_required:
            raise InvalidRequest("custom_id is required", param=CUSTOM_ID, code="missing_required_parameter")
        return None
    # a number is no text: 1 and "1" would be one id in the output and two in the file
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID or not is_storable(custom_id):
        raise InvalidRequest(
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters without NUL, got {shown(custom_id)}",
            param=CUSTOM_ID,
        )
    return custom_id


def _item(custom_id: str | None, body: Mapping[str, Any], terms: Terms) -> Item:
    for name, reason in OF_CAMPAIGNS.items():
        if body.get(name) is not None:
            raise unsupported(name, reason)
    merged = merge(terms.defaults, body) if terms.defaults else body
    resolved = resolve(merged, terms.model, buckets=terms.buckets, measure=bound_tokens)
    priority = None if merged.get("priority") is None else resolved.priority
    if terms.priorities is not None and priority is not None and _PRIORITY_NAMES[priority] not in terms.priorities:
        raise InvalidRequest(
            f"the campaign's API key may not use priority {_PRIORITY_NAMES[priority]}",
            param="priority",
            code="priority_not_allowed",
        )
    return Item(
        custom_id=custom_id,
        prompt=resolved.prompt,
        seed=resolved.seed,
        width=resolved.canvas.width,
        height=resolved.canvas.height,
        num_frames=resolved.clip.num_frames,
        priority=priority,
        request=json.dumps(resolved.asked, ensure_ascii=False),
        deadline_at=resolved.deadline,
        retention_seconds=resolved.retention_seconds,
    )


def merge(defaults: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the members of `defaults` that it does not have; null is the same as absent.

    Objects, such as metadata, are merged too. Of members that say the same in other words, such as `seconds` and
    `num_frames`, those of `body` alone count.
    """
    merged: dict[str, Any] = {name: _copied(value) for name, value in defaults.items()}
    for group in (_DURATION, _CANVAS):
        if any(_has(body, *member) for member in group):
            for name, child in group:
                _drop(merged, name, child)
    for name, value in body.items():
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            members = cast("dict[str, Any]", value)
            merged[name].update((key, member) for key, member in members.items() if member is not None)
        else:
            merged[name] = value
    return merged


def _copied(value: Any) -> Any:
    return dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else value


def _has(members: Mapping[str, Any], name: str, child: str | None) -> bool:
    value = members.get(name)
    if child is None:
        return value is not None
    return isinstance(value, dict) and cast("dict[str, Any]", value).get(child) is not None


def _drop(members: dict[str, Any], name: str, child: str | None) -> None:
    if child is None:
        members.pop(name, None)
    elif isinstance(members.get(name), dict):
        members[name].pop(child, None)
