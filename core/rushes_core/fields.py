"""The values of a request's fields: what each may be, and its JSON schema."""

import re
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from rushes_core.canvas import CANVASES, SIZE_ALIASES, canvas_for_size
from rushes_core.clip import MAX_SECONDS, MIN_SECONDS
from rushes_core.ids import is_video_id
from rushes_core.moment import parse_moment
from rushes_core.prompt import MAX_PROMPT_CHARACTERS

MAX_SEED = 2**63 - 1
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MIN_RETENTION_SECONDS = 3_600
MAX_RETENTION_SECONDS = 30 * 86_400
MAX_KEY_PREFIX = 200

PRIORITIES = {"interactive": 0, "normal": 1, "bulk": 2}
MIN_URGENCY = {"interactive": 67, "normal": 33, "bulk": 0}
"""The least number on a scale to 100 that means each class."""

SHORT_EDGES = sorted({canvas.short_edge for canvas in CANVASES}, reverse=True)
ASPECT_RATIOS = list(dict.fromkeys(canvas.aspect_ratio for canvas in CANVASES))
AUTO_ASPECT_RATIO = "auto"
"""As UniServe has it, 16:9 for a clip that is made from text."""

_SECONDS_TEXT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?", re.ASCII)
_KEY_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)


def is_storable(text: str) -> bool:
    """Whether Postgres can hold `text`: no NUL, no lone surrogate."""
    return "\x00" not in text and (text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text))


def shown(value: object) -> str:
    """`value` for an error message: short, printable, encodable."""
    text = "null" if value is None else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    """`text` with everything that cannot be encoded or printed escaped; at most 200 characters."""
    return ascii(text)[1:-1][:200] if not text.isascii() or not text.isprintable() else text[:200]


def counted(number: int, noun: str) -> str:
    """`1 job`, `2 jobs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds_text(value: object) -> str:
    """A duration as text: a plain decimal string, or a JSON number written as one."""
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


def unsupported_size(served: Iterable[object], value: object) -> PydanticCustomError:
    """The refusal of a size, or of what one is made of, that is none of those that are served."""
    return PydanticCustomError(
        "unsupported_size",
        "must be one of {served}, got {value}",
        {"served": ", ".join(map(str, served)), "value": shown(value)},
    )


def _size(value: object) -> str:
    if isinstance(value, str) and canvas_for_size(value) is not None:
        return value
    raise unsupported_size((*(c.size for c in CANVASES), *SIZE_ALIASES), value)


def metadata_of(value: object) -> dict[str, str]:
    """A map of strings within OpenAI's limits."""
    if not isinstance(value, dict):
        raise PydanticCustomError(
            "invalid_value", "must be a map of strings to strings, got {value}", {"value": shown(value)}
        )
    pairs = cast("dict[object, object]", value)
    if len(pairs) > MAX_METADATA_PAIRS:
        raise PydanticCustomError(
            "invalid_value",
            "must have at most {limit} pairs, got {count}",
            {"limit": MAX_METADATA_PAIRS, "count": len(pairs)},
        )
    for key, item in pairs.items():
        where = f" for {shown(key)}"
        for text, what, limit, place in (
            (key, "keys", MAX_METADATA_KEY, ""),
            (item, "values", MAX_METADATA_VALUE, where),
        ):
            told = {"what": what, "limit": limit, "value": shown(text), "place": place}
            if not isinstance(text, str) or len(text) > limit:
                raise PydanticCustomError(
                    "invalid_value", "must have {what} of at most {limit} characters of text, got {value}{place}", told
                )
            if not is_storable(text):
                raise PydanticCustomError(
                    "invalid_value",
                    "must have {what} of valid Unicode without NUL characters, got {value}{place}",
                    told,
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


def _priority(value: object) -> str:
    if isinstance(value, str) and value in PRIORITIES:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100:
        return next(word for word, least in MIN_URGENCY.items() if value >= least)
    raise PydanticCustomError(
        "invalid_value",
        "must be one of {words} or a whole number from 0 to 100, got {value}",
        {"words": ", ".join(PRIORITIES), "value": shown(value)},
    )


def _short_edge(value: object) -> object:
    if isinstance(value, bool) or value not in SHORT_EDGES:
        raise unsupported_size(SHORT_EDGES, value)
    return value


def _aspect_ratio(value: object) -> object:
    if value not in (AUTO_ASPECT_RATIO, *ASPECT_RATIOS):
        raise unsupported_size((AUTO_ASPECT_RATIO, *ASPECT_RATIOS), value)
    return value


def _key_prefix(value: object) -> str:
    if isinstance(value, str) and len(value) <= MAX_KEY_PREFIX and _KEY_PREFIX.fullmatch(value):
        if not any(map(is_video_id, value.split("/"))):
            return value
        # everything below the id of a video goes with that video
        raise PydanticCustomError(
            "invalid_value", "must not have the id of a video among its names, got {value}", {"value": shown(value)}
        )
    raise PydanticCustomError(
        "invalid_value",
        "must be a relative path of at most {limit} characters whose names consist of letters, digits, '_', '-' "
        "and, but for their start, '.', got {value}",
        {"limit": MAX_KEY_PREFIX, "value": shown(value)},
    )


_MOMENT_SCHEMA = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0}]}
_SECONDS_SCHEMA = {
    "anyOf": [
        {"type": "number", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
        {"type": "string", "pattern": r"^[0-9]{1,2}(\.[0-9]{1,9})?$"},
    ]
}
_METADATA_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_METADATA_PAIRS,
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
_PRIORITY_SCHEMA = {"anyOf": [{"enum": list(PRIORITIES)}, {"type": "integer", "minimum": 0, "maximum": 100}]}

# Any: a validator has made it a str, and pydantic's own check would not name what is wrong with it
Prompt = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_CHARACTERS}),
]
Seconds = Annotated[str, BeforeValidator(seconds_text), WithJsonSchema(_SECONDS_SCHEMA)]
"""A duration as it was asked for, as text."""
Size = Annotated[
    str, BeforeValidator(_size), WithJsonSchema({"enum": [*(canvas.size for canvas in CANVASES), *SIZE_ALIASES]})
]
Metadata = Annotated[dict[str, str], BeforeValidator(metadata_of), WithJsonSchema(_METADATA_SCHEMA)]
Moment = Annotated[datetime, BeforeValidator(_moment), WithJsonSchema(_MOMENT_SCHEMA)]
"""A time with its zone, or Unix seconds."""
Priority = Annotated[str, BeforeValidator(_priority), WithJsonSchema(_PRIORITY_SCHEMA)]
"""A class by its word; as it is sent also a number from 0 to 100."""
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
KeyPrefix = Annotated[
    str,
    BeforeValidator(_key_prefix),
    WithJsonSchema({"type": "string", "maxLength": MAX_KEY_PREFIX, "pattern": f"^{_KEY_PREFIX.pattern}$"}),
]


class Fields(BaseModel):
    """An object in a request. Members that it does not have are refused by name; null is the same as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Target(Fields):
    """The clip in the terms of UniServe's MiniMax-H3 requests."""

    short_edge: Annotated[int, BeforeValidator(_short_edge), WithJsonSchema({"enum": SHORT_EDGES})] | None = None
    aspect_ratio: (
        Annotated[str, BeforeValidator(_aspect_ratio), WithJsonSchema({"enum": [AUTO_ASPECT_RATIO, *ASPECT_RATIOS]})]
        | None
    ) = None
    duration_seconds: Seconds | None = None


class Retention(Fields):
    """How long the clip is kept."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Field(ge=MIN_RETENTION_SECONDS, le=MAX_RETENTION_SECONDS)]


class Output(Fields):
    """What is stored, and where."""

    thumbnail: bool | None = None
    key_prefix: KeyPrefix | None = None
    bucket: Annotated[str, Field(max_length=63)] | None = None


def some_of(known: Collection[str]) -> Callable[[object], list[str]]:
    """A check for a list of some of the `known` words, which puts them in their order and drops repetitions."""

    def check(value: object) -> list[str]:
        words = cast("list[object]", value) if isinstance(value, list) else []
        # a tuple: what is no word need not be hashable
        if words and all(word in tuple(known) for word in words):
            return [word for word in known if word in words]
        raise PydanticCustomError(
            "invalid_value",
            "must be a list of one or more of {known}, got {value}",
            {"known": ", ".join(known), "value": shown(cast("object", value))},
        )

    return check


def some_of_schema(known: Collection[str]) -> WithJsonSchema:
    """The JSON schema of what `some_of` takes."""
    return WithJsonSchema({"type": "array", "items": {"type": "string", "enum": list(known)}, "minItems": 1})
