"""Lists: one page of rows in the order of a key, after the row that a client names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel
from rushes_core.fields import shown
from rushes_core.listed import Listed
from sqlalchemy import Select
from sqlalchemy.sql.elements import SQLColumnExpression

from rushes_api.errors import ApiError

PAGE_PARAMETERS = ("after", "limit", "order")
DEFAULT_LIMIT = 20
MAX_LIMIT = 100


Item = TypeVar("Item", bound=Listed)
Row = TypeVar("Row")
Key = TypeVar("Key", str, int)
Statement = TypeVar("Statement", bound=Select[*tuple[Any, ...]])


class Page(BaseModel, Generic[Item]):
    """OpenAI's envelope of a list."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, rows: Sequence[Row], item_of: Callable[[Row], Item], *, limit: int) -> Self:
        """The page of up to `limit` + 1 rows: the extra one tells that there are more."""
        data = [item_of(row) for row in rows[:limit]]
        return cls(
            object="list",
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(rows) > limit,
        )


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Key]):
    """Which page a client asks for. `after` is a position, not a row: there need be no row at it."""

    after: Key | None
    limit: int
    descending: bool

    def rows(self, statement: Statement, key: SQLColumnExpression[Key]) -> Statement:
        """`statement` for this page's rows and one more."""
        if self.after is not None:
            statement = statement.where(key < self.after if self.descending else key > self.after)
        return statement.order_by(None).order_by(key.desc() if self.descending else key.asc()).limit(self.limit + 1)


def wanted_page(
    parameters: Mapping[str, str], *, key_of: Callable[[str], Key | None], what: str, descending: bool = True
) -> Wanted[Key]:
    """What `PAGE_PARAMETERS` say.

    Args:
        key_of: the key that an id stands for; None for what is no such id.
        what: the kind of thing that is listed, for errors.
        descending: the order without `order`.

    Raises:
        ApiError: one of them is malformed.
    """
    after = None
    if "after" in parameters:
        after = key_of(parameters["after"])
        if after is None:
            raise ApiError(f"after must be the id of {what}, got {shown(parameters['after'])}", param="after")
    order = one_of("order", parameters.get("order", "desc" if descending else "asc"), ("asc", "desc"))
    limit = whole_number("limit", parameters, default=DEFAULT_LIMIT, high=MAX_LIMIT)
    return Wanted(after, limit, order == "desc")


def one_of(name: str, value: str, words: Sequence[str]) -> str:
    """`value`, if it is one of `words`.

    Raises:
        ApiError
    """
    if value not in words:
        raise ApiError(f"{name} must be one of {', '.join(words)}, got {shown(value)}", param=name)
    return value


def is_set(name: str, parameters: Mapping[str, str]) -> bool:
    """Whether a flag of the query is; one that is not sent is not.

    Raises:
        ApiError
    """
    return one_of(name, parameters.get(name, "0"), ("0", "1", "true", "false")) in ("1", "true")


def whole_number(name: str, parameters: Mapping[str, str], *, default: int, high: int) -> int:
    """A number of the query, from 1 to `high`.

    Raises:
        ApiError
    """
    text = parameters.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= high):
        raise ApiError(f"{name} must be between 1 and {high}, got {shown(text)}", param=name)
    return int(text)
