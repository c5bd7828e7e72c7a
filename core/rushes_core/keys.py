"""Projects and API keys: what they may be, how secrets are made and kept, and the statements on them.

Nothing here executes: the asynchronous API and the command line run the same statements.
"""

import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from sqlalchemy import Date, Integer, Select, Update, and_, exists, func, literal_column, or_, select, union_all, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement, SQLColumnExpression

from rushes_core.fields import PRIORITIES, Moment, shown, some_of, some_of_schema
from rushes_core.holds import CONCURRENCY
from rushes_core.ids import new_key_id
from rushes_core.models import ApiKey, ApiKeyUsage, Job, Project
from rushes_core.parsing import refusal
from rushes_core.states import JobState

READ = "videos:read"
WRITE = "videos:write"
BATCHES = "batches"
WEBHOOKS = "webhooks"
ADMIN = "admin"
SCOPES = (READ, WRITE, BATCHES, WEBHOOKS, ADMIN)
"""What a key may do. `admin` is all of it, and the keys and projects of everybody."""
DEFAULT_SCOPES = (READ, WRITE)
COMPAT = ("openai",)
LIMITS = ("requests_per_minute", "max_queued", "max_running", "daily_gpu_seconds")

MAX_NAME = 100
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1_000.0
MAX_REQUESTS_PER_MINUTE = 100_000
MAX_QUEUED = 100_000
"""A count of this many waiting jobs still takes a small part of a second, and every new job of a limited key counts."""
MAX_RUNNING = 10_000
MAX_DAILY_GPU_SECONDS = 1_000_000_000

OVERLAP = timedelta(hours=24)
"""How long the old secret of a rotated key goes on working unless somebody decides otherwise."""
MAX_OVERLAP = timedelta(days=30)
LAST_USED_EVERY = timedelta(minutes=1)

_HINT_CHARACTERS = 4
_SECRET = re.compile(r"rk_[A-Za-z0-9_-]{43}", re.ASCII)
_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)

Wanted = TypeVar("Wanted", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Secret:
    """What a client sends. It is shown once and never stored."""

    text: str

    @classmethod
    def new(cls) -> "Secret":
        return cls(f"rk_{secrets.token_urlsafe(32)}")

    @property
    def columns(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"digest": digest_of(self.text), "hint": self.text[-_HINT_CHARACTERS:]}

    def __repr__(self) -> str:
        return "Secret(...)"


def digest_of(secret: str) -> bytes:
    """SHA-256: a secret of 256 random bits needs no slower hash."""
    return sha256(secret.encode("utf-8", "surrogateescape")).digest()


def is_secret(text: str) -> bool:
    """Whether `text` looks like a secret that was made here."""
    return _SECRET.fullmatch(text) is not None


def is_project(text: str) -> bool:
    """Whether `text` is well formed as the name of a project."""
    return _PROJECT.fullmatch(text) is not None


def _project(value: object) -> str:
    if isinstance(value, str) and is_project(value):
        return value
    raise PydanticCustomError(
        "invalid_value",
        "must be 1 to 63 lower-case letters, digits and hyphens, the first no hyphen, got {value}",
        {"value": shown(value)},
    )


def _name(value: object) -> str:
    if isinstance(value, str) and value.strip() and len(value) <= MAX_NAME and value.isprintable():
        return value
    raise PydanticCustomError(
        "invalid_value",
        "must be 1 to {limit} printable characters, not blank, got {value}",
        {"limit": MAX_NAME, "value": shown(value)},
    )


def _compat(value: object) -> str | None:
    if value is None or value in COMPAT:
        return cast("str | None", value)
    raise PydanticCustomError("invalid_value", "must be openai or null, got {value}", {"value": shown(value)})


def _ahead(moment: datetime) -> datetime:
    if moment > datetime.now(UTC):
        return moment
    raise PydanticCustomError("invalid_value", "must lie ahead, got {value}", {"value": moment.isoformat()})


ProjectName = Annotated[
    str, BeforeValidator(_project), WithJsonSchema({"type": "string", "pattern": f"^{_PROJECT.pattern}$"})
]
KeyName = Annotated[
    str, BeforeValidator(_name), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_NAME})
]
Scopes = Annotated[list[str], BeforeValidator(some_of(SCOPES)), some_of_schema(SCOPES)]
Priorities = Annotated[list[str], BeforeValidator(some_of(PRIORITIES)), some_of_schema(list(PRIORITIES))]
Compat = Annotated[
    str | None,
    BeforeValidator(_compat),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": list(COMPAT)}, {"type": "null"}]}),
]

Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)]


def _without_default(schema: JsonDict) -> None:
    # what stands for an absent field is no value that could be sent
    schema.pop("default", None)


class NewProject(BaseModel):
    """The body of `POST /v1/projects`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: ProjectName
    weight: Weight = 1.0


class ProjectChanges(BaseModel):
    """The body of `PATCH /v1/projects/{name}`: what is absent stays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    weight: Annotated[Weight, Field(json_schema_extra=_without_default)] = 1.0


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    compat: Compat = None
    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_REQUESTS_PER_MINUTE)] | None = None
    max_queued: Annotated[int, Field(ge=0, le=MAX_QUEUED)] | None = None
    max_running: Annotated[int, Field(ge=1, le=MAX_RUNNING)] | None = None
    daily_gpu_seconds: Annotated[int, Field(ge=1, le=MAX_DAILY_GPU_SECONDS)] | None = None


class NewKey(_Limits):
    """The body of `POST /v1/api_keys`. A limit that is null or absent does not exist."""

    name: KeyName
    project: ProjectName = "default"
    scopes: Scopes = list(DEFAULT_SCOPES)
    priorities: Priorities = list(PRIORITIES)
    expires_at: Annotated[Moment, AfterValidator(_ahead)] | None = None


class Rotation(BaseModel):
    """The body of `POST /v1/api_keys/{id}/rotate`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    overlap_seconds: Annotated[int, Field(ge=0, le=int(MAX_OVERLAP.total_seconds()))] = int(OVERLAP.total_seconds())
    """How long the old secret goes on working."""


class Nothing(BaseModel):
    """The body of what takes none."""

    model_config = ConfigDict(extra="forbid")


_ABSENT = Field(json_schema_extra=_without_default)


class KeyChanges(_Limits):
    """The body of `PATCH /v1/api_keys/{id}`: what is absent stays, a limit that is null is taken away."""

    name: Annotated[KeyName, _ABSENT] = ""
    scopes: Annotated[Scopes, _ABSENT] = []
    priorities: Annotated[Priorities, _ABSENT] = []


def parse(kind: type[Wanted], body: Mapping[str, Any]) -> Wanted:
    """`body` as one of the kinds above.

    Raises:
        InvalidRequest: names the field, the value and the limit.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise refusal(error) from error


def key_values(wanted: NewKey, secret: Secret) -> dict[str, Any]:
    """The columns of a new key."""
    return {"id": new_key_id(), **wanted.model_dump(), **secret.columns}


def create_project(**values: Any) -> ReturningInsert[Project]:
    """A new project. No row: there is one of this name already."""
    return insert(Project).values(**values).on_conflict_do_nothing(index_elements=[Project.name]).returning(Project)


def project(name: str) -> Select[Project]:
    return select(Project).where(Project.name == name)


def change_project(name: str, values: Mapping[str, Any]) -> ReturningUpdate[Project]:
    """Set columns of a project. A weight holds for claims from then on. No row: there is none of this name."""
    return (
        update(Project)
        .where(Project.name == name)
        .values(**values)
        .execution_options(synchronize_session=False, populate_existing=True)
        .returning(Project)
    )


def create(**values: Any) -> ReturningInsert[ApiKey]:
    """A new key. No row: it was made already."""
    return insert(ApiKey).values(**values).on_conflict_do_nothing(index_elements=[ApiKey.id]).returning(ApiKey)


def describe(key: ApiKey, usage: ApiKeyUsage | None) -> dict[str, Any]:
    """What may be told of a key, for JSON; times are Unix seconds."""
    plain = ("id", "project", "name", "hint", "scopes", "priorities", "compat", *LIMITS)
    times = {
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "previous_secret_until": key.previous_until,
    }
    return {
        "object": "api_key",
        **{name: getattr(key, name) for name in plain},
        **{name: None if time is None else int(time.timestamp()) for name, time in times.items()},
        "usage": describe_usage(usage),
    }


def describe_usage(usage: ApiKeyUsage | None) -> dict[str, Any]:
    """What a key used on a day; None: nothing today."""
    if usage is None:
        return {"day": datetime.now(UTC).date().isoformat(), "gpu_seconds": 0, "attempts": 0}
    return {"day": usage.day.isoformat(), "gpu_seconds": round(usage.gpu_seconds, 3), "attempts": usage.attempts}


def _update_keys() -> Update:
    return update(ApiKey).execution_options(synchronize_session=False, populate_existing=True)


def _is_usable() -> ColumnElement[bool]:
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()))


def change(key_id: str, values: Mapping[str, Any]) -> ReturningUpdate[ApiKey]:
    """Set columns of a key, revoked or not: its jobs still count against its limits."""
    return _update_keys().where(ApiKey.id == key_id).values(**values).returning(ApiKey)


def rotate(key_id: str, secret: Secret, *, overlap: timedelta) -> ReturningUpdate[ApiKey]:
    """Give a key another secret; the one before goes on working for `overlap`, and those before that stop.

    No row: there is no such key, it is revoked or has expired, or it has this secret already.
    """
    keeps = overlap > timedelta(0)
    return (
        _update_keys()
        .where(ApiKey.id == key_id, _is_usable(), ApiKey.digest != secret.columns["digest"])
        .values(
            previous_digest=ApiKey.digest if keeps else None,
            previous_until=func.now() + overlap if keeps else None,
            **secret.columns,
        )
        .returning(ApiKey)
    )


def revoke(key_id: str) -> ReturningUpdate[ApiKey]:
    """End a key for good, both its secrets. Again: nothing changes."""
    return (
        _update_keys()
        .where(ApiKey.id == key_id)
        .values(revoked_at=func.coalesce(ApiKey.revoked_at, func.now()), previous_digest=None, previous_until=None)
        .returning(ApiKey)
    )


def find(digests: Collection[bytes]) -> Select[ApiKey, bool]:
    """The keys that work with secrets of these digests, and whether the one before the last rotation still does."""
    wanted = list(digests)
    overlaps = and_(ApiKey.previous_digest.is_not(None), ApiKey.previous_until > func.now())
    return select(ApiKey, func.coalesce(overlaps, False)).where(
        _is_usable(), or_(ApiKey.digest == func.any(wanted), and_(ApiKey.previous_digest == func.any(wanted), overlaps))
    )


def note_use(key_ids: Collection[str]) -> Update:
    """Write down that these keys are in use. A row that somebody holds is left for the next time."""
    rows = (
        select(ApiKey.id)
        .where(
            ApiKey.id.in_(key_ids),
            or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < func.now() - LAST_USED_EVERY),
        )
        .with_for_update(key_share=True, skip_locked=True)
    )
    return _update_keys().where(ApiKey.id.in_(rows)).values(last_used_at=func.now())


def _today() -> ColumnElement[Any]:
    return sql_cast(func.timezone("UTC", func.now()), Date)


def with_usage() -> Select[ApiKey, ApiKeyUsage]:
    """Keys, each with what it used today (UTC), or None if it used nothing."""
    return select(ApiKey, ApiKeyUsage).outerjoin(
        ApiKeyUsage, and_(ApiKeyUsage.api_key == ApiKey.id, ApiKeyUsage.day == _today())
    )


def limits(key_id: str) -> Select[int | None, int | None]:
    """`max_queued` and `daily_gpu_seconds` as they are now."""
    return select(ApiKey.max_queued, ApiKey.daily_gpu_seconds).where(ApiKey.id == key_id)


def lock_limits(key_id: str) -> Select[int | None, int | None]:
    """The same. Whoever counts jobs of the key under this lock has the last word until the end of the transaction."""
    return limits(key_id).with_for_update(key_share=True)


def num_queued(key_id: str, *, at_most: int) -> Select[int]:
    """Jobs of the key that wait, those of campaigns left out, counted up to `at_most`."""
    # a literal: a prepared statement's generic plan could not use the partial index otherwise
    is_queued = Job.state == literal_column(f"'{JobState.QUEUED}'", Job.state.type)
    one = literal_column("1", Integer)
    # by the index of holds: it passes over a million that wait with their campaign
    open_, held = (
        select(one.label("one"))
        .where(Job.api_key == key_id, is_queued, hold, Job.campaign_id.is_(None))
        .limit(at_most)
        .subquery(name)
        for name, hold in (("open", Job.hold.is_(None)), ("held", Job.hold == CONCURRENCY))
    )
    waiting = union_all(select(open_.c.one), select(held.c.one)).limit(at_most).subquery("waiting")
    return select(func.count()).select_from(waiting)


def has_used_its_day(key_id: SQLColumnExpression[str | None]) -> ColumnElement[bool]:
    """Whether the attempts of the key's jobs took its `daily_gpu_seconds` today (UTC)."""
    return exists().where(
        ApiKey.id == key_id,
        ApiKeyUsage.api_key == ApiKey.id,
        ApiKeyUsage.day == _today(),
        ApiKeyUsage.gpu_seconds >= ApiKey.daily_gpu_seconds,
    )


def gpu_seconds_today(key_id: str) -> Select[float]:
    """GPU time of the attempts of the key's jobs that ended today (UTC). No row: none did."""
    return select(ApiKeyUsage.gpu_seconds).where(ApiKeyUsage.api_key == key_id, ApiKeyUsage.day == _today())
