"""JSON without its ambiguities: no duplicate keys, no NaN or Infinity, bounded numbers and nesting."""

import json
import math
from typing import Any, NoReturn, cast

MAX_NUMBER_CHARACTERS = 64
"""Longest number that is read, in characters: digits beyond it say nothing, and take long to read."""


class InvalidJson(ValueError):
    """A text is no such JSON. The message says what is wrong with "it"."""


class DuplicateKey(InvalidJson):
    """An object has the key `name` more than once."""

    def __init__(self, name: str) -> None:
        super().__init__(f"holds the key {ascii(name)[:80]} more than once")
        self.name = name


def parse_json(text: str | bytes, *, max_depth: int, max_members: int | None = None) -> Any:
    """The value in `text`.

    Args:
        max_depth: how many arrays and objects may lie in each other.
        max_members: how many members all its objects may have together.

    Raises:
        InvalidJson
    """
    num_members = 0

    def members_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_members
        num_members += len(pairs)
        if max_members is not None and num_members > max_members:
            raise InvalidJson(f"has more than the {max_members} members that are read")
        return _unique(pairs)

    try:
        value = json.loads(
            text,
            object_pairs_hook=members_of,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_number,
        )
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    except json.JSONDecodeError as error:
        raise InvalidJson(f"is not valid JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise InvalidJson(f"is not valid JSON: byte {error.object[error.start]:#04x} at {error.start}") from error
    _check_depth(value, max_depth)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DuplicateKey(name)
            seen.add(name)
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f"holds {name}, which is no JSON number")


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _number(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson(f"holds {text}, which is too large a number")
    return value


def _check_digits(text: str) -> None:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise InvalidJson(
            f"holds a number of {len(text)} characters, which is longer than the {MAX_NUMBER_CHARACTERS} that are read"
        )


def _check_depth(value: Any, max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, Any]", item).values()
            elif isinstance(item, list):
                inner += cast("list[Any]", item)
        if not inner:
            return
        level = inner
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> InvalidJson:
    return InvalidJson(f"is nested more than {max_depth} levels deep")
