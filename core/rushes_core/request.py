"""A client's request for a clip: strict fields, and what they resolve to before any GPU time is spent."""

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, cast

from pydantic import Field, WithJsonSchema

from rushes_core.canvas import CANVASES, DEFAULT_CANVAS, Canvas, canvas_for_size
from rushes_core.clip import ADMISSIBLE_FRAMES, FPS, MIN_SECONDS, Clip, frames_for
from rushes_core.errors import InvalidRequest
from rushes_core.fields import (
    AUTO_ASPECT_RATIO,
    PRIORITIES,
    Fields,
    Metadata,
    Moment,
    Output,
    Priority,
    Prompt,
    Retention,
    Seconds,
    Seed,
    Size,
    Target,
    shown,
)
from rushes_core.models import Job
from rushes_core.moment import MAX_AHEAD, MAX_BEHIND, MIN_CANCEL_AFTER, parse_duration
from rushes_core.parsing import parse_as, unsupported
from rushes_core.prompt import check_prompt
from rushes_core.served_model import ServedModel
from rushes_core.webhooks.events import DEFAULT_TYPES, Url, VideoEventTypes

DEFAULT_SECONDS = "4"
TASK = "t2va"
"""What UniServe calls text to video and audio."""
TASKS = (TASK, "t2av")
"""Its names: UniServe's, and the one in the checkpoint."""

FROM_TEXT = "this checkpoint renders from text alone"
_NO_USERS = "end users are not told apart; metadata can say who it is for"
_UNSUPPORTED = {
    "input_reference": FROM_TEXT,
    "negative_prompt": f"{FROM_TEXT}, without guidance away from another text",
    "image": FROM_TEXT,
    "video": FROM_TEXT,
    "audio": FROM_TEXT,
    "keyframes": FROM_TEXT,
    "references": FROM_TEXT,
    "conditions": FROM_TEXT,
    "user": _NO_USERS,
    "safety_identifier": _NO_USERS,
    "extra_body": "its members belong beside prompt, where the openai SDK puts them",
}
"""Fields that other services have, and why they are refused here."""
_OTHER_TASKS = {"fl2va": "keyframes", "ref2va": "references"}


_NUM_FRAMES_SCHEMA = {"type": "integer", "minimum": MIN_SECONDS * FPS, "maximum": ADMISSIBLE_FRAMES[-1]}
_RESTATED_SCHEMA = {
    "type": ["number", "string", "null"],
    "description": "Fixed by the model: only what `fixed` in `/v1/capabilities` says",
}
Restated = Annotated[Any, WithJsonSchema(_RESTATED_SCHEMA)]


class VideoRequest(Fields):
    """The body of `POST /v1/videos`. Unknown fields are refused by name; null is the same as absent."""

    prompt: Prompt
    model: Annotated[str, Field(max_length=200)] | None = None
    seconds: Seconds | None = None
    num_frames: Annotated[int, WithJsonSchema(_NUM_FRAMES_SCHEMA)] | None = None
    size: Size | None = None
    task: Annotated[Any, WithJsonSchema({"enum": [*TASKS, None]})] = None
    target: Target | None = None
    conditions: Annotated[Any, WithJsonSchema({"type": ["array", "null"], "maxItems": 0, "items": {}})] = None
    seed: Seed | None = None
    metadata: Metadata | None = None
    priority: Priority | None = None
    not_before: Moment | None = None
    deadline: Moment | None = None
    retention: Retention | None = None
    output: Output | None = None
    webhook_url: Url | None = None
    callback_url: Url | None = None
    webhook_events: VideoEventTypes | None = None

    response_format: Annotated[Any, WithJsonSchema({"enum": ["url", None]})] = None
    fps: Restated = None
    n: Restated = None
    guidance_scale: Restated = None
    num_inference_steps: Restated = None
    flow_shift: Restated = None
    audio_flow_shift: Restated = None
    quality: Annotated[Any, WithJsonSchema({"enum": ["standard", None]})] = None


class RemixRequest(Fields):
    """The body of `POST /v1/videos/{id}/remix`: what else there is to say was said of the job that it starts from."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Webhook:
    """Who is to be told of a job, and of what. Where webhooks may go is for the deployment to say."""

    url: str
    param: str
    """The field that named it."""
    events: list[str]


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request that will be rendered exactly so."""

    prompt: str
    num_tokens: int
    seed: int
    is_seed_drawn: bool
    clip: Clip
    canvas: Canvas
    seconds: str
    size_requested: str | None
    metadata: dict[str, str]
    priority: int
    not_before: datetime | None
    deadline: datetime | None
    retention_seconds: int | None
    """From acceptance; None: as long as the deployment keeps clips."""
    output: dict[str, Any]
    """Members of the field `output`, those that were given."""
    webhook: Webhook | None
    model_requested: str | None = None
    """What the client called the model, where that is not its name here."""

    @property
    def asked(self) -> dict[str, Any]:
        """The column `request` of a new job."""
        return {
            "seconds": self.seconds,
            "size_requested": self.size_requested,
            "metadata": self.metadata,
            **({} if self.model_requested is None else {"model_requested": self.model_requested}),
            **({} if self.not_before is None else {"not_before": self.not_before.timestamp()}),
            **({} if self.retention_seconds is None else {"retention_seconds": self.retention_seconds}),
            **({"output": self.output} if self.output else {}),
        }

    def job_values(self, model: ServedModel) -> dict[str, Any]:
        """What the request decides of a new job, as `arrivals` takes it."""
        return {
            "model": model.name,
            "prompt": self.prompt,
            "seed": self.seed,
            "width": self.canvas.width,
            "height": self.canvas.height,
            "num_frames": self.clip.num_frames,
            "priority": self.priority,
            "request": self.asked,
            "run_at": self.not_before,
            "deadline_at": self.deadline,
            "retention_seconds": self.retention_seconds,
        }


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"


def resolve(
    body: Mapping[str, Any],
    model: ServedModel,
    *,
    cancel_after: str | None = None,
    buckets: Collection[str] = (),
    measure: Callable[[str, ServedModel], int] | None = None,
) -> ResolvedRequest:
    """Check a parsed body against the served model and work out what would be rendered.

    Args:
        cancel_after: value of the header `Cancel-After`, which says `deadline` as a duration from now.
        buckets: names of the buckets that `output` may name.
        measure: tells `num_tokens` in place of `count_tokens`, and refuses what that refuses.

    Raises:
        InvalidRequest: names the field, the value and the limit.
        ModelNotFound: the body asks for another model.
    """
    request = parse(body)
    if request.model is not None and request.model != model.name:
        raise ModelNotFound(f"model {shown(request.model)} is not served here; served: {model.name}", param="model")
    _check_fixed(request, model)
    _check_task(request.task)
    num_tokens = (measure or count_tokens)(request.prompt, model)
    seconds, clip = _duration(request)
    not_before, deadline = _times(request, cancel_after, now=datetime.now(UTC))
    return ResolvedRequest(
        prompt=request.prompt,
        num_tokens=num_tokens,
        seed=secrets.randbelow(2**53) if request.seed is None else request.seed,
        is_seed_drawn=request.seed is None,
        clip=clip,
        canvas=_canvas(request),
        seconds=seconds,
        size_requested=request.size,
        metadata=request.metadata or {},
        priority=PRIORITIES[request.priority or "normal"],
        not_before=not_before,
        deadline=deadline,
        retention_seconds=None if request.retention is None else request.retention.seconds,
        output=_output(request.output, buckets),
        webhook=_webhook(request),
    )


def count_tokens(prompt: str, model: ServedModel) -> int:
    """Tokens of a prompt that the model takes.

    Raises:
        InvalidRequest: no model should see it, or it is too long for this one.
    """
    return len(model.tokenizer.encode(prompt, max_tokens=model.max_prompt_tokens))


def bound_tokens(prompt: str, model: ServedModel) -> int:
    """At least as many tokens as a prompt has that the model takes, without taking it apart where that can be told.

    Raises:
        InvalidRequest: as `count_tokens`.
    """
    bound = model.tokenizer.bound(prompt)
    if bound is None or bound > model.max_prompt_tokens:
        return count_tokens(prompt, model)
    check_prompt(prompt)
    return bound


def remix(source: Job, prompt: str, *, num_tokens: int, buckets: Collection[str] = ()) -> ResolvedRequest:
    """What `source` asked for with another prompt; its times are not taken over.

    Args:
        buckets: names of the buckets that `output` may name.

    Raises:
        InvalidRequest: what it has is not served any more.
    """
    canvas = canvas_for_size(f"{source.width}x{source.height}")
    if canvas is None or source.num_frames not in ADMISSIBLE_FRAMES:
        raise InvalidRequest(f"{source.id} has {source.width}x{source.height}, {source.num_frames} frames: not served")
    asked = source.request
    metadata: Any = asked.get("metadata")
    output: dict[str, Any] = asked.get("output") or {}
    _check_bucket(output.get("bucket"), buckets)
    size, retention, hook = asked.get("size_requested"), asked.get("retention_seconds"), asked.get("webhook")
    return ResolvedRequest(
        prompt=prompt,
        num_tokens=num_tokens,
        seed=source.seed,
        is_seed_drawn=False,
        clip=Clip(source.num_frames),
        canvas=canvas,
        seconds=str(asked.get("seconds") or DEFAULT_SECONDS),
        size_requested=None if size is None else str(size),
        metadata=cast("dict[str, str]", metadata) if isinstance(metadata, dict) else {},
        priority=source.priority,
        not_before=None,
        deadline=None,
        retention_seconds=None if retention is None else int(retention),
        output=output,
        webhook=None if hook is None else Webhook(hook["url"], "webhook_url", hook["events"]),
    )


def parse(body: Mapping[str, Any]) -> VideoRequest:
    """The body of a new job.

    Raises:
        InvalidRequest: it asks for what is not served here, or as `parse_as`.
    """
    for name, reason in _UNSUPPORTED.items():
        if body.get(name) not in (None, "", [], {}):
            raise unsupported(name, reason)
    return parse_as(VideoRequest, {name: value for name, value in body.items() if name not in _UNSUPPORTED})


def _webhook(request: VideoRequest) -> Webhook | None:
    url, alias = request.webhook_url, request.callback_url
    if url is not None and alias is not None and url != alias:
        raise InvalidRequest("webhook_url and callback_url are the same field: give one of them", param="callback_url")
    given = alias if url is None else url
    if given is None:
        if request.webhook_events is not None:
            raise InvalidRequest(
                "webhook_events says what webhook_url is told, which is missing", param="webhook_events"
            )
        return None
    events = request.webhook_events or list(DEFAULT_TYPES)
    return Webhook(given, "callback_url" if url is None else "webhook_url", events)


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
    if request.response_format not in (None, "url"):
        got = shown(request.response_format)
        raise unsupported("response_format", f"a clip is fetched from its content_url, 'url', not {got}")


def _check_task(task: object) -> None:
    if task is None or task in TASKS:
        return
    if isinstance(task, str) and task in _OTHER_TASKS:
        raise unsupported("task", f"{task} renders from {_OTHER_TASKS[task]}; {FROM_TEXT}: {TASK}")
    raise InvalidRequest(f"task must be {' or '.join(TASKS)}, got {shown(task)}", param="task")


def _number(value: object) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value, re.ASCII):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _duration(request: VideoRequest) -> tuple[str, Clip]:
    target = request.target.duration_seconds if request.target else None
    seconds = request.seconds or target
    if request.seconds and target and float(request.seconds) != float(target):
        raise _disagreement(
            f"seconds {request.seconds} and target.duration_seconds {target}", "target.duration_seconds"
        )
    if request.num_frames is None:
        seconds = seconds or DEFAULT_SECONDS
        return seconds, Clip.for_seconds(float(seconds))
    try:
        clip = Clip.for_frames(request.num_frames)
    except ValueError as error:
        raise InvalidRequest(str(error), param="num_frames") from error
    if seconds is None:
        return f"{request.num_frames / FPS:.4f}".rstrip("0").rstrip("."), clip
    if frames_for(round(float(seconds) * FPS)) != clip.num_frames:
        name = "seconds" if request.seconds else "target.duration_seconds"
        raise _disagreement(f"num_frames {request.num_frames} and {name} {seconds}", "num_frames")
    return seconds, clip


def _canvas(request: VideoRequest) -> Canvas:
    target = request.target or Target()
    aspect_ratio = DEFAULT_CANVAS.aspect_ratio if target.aspect_ratio == AUTO_ASPECT_RATIO else target.aspect_ratio
    if request.size is None:
        wanted = (target.short_edge or DEFAULT_CANVAS.short_edge, aspect_ratio or DEFAULT_CANVAS.aspect_ratio)
        return next(canvas for canvas in CANVASES if (canvas.short_edge, canvas.aspect_ratio) == wanted)
    canvas = canvas_for_size(request.size) or DEFAULT_CANVAS
    for name, wanted, given in (
        ("short_edge", canvas.short_edge, target.short_edge),
        ("aspect_ratio", canvas.aspect_ratio, aspect_ratio),
    ):
        if given not in (None, wanted):
            raise _disagreement(f"size {request.size} and target.{name} {given}", f"target.{name}")
    return canvas


def _disagreement(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{what} ask for different clips", param=param)


def _output(output: Output | None, buckets: Collection[str]) -> dict[str, Any]:
    if output is None:
        return {}
    _check_bucket(output.bucket, buckets)
    return output.model_dump(exclude_none=True)


def _check_bucket(bucket: str | None, buckets: Collection[str]) -> None:
    if bucket is not None and bucket not in buckets:
        raise InvalidRequest(
            f"output.bucket {shown(bucket)} is not one that this deployment lets requests name", param="output.bucket"
        )


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
