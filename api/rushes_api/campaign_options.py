"""What a client says of a new campaign in a query or a form, whose values are all text, as JSON would have it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from rushes_core.campaigns.options import CampaignOptions
from rushes_core.fields import printable

from rushes_api.body import parse_json
from rushes_api.errors import ApiError
from rushes_api.form import InvalidForm, Value, assemble

OPTIONS = tuple(dict.fromkeys(field.alias or name for name, field in CampaignOptions.model_fields.items()))
"""Names of the members of `CampaignOptions`."""
MAPS = ("metadata", "defaults", "window", "budget", "proof", "output_expires_after")
"""Those of them that are objects: in a query or a form `name[key]`, or JSON as text."""
OPTION_PARAMETERS = (*OPTIONS, *(f"{name}[]" for name in MAPS))
"""As parameters of a query, or fields of a form."""
MAX_DEPTH = 4

_INTEGERS = frozenset(
    {
        ("max_attempts",),
        ("max_parallel",),
        ("max_failures",),
        ("priority",),
        ("proof", "count"),
        ("output_expires_after", "seconds"),
        ("defaults", "seed"),
        ("defaults", "num_frames"),
        ("defaults", "target", "short_edge"),
        ("defaults", "retention", "seconds"),
    }
)
_NUMBERS = frozenset({("budget", "gpu_seconds")})
_BOOLEANS = frozenset({("dry_run",), ("start_paused",), ("tell_items",), ("defaults", "output", "thumbnail")})
_LISTS = frozenset({("window", "days"), ("webhook_events",)})
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NUMBER_TEXT = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,9})?", re.ASCII)
_BOOLEAN_WORDS = {"1": True, "true": True, "0": False, "false": False}


def options_of(items: Iterable[tuple[str, Value]]) -> dict[str, Any]:
    """The members that the fields of a query or a form mean.

    Raises:
        ApiError: one comes twice, or is nested too deep, or JSON that cannot be read.
    """
    try:
        members = assemble(list(items), parse_json=parse_json, max_depth=MAX_DEPTH)
    except InvalidForm as error:
        raise ApiError(str(error), param=error.param, code=error.code) from error
    for name in MAPS:
        value = members.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            members[name] = parse_json(value, what=name)
    return {name: _typed((name,), value) for name, value in members.items()}


def _typed(path: tuple[str, ...], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _typed((*path, name), one) for name, one in cast("dict[str, Any]", value).items()}
    if not isinstance(value, str):
        return value
    if path in _INTEGERS and _INTEGER_TEXT.fullmatch(value):
        return int(value)
    if path in _NUMBERS and _NUMBER_TEXT.fullmatch(value):
        return float(value)
    if path in _BOOLEANS:
        return _BOOLEAN_WORDS.get(value, value)
    if path in _LISTS and not value.startswith("["):
        return [word.strip() for word in value.split(",")]
    return value


def joined(body: Mapping[str, Any], query: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a body and of its query together.

    Raises:
        ApiError: both have one.
    """
    for name in query:
        if body.get(name) is not None:
            shown = printable(name)
            raise ApiError(f"{shown} is given in the query and in the body", param=shown, code="duplicate_parameter")
    return {**body, **query}
