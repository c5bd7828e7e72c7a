"""What a client may ask for with a campaign: strict fields, and the columns that they become."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from sqlalchemy import func

from rushes_core.campaigns.windows import DAYS, ON_CLOSE, Window
from rushes_core.errors import InvalidRequest
from rushes_core.fields import PRIORITIES, Fields, Metadata, Moment, Priority, shown
from rushes_core.ids import is_file_id
from rushes_core.keys import KeyName
from rushes_core.moment import MAX_AHEAD, MAX_BEHIND, parse_duration
from rushes_core.parsing import InvalidFields, parse_as
from rushes_core.request import ModelNotFound, VideoRequest, Webhook
from rushes_core.served_model import ServedModel
from rushes_core.webhooks.events import DEFAULT_BATCH_TYPES, EventTypes, Url

ENDPOINT = "/v1/videos"
"""The route that the requests of a batch are for."""
MIN_COMPLETION = timedelta(hours=1)
MAX_COMPLETION = timedelta(days=30)
MIN_CONTINUE = timedelta(seconds=10)
MAX_CONTINUE = timedelta(days=7)
MAX_PROOF = 1_000
MAX_GPU_SECONDS = 1e9
MAX_PARALLEL = 10_000
MAX_FAILURES = 1_000_000
MAX_ATTEMPTS = 10
MIN_OUTPUT_SECONDS = 3_600
MAX_OUTPUT_SECONDS = 30 * 86_400
MAX_CODES = 50
MISSING = "missing_required_parameter"
"""Code of the refusal of what lacks a member."""

FORMATS = ("jsonl", "csv")
STRICT = "strict"
DEFAULT_PRIORITY = "bulk"

_TOLD = "webhook_url beside it is told of the campaign, and of its videos where webhook_events says so"
_NOT_IN_DEFAULTS = {
    "prompt": "every line has its own",
    "webhook_url": _TOLD,
    "callback_url": _TOLD,
    "webhook_events": _TOLD,
    "priority": "priority beside it is that of all jobs",
    "not_before": "not_before beside it is that of all jobs",
    "model": "model beside it is that of all jobs",
}


def _duration(least: timedelta, most: timedelta) -> BeforeValidator:
    def check(value: object) -> timedelta:
        try:
            found = parse_duration(value) if isinstance(value, str) else None
        except ValueError:
            found = None
        if found is None:
            raise PydanticCustomError(
                "invalid_value",
                "must be a duration such as 90m, 1h30m, 2d or 45s, got {value}",
                {"value": shown(value)},
            )
        if not least <= found <= most:
            raise PydanticCustomError(
                "invalid_value",
                "must be between {least} and {most}, got {value}",
                {"least": duration_text(least), "most": duration_text(most), "value": shown(value)},
            )
        return found

    return BeforeValidator(check)


def duration_text(duration: timedelta | int) -> str:
    """A duration, or seconds, as clients write it, in the largest unit of which it is a whole number."""
    seconds = duration if isinstance(duration, int) else int(duration.total_seconds())
    # OpenAI's word for a day is 24h
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size * (2 if unit == "d" else 1) and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _file_id(value: object) -> str:
    if isinstance(value, str) and is_file_id(value):
        return value
    raise PydanticCustomError("invalid_value", "must be the id of a file, got {value}", {"value": shown(value)})


def _map(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise PydanticCustomError("invalid_value", "must be an object, got {value}", {"value": shown(value)})


_DURATION_SCHEMA = WithJsonSchema({"type": "string", "pattern": "^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$"})
_WINDOW_SCHEMA = {
    "type": "object",
    "properties": {
        "timezone": {"type": "string", "description": "Name in the IANA database, such as Europe/Berlin"},
        "days": {"type": "array", "items": {"enum": list(DAYS)}, "minItems": 1},
        "start": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        "end": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$"},
        "on_close": {"enum": list(ON_CLOSE)},
    },
    "required": ["timezone", "start", "end"],
    "additionalProperties": False,
}
_DEFAULTS_SCHEMA = {
    "type": "object",
    "description": "Members that every line has unless it says otherwise, as in `POST /v1/videos`",
}

WindowFields = Annotated[dict[str, Any], BeforeValidator(_map), WithJsonSchema(_WINDOW_SCHEMA)]
CompletionWindow = Annotated[timedelta, _duration(MIN_COMPLETION, MAX_COMPLETION), _DURATION_SCHEMA]


class Budget(Fields):
    """GPU time that the campaign may take, and what is done when it is used up."""

    gpu_seconds: Annotated[float, Field(gt=0, le=MAX_GPU_SECONDS)]
    on_limit: Literal["complete_running", "cancel"] | None = None


class Proof(Fields):
    """The first jobs are run, and the others wait until somebody has seen them."""

    count: Annotated[int, Field(ge=1, le=MAX_PROOF)]
    auto_continue_after: Annotated[timedelta, _duration(MIN_CONTINUE, MAX_CONTINUE), _DURATION_SCHEMA] | None = None
    """Goes on by itself so long after the last of them has ended; absent: never."""


class OutputExpiry(Fields):
    """When the output and error files are removed, counted from when they were made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_OUTPUT_SECONDS, le=MAX_OUTPUT_SECONDS)]


class CampaignOptions(Fields):
    """Everything that may be said of a campaign but for where its lines are."""

    name: KeyName | None = None
    metadata: Metadata | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    completion_window: CompletionWindow | None = None
    input_format: Literal["jsonl", "csv"] | None = None
    defaults: Annotated[dict[str, Any], BeforeValidator(_map), WithJsonSchema(_DEFAULTS_SCHEMA)] | None = None
    priority: Priority | None = None
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    max_parallel: Annotated[int, Field(ge=1, le=MAX_PARALLEL)] | None = None
    max_failures: Annotated[int, Field(ge=1, le=MAX_FAILURES)] | None = None
    on_failure: Literal["pause", "cancel"] | None = None
    budget: Budget | None = None
    window: WindowFields | None = None
    not_before: Moment | None = None
    proof: Proof | None = None
    start_paused: bool | None = None
    webhook_url: Url | None = None
    webhook_events: EventTypes | None = None
    tell_items: bool | None = None
    output_expires_after: OutputExpiry | None = None
    validation: Annotated[Literal["lines", "strict"] | None, Field(alias="validate")] = None
    dry_run: bool | None = None


class CampaignRequest(CampaignOptions):
    """The body of `POST /v1/batches`, and that of `POST /v1/campaigns` which names a file."""

    input_file_id: Annotated[str, BeforeValidator(_file_id), WithJsonSchema({"type": "string"})] | None = None
    endpoint: Annotated[str, Field(max_length=200), WithJsonSchema({"enum": [ENDPOINT]})] | None = None

    @classmethod
    def check_so_far(cls, members: Mapping[str, Any]) -> None:
        """Look at the first members of a request: what is still missing may come.

        Raises:
            InvalidRequest: they are wrong, whatever comes.
        """
        try:
            cls.parse(members, is_whole=False)
        except InvalidRequest as error:
            if error.code != MISSING:
                raise

    @classmethod
    def parse(cls, members: Mapping[str, Any], *, is_batch: bool = False, is_whole: bool = True) -> Self:
        """The request in `members`.

        Args:
            is_batch: it has to have what OpenAI's batches have.
            is_whole: no more members come.

        Raises:
            InvalidRequest: names the field, the value and the limit.
        """
        wanted = parse_as(cls, members)
        for name in ("input_file_id", "endpoint", "completion_window") if is_batch else ():
            if getattr(wanted, name) is None:
                raise InvalidRequest(f"{name} is required", param=name, code=MISSING)
        if wanted.endpoint not in (None, ENDPOINT):
            raise InvalidRequest(f"endpoint must be {ENDPOINT}, got {shown(wanted.endpoint)}", param="endpoint")
        if is_whole and wanted.webhook_events is not None and wanted.webhook_url is None:
            raise InvalidRequest(
                "webhook_events says what webhook_url is told, which is missing", param="webhook_events"
            )
        if is_whole and wanted.on_failure is not None and wanted.max_failures is None:
            raise InvalidRequest(
                "on_failure says what is done after max_failures, which is missing", param="on_failure"
            )
        if wanted.window is not None:
            Window.parse(wanted.window)
        if wanted.not_before is not None:
            check_not_before(wanted.not_before)
        _check_defaults(wanted.defaults or {})
        return wanted

    @property
    def webhook(self) -> Webhook | None:
        """Who is to be told of the campaign."""
        if self.webhook_url is None:
            return None
        return Webhook(self.webhook_url, "webhook_url", self.webhook_events or list(DEFAULT_BATCH_TYPES))

    def columns(self, model: ServedModel) -> dict[str, Any]:
        """The columns of `Campaign` that it decides, those of its file and its webhook excepted.

        Raises:
            ModelNotFound: it asks for another model.
        """
        if self.model is not None and self.model != model.name:
            raise ModelNotFound(f"model {shown(self.model)} is not served here; served: {model.name}", param="model")
        plain = ("name", "input_format", "max_attempts", "max_parallel", "max_failures", "on_failure", "defaults")
        values: dict[str, Any] = {name: getattr(self, name) for name in plain} | {
            "metadata_": self.metadata,
            "model": model.name,
            "priority": PRIORITIES[self.priority or DEFAULT_PRIORITY],
            "strict": self.validation == STRICT,
            "dry_run": bool(self.dry_run),
            "tell_items": bool(self.tell_items),
            "window": None if self.window is None else Window.parse(self.window).as_dict(),
            "not_before": self.not_before,
        }
        if self.budget is not None:
            values |= budget_columns(self.budget)
        if self.completion_window is not None:
            values["completion_seconds"] = int(self.completion_window.total_seconds())
            values["expires_at"] = func.now() + self.completion_window
        if self.proof is not None:
            after = self.proof.auto_continue_after
            values |= {
                "proof_count": self.proof.count,
                "proof_state": "running",
                "proof_continue_seconds": None if after is None else int(after.total_seconds()),
            }
        if self.output_expires_after is not None:
            values["output_seconds"] = self.output_expires_after.seconds
        if self.start_paused:
            values |= {"paused_at": func.now(), "pause_reason": "request", "hold_reason": "paused"}
        return {name: value for name, value in values.items() if value is not None}


def budget_columns(budget: Budget | None) -> dict[str, Any]:
    """The columns of a budget; None: there is none."""
    if budget is None:
        return {"budget_gpu_seconds": None}
    columns: dict[str, Any] = {"budget_gpu_seconds": budget.gpu_seconds}
    return columns if budget.on_limit is None else columns | {"on_budget": budget.on_limit}


def check_not_before(moment: datetime) -> None:
    """
    Raises:
        InvalidRequest: it lies too far away.
    """
    now = datetime.now(UTC)
    if moment < now - MAX_BEHIND:
        raise InvalidRequest(
            f"not_before must not lie more than {MAX_BEHIND.seconds} seconds in the past, got {moment.isoformat()}",
            param="not_before",
        )
    if moment > now + MAX_AHEAD:
        raise InvalidRequest(
            f"not_before must not lie more than {MAX_AHEAD.days} days ahead, got {moment.isoformat()}",
            param="not_before",
        )


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidRequest: names the member as `defaults.<name>`.
    """
    for name, reason in _NOT_IN_DEFAULTS.items():
        if defaults.get(name) is not None:
            raise InvalidRequest(
                f"defaults.{name} is not supported: {reason}", param=f"defaults.{name}", code="unsupported_input"
            )
    try:
        parse_as(VideoRequest, {"prompt": "-", **defaults})
    except InvalidRequest as error:
        raise _within_defaults(error) from error


def _within_defaults(error: InvalidRequest) -> InvalidRequest:
    inner = InvalidRequest(
        str(error).replace(error.param or "", f"defaults.{error.param}", 1) if error.param else f"defaults: {error}",
        param=f"defaults.{error.param}" if error.param else "defaults",
        code=error.code,
    )
    return InvalidFields(inner, error.details) if isinstance(error, InvalidFields) else inner


_MEMBERS = frozenset(field.alias or name for name, field in CampaignRequest.model_fields.items())


class CampaignChanges(Fields):
    """The body of `PATCH /v1/campaigns/{id}`: what is absent stays, what is null is taken away."""

    name: KeyName | None = None
    metadata: Metadata | None = None
    priority: Priority | None = None
    window: WindowFields | None = None
    budget: Budget | None = None
    not_before: Moment | None = None
    max_parallel: Annotated[int, Field(ge=1, le=MAX_PARALLEL)] | None = None
    max_failures: Annotated[int, Field(ge=1, le=MAX_FAILURES)] | None = None
    on_failure: Literal["pause", "cancel"] | None = None

    @classmethod
    def parse(cls, members: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """What is to be changed, and the columns of it.

        Raises:
            InvalidRequest
        """
        for name in members:
            if name in _MEMBERS and name not in cls.model_fields:
                raise InvalidRequest(
                    f"{name} cannot be changed once a campaign is made; what can: {', '.join(cls.model_fields)}",
                    param=name,
                    code="unsupported_input",
                )
        wanted = parse_as(cls, members)
        cleared = {name for name, value in members.items() if value is None and name in cls.model_fields}
        for name in ("priority", "on_failure"):
            if name in cleared:
                raise InvalidRequest(f"{name} cannot be null", param=name)
        if wanted.not_before is not None:
            check_not_before(wanted.not_before)
        changed: dict[str, Any] = {}
        for name in (*wanted.model_fields_set, *cleared):
            match name:
                case "metadata":
                    changed["metadata_"] = wanted.metadata or {}
                case "priority":
                    changed["priority"] = PRIORITIES[wanted.priority or DEFAULT_PRIORITY]
                    changed["overrides_priority"] = True
                case "budget":
                    changed |= budget_columns(wanted.budget)
                case "window":
                    changed["window"] = None if wanted.window is None else Window.parse(wanted.window).as_dict()
                case _:
                    changed[name] = getattr(wanted, name)
        return wanted, changed


class PauseRequest(Fields):
    """The body of `POST /v1/campaigns/{id}/pause`."""

    drain: bool | None = None
    """False: what runs is stopped, too, and starts again from nothing when the campaign is resumed."""


class RetryRequest(Fields):
    """The body of `POST /v1/campaigns/{id}/retry_failed`."""

    codes: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MAX_CODES)] | None = (
        None
    )
    """Only those that failed with one of these codes."""
    include_cancelled: bool | None = None
    """Cancelled and expired ones as well."""
    new_seeds: bool | None = None
    """Each with another seed than before."""
