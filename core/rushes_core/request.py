"""A client's request for a clip: strict fields, and what they resolve to before any GPU time is spent."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from rushes_core.canvas import CANVASES, DEFAULT_CANVAS, SIZE_ALIASES, Canvas, canvas_for_size
from rushes_core.clip import FPS, MAX_SECONDS, MIN_SECONDS, Clip, frames_for
from rushes_core.errors import InvalidRequest
from rushes_core.ids import new_video_id
from rushes_core.moment import MAX_AHEAD, MAX_BEHIND, MIN_CANCEL_AFTER, parse_duration, parse_moment
from rushes_core.served_model import ServedModel

MAX_SEED = 2**63 - 1
DEFAULT_SECONDS = "4"
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

PRIORITIES = {"interactive": 0, "normal": 1, "bulk": 2}

_SECONDS_TEXT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?", re.ASCII)
_UNSUPPORTED = (
    "input_reference",
    "negative_prompt",
    "image",
    "video",
    "audio",
    "keyframes",
    "references",
    "conditions",
)


def _seconds(value: object) -> str:
    """The requested duration as text: a plain decimal string, or a JSON number written as one."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise PydanticCustomError("invalid_value", "must be a number of seconds, as a number or a string")
    text = f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    if not _SECONDS_TEXT.fullmatch(text):
        raise PydanticCustomError(
            "invalid_value",
            "must be a decimal number of seconds between {low} and {high}, got {value}",
            {"low": MIN_SECONDS, "high": MAX_SECONDS, "value": shown(value)},
        )
    if not MIN_SECONDS <= float(text) <= MAX_SECONDS:
        raise PydanticCustomError(
            "invalid_value",
            "must be between {low} and {high}, got {value}",
            {"low": MIN_SECONDS, "high": MAX_SECONDS, "value": text},
        )
    return f"{float(text):g}" if float(text) == round(float(text), 4) else text


def _size(value: object) -> str:
    if isinstance(value, str) and canvas_for_size(value) is not None:
        return value
    raise PydanticCustomError(
        "unsupported_size",
        "must be one of {sizes}, got {value}",
        {"sizes": ", ".join([*(c.size for c in CANVASES), *SIZE_ALIASES]), "value": shown(value)},
    )


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_value", "must be a map of strings to strings")
    pairs = cast("dict[object, object]", value)
    if len(pairs) > MAX_METADATA_PAIRS:
        raise PydanticCustomError(
            "invalid_value",
            "must have at most {limit} pairs, got {count}",
            {"limit": MAX_METADATA_PAIRS, "count": len(pairs)},
        )
    for key, item in pairs.items():
        for text, what, limit in ((key, "keys", MAX_METADATA_KEY), (item, "values", MAX_METADATA_VALUE)):
            if not isinstance(text, str) or len(text) > limit:
                raise PydanticCustomError(
                    "invalid_value",
                    "{what} must be strings of at most {limit} characters, got {value}",
                    {"what": what, "limit": limit, "value": shown(text)},
                )
            if not is_storable(text):
                raise PydanticCustomError(
                    "invalid_value", "{what} must be valid Unicode without NUL characters", {"what": what}
                )
    return cast("dict[str, str]", pairs)


def _moment(value: object) -> datetime:
    try:
        return parse_moment(value)
    except ValueError as error:
        raise PydanticCustomError(
            "invalid_value", "{problem}, got {value}", {"problem": str(error), "value": shown(value)}
        ) from error


def _prompt(value: object) -> str:
    # pydantic's own check of text refuses lone surrogates without naming them; `check_prompt` does
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_value", "must be a string, got {value}", {"value": shown(value)})
    return value


def is_storable(text: str) -> bool:
    """Whether Postgres can hold `text`: no NUL, no lone surrogate."""
    return "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def shown(value: object) -> str:
    """`value` for an error message: short, printable, encodable."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


Moment = Annotated[
    datetime,
    BeforeValidator(_moment),
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}),
]
"""A time with its zone, or Unix seconds."""


class VideoRequest(BaseModel):
    """The body of `POST /v1/videos`. Unknown fields are refused by name; null is the same as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Any: the validator has made it a str, and pydantic's own check would not name what is wrong with it
    prompt: Annotated[Any, BeforeValidator(_prompt)]
    model: Annotated[str, Field(max_length=200)] | None = None
    seconds: Annotated[str, BeforeValidator(_seconds)] | None = None
    num_frames: int | None = None
    size: Annotated[str, BeforeValidator(_size)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] | None = None
    priority: Literal["interactive", "normal", "bulk"] | None = None
    not_before: Moment | None = None
    deadline: Moment | None = None

    fps: Any = None
    n: Any = None
    guidance_scale: Any = None
    num_inference_steps: Any = None
    flow_shift: Any = None
    audio_flow_shift: Any = None
    quality: Any = None


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request that will be rendered exactly so."""

    prompt: str
    num_tokens: int
    seed: int
    clip: Clip
    canvas: Canvas
    seconds: str
    size_requested: str | None
    metadata: dict[str, str]
    priority: int
    not_before: datetime | None
    deadline: datetime | None

    def job_values(self, model: ServedModel, *, project: str, max_attempts: int) -> dict[str, Any]:
        """The columns of a new job."""
        times = {"run_at": self.not_before, "deadline_at": self.deadline}
        return {
            "id": new_video_id(),
            "project": project,
            "model": model.name,
            "prompt": self.prompt,
            "seed": self.seed,
            "width": self.canvas.width,
            "height": self.canvas.height,
            "num_frames": self.clip.num_frames,
            "priority": self.priority,
            "max_attempts": max_attempts,
            "request": {
                "seconds": self.seconds,
                "size_requested": self.size_requested,
                "metadata": self.metadata,
                **({} if self.not_before is None else {"not_before": self.not_before.timestamp()}),
            },
            **{name: time for name, time in times.items() if time is not None},
        }


class InvalidFields(InvalidRequest):
    """Several fields are wrong; `details` has one entry for each."""

    def __init__(self, first: InvalidRequest, details: list[dict[str, Any]]) -> None:
        super().__init__(str(first), param=first.param, code=first.code)
        self.details = details


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"


def resolve(body: Mapping[str, Any], model: ServedModel, *, cancel_after: str | None = None) -> ResolvedRequest:
    """Check a parsed body against the served model and work out what would be rendered.

    Args:
        cancel_after: value of the header `Cancel-After`, which says `deadline` as a duration from now.

    Raises:
        InvalidRequest: names the field, the value and the limit.
        ModelNotFound: the body asks for another model.
    """
    request = parse(body)
    if request.model is not None and request.model != model.name:
        raise ModelNotFound(f"model {shown(request.model)} is not served here; served: {model.name}", param="model")
    _check_fixed(request, model)
    token_ids = model.tokenizer.encode(request.prompt, max_tokens=model.max_prompt_tokens)
    seconds, clip = _duration(request)
    not_before, deadline = _times(request, cancel_after, now=datetime.now(UTC))
    return ResolvedRequest(
        prompt=request.prompt,
        num_tokens=len(token_ids),
        seed=secrets.randbelow(2**53) if request.seed is None else request.seed,
        clip=clip,
        canvas=DEFAULT_CANVAS if request.size is None else canvas_for_size(request.size) or DEFAULT_CANVAS,
        seconds=seconds,
        size_requested=request.size,
        metadata=request.metadata or {},
        priority=PRIORITIES[request.priority or "normal"],
        not_before=not_before,
        deadline=deadline,
    )


def parse(body: Mapping[str, Any]) -> VideoRequest:
    """The body as a `VideoRequest`.

    Raises:
        InvalidRequest: the first thing that is wrong; an `InvalidFields` when there are several.
    """
    for name in _UNSUPPORTED:
        if body.get(name) not in (None, "", [], {}):
            raise InvalidRequest(
                f"{name} is not supported: this checkpoint renders from text alone",
                param=name,
                code="unsupported_input",
            )
    garbled = next((name for name in body if not is_storable(name)), None)
    if garbled is not None:
        raise InvalidRequest(
            f"unknown parameter: {printable(garbled)}", param=printable(garbled), code="unknown_parameter"
        )
    present = {name: value for name, value in body.items() if value is not None and name not in _UNSUPPORTED}
    try:
        return VideoRequest.model_validate(present)
    except ValidationError as error:
        raise refusal(error) from error


def refusal(error: ValidationError) -> InvalidRequest:
    """What a client is told of `error`: the first thing that is wrong; an `InvalidFields` when there are several."""
    found = [_to_error(detail) for detail in error.errors(include_input=True, include_url=False)]
    if len(found) == 1:
        return found[0]
    return InvalidFields(found[0], [{"loc": [f.param], "msg": str(f), "code": f.code} for f in found])


def _to_error(detail: ErrorDetails) -> InvalidRequest:
    param = printable(".".join(str(part) for part in detail["loc"]))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return InvalidRequest(f"unknown parameter: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    code = kind if kind in ("unsupported_size",) else "invalid_value"
    message = detail["msg"] if kind in ("invalid_value", "unsupported_size") else _sentence(detail)
    return InvalidRequest(f"{param} {message}", param=param, code=code)


def _sentence(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Input ").removeprefix("should be ")
    return f"must be {message}, got {shown(detail['input'])}"


def printable(text: str) -> str:
    """`text` with everything that cannot be encoded or printed escaped; at most 200 characters."""
    return ascii(text)[1:-1][:200] if not text.isascii() or not text.isprintable() else text[:200]


def _check_fixed(request: VideoRequest, model: ServedModel) -> None:
    """What the checkpoint decides may be restated, not changed."""
    contract = model.contract
    fixed: tuple[tuple[str, object, float], ...] = (
        ("fps", request.fps, FPS),
        ("n", request.n, 1),
        ("guidance_scale", request.guidance_scale, contract.guidance_scale),
        ("num_inference_steps", request.num_inference_steps, contract.num_forwards + 1),
        ("flow_shift", request.flow_shift, contract.video_scheduler_shift),
        ("audio_flow_shift", request.audio_flow_shift, contract.audio_scheduler_shift),
    )
    for name, value, wanted in fixed:
        if value is not None and _number(value) != wanted:
            raise InvalidRequest(f"{name} is fixed at {wanted:g} by the model, got {shown(value)}", param=name)
    if request.quality not in (None, "standard"):
        raise InvalidRequest(f"quality is fixed at 'standard', got {shown(request.quality)}", param="quality")


def _number(value: object) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value, re.ASCII):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _duration(request: VideoRequest) -> tuple[str, Clip]:
    if request.num_frames is None:
        seconds = request.seconds or DEFAULT_SECONDS
        return seconds, Clip.for_seconds(float(seconds))
    try:
        clip = Clip.for_frames(request.num_frames)
    except ValueError as error:
        raise InvalidRequest(str(error), param="num_frames") from error
    if request.seconds is None:
        return f"{request.num_frames / FPS:.4f}".rstrip("0").rstrip("."), clip
    if frames_for(round(float(request.seconds) * FPS)) != clip.num_frames:
        raise InvalidRequest(
            f"num_frames {request.num_frames} and seconds {request.seconds} ask for different clips", param="num_frames"
        )
    return request.seconds, clip


def _times(
    request: VideoRequest, cancel_after: str | None, *, now: datetime
) -> tuple[datetime | None, datetime | None]:
    """`not_before`, None unless it lies ahead, and the deadline."""
    name, deadline = "deadline", request.deadline
    if cancel_after is not None:
        if deadline is not None:
            raise InvalidRequest("deadline and the header Cancel-After exclude each other", param="deadline")
        name, deadline = "Cancel-After", now + _cancel_after(cancel_after)
    for what, time in (("not_before", request.not_before), (name, deadline)):
        if time is None:
            continue
        if time < now - MAX_BEHIND:
            raise InvalidRequest(
                f"{what} must not lie more than {MAX_BEHIND.seconds} seconds in the past, got {time.isoformat()}",
                param=what,
            )
        if time > now + MAX_AHEAD:
            raise InvalidRequest(
                f"{what} must not lie more than {MAX_AHEAD.days} days ahead, got {time.isoformat()}", param=what
            )
    if deadline is not None and request.not_before is not None and deadline <= request.not_before:
        raise InvalidRequest(
            f"{name} must lie after not_before, got {deadline.isoformat()}, "
            f"which is not after {request.not_before.isoformat()}",
            param=name,
        )
    later = request.not_before is not None and request.not_before > now
    return request.not_before if later else None, deadline


def _cancel_after(text: str) -> timedelta:
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(f"Cancel-After {error}, got {shown(text)}", param="Cancel-After") from error
    if not MIN_CANCEL_AFTER <= duration <= MAX_AHEAD:
        raise InvalidRequest(
            f"Cancel-After must be between {MIN_CANCEL_AFTER.seconds}s and {MAX_AHEAD.days}d, got {shown(text)}",
            param="Cancel-After",
        )
    return duration
