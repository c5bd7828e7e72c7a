"""What clients of MiniMax's video API, version 2, ask for: its body, as one of `POST /v1/videos`.

The contract: https://platform.minimax.io/docs/api-reference/video-generation-v2-create
"""

from dataclasses import replace
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from rushes_core.clip import MAX_SECONDS, MIN_SECONDS
from rushes_core.errors import InvalidRequest
from rushes_core.fields import ASPECT_RATIOS, SHORT_EDGES, Fields, Prompt, Seed, shown, unsupported_size
from rushes_core.parsing import parse_as, unsupported
from rushes_core.request import FROM_TEXT, ModelNotFound, ResolvedRequest, resolve
from rushes_core.served_model import ServedModel

from rushes_api.admission import Submission, submission
from rushes_api.body import JSON
from rushes_api.deps import caller_of, state_of
from rushes_api.once import fingerprint, sent_key

MODELS = ("MiniMax-H3", "MiniMax-H3-Max")
"""Names that MiniMax's clients know; here they stand for the model that is served."""
RESOLUTIONS = {f"{edge}P": edge for edge in SHORT_EDGES}

_DURATIONS = range(MIN_SECONDS, MAX_SECONDS + 1)
_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
        {"enum": [str(seconds) for seconds in _DURATIONS]},
    ]
}
_TEXT = "text"
_MEDIA = ("image_url", "video_url", "audio_url")
_UNSUPPORTED = {
    "callback_url": "register an endpoint with POST /v1/webhook_endpoints, which is told by signed webhooks",
}
"""Fields that MiniMax has, and why they are refused here."""


def _resolution(value: object) -> object:
    capital = value.upper() if isinstance(value, str) else value
    if capital not in (*RESOLUTIONS,):
        raise unsupported_size(RESOLUTIONS, value)
    return capital


def _ratio(value: object) -> object:
    if value not in ASPECT_RATIOS:
        raise unsupported_size(ASPECT_RATIOS, value)
    return value


def _duration(value: object) -> object:
    if value in (*_DURATIONS, *map(str, _DURATIONS)):
        return int(cast("float | str", value))
    raise PydanticCustomError(
        "invalid_value",
        "must be a whole number of seconds between {low} and {high}, got {value}",
        {"low": MIN_SECONDS, "high": MAX_SECONDS, "value": shown(value)},
    )


class ContentItem(Fields):
    """One part of the input; here always the prompt."""

    type: Annotated[str, WithJsonSchema({"enum": [_TEXT]})]
    text: Prompt


class Extra(Fields):
    """Options of MiniMax-H3-Max."""

    prompt_expansion_mode: Annotated[Any, WithJsonSchema({"enum": ["disabled", None]})] = None


class TaskRequest(Fields):
    """The body of `POST /v2/video_generation`. Unknown fields are refused by name; null is the same as absent."""

    model: str
    content: Annotated[list[ContentItem], Field(json_schema_extra={"minItems": 1, "maxItems": 1})]
    resolution: Annotated[str, BeforeValidator(_resolution), WithJsonSchema({"enum": list(RESOLUTIONS)})]
    duration: Annotated[int, BeforeValidator(_duration), WithJsonSchema(_DURATION_SCHEMA)]
    ratio: Annotated[str, BeforeValidator(_ratio), WithJsonSchema({"enum": ASPECT_RATIOS})]
    extra: Extra | None = None
    aigc_watermark: Annotated[Any, WithJsonSchema({"enum": [False, None]})] = None
    seed: Seed | None = None
    """MiniMax has none."""


def parse(members: dict[str, Any]) -> TaskRequest:
    """The body of a new task.

    Raises:
        InvalidRequest: it asks for what is not served here, or as `parse_as`.
    """
    for name, reason in _UNSUPPORTED.items():
        if members.get(name) not in (None, ""):
            raise unsupported(name, reason)
    said = {name: value for name, value in members.items() if name not in _UNSUPPORTED}
    if isinstance(content := said.get("content"), list):
        said["content"] = [_said(item) for item in cast("list[Any]", content)]
        _check_kinds(said["content"])
    request = parse_as(TaskRequest, said)
    if len(request.content) != 1:
        raise InvalidRequest(f"content must hold exactly one text, got {len(request.content)}", param="content")
    expansion = request.extra.prompt_expansion_mode if request.extra else None
    if expansion not in (None, "disabled"):
        name = "extra.prompt_expansion_mode"
        raise unsupported(name, f"prompts are rendered as they are, 'disabled', not {shown(expansion)}")
    if request.aigc_watermark not in (None, False):
        raise unsupported("aigc_watermark", f"clips bear no mark, got {shown(request.aigc_watermark)}")
    return request


def _said(item: object) -> object:
    """A part of the input without the members that every part has for some clients, and that say nothing."""
    if not isinstance(item, dict):
        return item
    members = cast("dict[str, Any]", item).items()
    return {name: value for name, value in members if value is not None and (name, value) != ("role", "")}


def _check_kinds(items: list[object]) -> None:
    for index, item in enumerate(items):
        kind = cast("dict[str, Any]", item).get("type") if isinstance(item, dict) else None
        if kind in _MEDIA:
            raise unsupported(f"content.{index}", f"{kind}: {FROM_TEXT}")
        if kind is not None and kind != _TEXT:
            raise InvalidRequest(
                f"content.{index}.type must be {_TEXT}, got {shown(kind)}", param=f"content.{index}.type"
            )


def resolved(request: TaskRequest, model: ServedModel) -> ResolvedRequest:
    """What would be rendered.

    Raises:
        InvalidRequest: the prompt is not one that the model takes.
        ModelNotFound: the body asks for a model that is not served under any name.
    """
    if request.model not in (*MODELS, model.name):
        served = ", ".join(dict.fromkeys((*MODELS, model.name)))
        raise ModelNotFound(f"model {shown(request.model)} is not served here; served: {served}", param="model")
    target = {"short_edge": RESOLUTIONS[request.resolution], "aspect_ratio": request.ratio}
    body = {"prompt": request.content[0].text, "seconds": request.duration, "target": target, "seed": request.seed}
    try:
        return replace(resolve(body, model), model_requested=None if request.model == model.name else request.model)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="content.0.text", code=error.code) from error


async def _task(request: Request) -> Submission[ResolvedRequest]:
    await caller_of(request)
    key, state = await sent_key(request), state_of(request)
    return await submission(
        request,
        key,
        state,
        lambda members: fingerprint(parse(members)),
        lambda members: resolved(parse(members), state["model"]),
    )


SentTask = Annotated[Submission[ResolvedRequest], Depends(_task)]

TASK_BODY: dict[str, Any] = {"required": True, "content": {JSON: {"schema": TaskRequest.model_json_schema()}}}
"""What the OpenAPI document says of a new task."""
