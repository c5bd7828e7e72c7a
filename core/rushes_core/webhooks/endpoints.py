"""Endpoints and secrets: what clients may ask of them, and the statements. Nothing here executes."""

from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from sqlalchemy import Select, Update, and_, case, false, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.ids import new_endpoint_id
from rushes_core.keys import KeyName
from rushes_core.webhooks.deliveries import BY_REQUEST
from rushes_core.webhooks.events import EVENT_TYPES, EventTypes, Url
from rushes_core.webhooks.guard import Target
from rushes_core.webhooks.signing import SigningSecret, Vault
from rushes_core.webhooks.tables import WebhookEndpoint, WebhookSecret

MAX_ENDPOINTS = 50
"""Registered endpoints of a project."""
OVERLAP = timedelta(hours=24)
"""How long the secret before a rotation goes on signing where that was asked for."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewEndpoint(_Body):
    """The body of `POST /v1/webhook_endpoints`."""

    name: KeyName
    url: Url
    event_types: EventTypes


class EndpointChanges(_Body):
    """The body of `POST /v1/webhook_endpoints/{id}`: what is absent stays."""

    name: KeyName | None = None
    url: Url | None = None
    event_types: EventTypes | None = None
    enabled: bool | None = None


class SecretRotation(_Body):
    """The body of `POST /v1/webhook_endpoints/{id}/rotate_secret`."""

    keep_old_secret_active_for_24_hours: bool = False


class EndpointTest(_Body):
    """The body of `POST /v1/webhook_endpoints/{id}/test`."""

    event_type: Annotated[str, WithJsonSchema({"type": "string", "enum": list(EVENT_TYPES)})]


def origin_id(project: str, target: Target) -> str:
    """The id of the endpoint that stands for the origin of a job's `webhook_url`."""
    return f"who_{sha256(f'{project} {target.origin}'.encode()).hexdigest()[:32]}"


def job_webhook(target: Target, events: list[str], *, project: str) -> dict[str, Any]:
    """What a job keeps of its `webhook_url`: triggers read it when something happens to the job."""
    return {"url": target.url, "origin": target.origin, "endpoint": origin_id(project, target), "events": events}


def endpoint_values(wanted: NewEndpoint, target: Target, secret: SigningSecret, vault: Vault) -> dict[str, Any]:
    """The columns of a new endpoint.

    Raises:
        WebhooksNotConfigured
    """
    return {
        "id": new_endpoint_id(),
        "name": wanted.name,
        "url": target.url,
        "event_types": wanted.event_types,
        "secret": vault.lock(secret),
        "secret_hint": secret.hint,
    }


def create(**values: Any) -> ReturningInsert[WebhookEndpoint]:
    """A new endpoint. No row: it was made already."""
    statement = insert(WebhookEndpoint).values(**values)
    return statement.on_conflict_do_nothing(index_elements=[WebhookEndpoint.id]).returning(WebhookEndpoint)


def _is_visible(project: str) -> tuple[ColumnElement[bool], ...]:
    return (
        WebhookEndpoint.project == project,
        WebhookEndpoint.origin.is_(None),
        WebhookEndpoint.deleted_at.is_(None),
    )


def listed(*, project: str) -> Select[WebhookEndpoint]:
    """The registered endpoints of a project, in no order."""
    return select(WebhookEndpoint).where(*_is_visible(project))


def get(endpoint_id: str, *, project: str) -> Select[WebhookEndpoint]:
    return listed(project=project).where(WebhookEndpoint.id == endpoint_id)


def count(*, project: str) -> Select[int]:
    return select(func.count()).select_from(WebhookEndpoint).where(*_is_visible(project))


def states() -> Select[str, int]:
    """How many registered endpoints of all projects are `enabled`, `paused` after failures, or `disabled`."""
    is_paused = and_(WebhookEndpoint.state == "enabled", WebhookEndpoint.open_until > func.now())
    state = case((is_paused, "paused"), else_=WebhookEndpoint.state)
    return (
        select(state, func.count())
        .where(WebhookEndpoint.origin.is_(None), WebhookEndpoint.deleted_at.is_(None))
        .group_by(state)
    )


def lock(*, project: str) -> Select[None]:
    """Whoever counts the endpoints of the project under this lock has the last word in its transaction."""
    return select(func.pg_advisory_xact_lock(738_764_377, func.hashtext(project)))


def _update() -> Update:
    return update(WebhookEndpoint).execution_options(synchronize_session=False, populate_existing=True)


def change(endpoint_id: str, values: Mapping[str, Any], *, project: str) -> ReturningUpdate[WebhookEndpoint]:
    """Set columns of an endpoint. No row: the project has no such endpoint, or nothing would change."""
    differs = or_(false(), *(getattr(WebhookEndpoint, name).is_distinct_from(value) for name, value in values.items()))
    return (
        _update()
        .where(WebhookEndpoint.id == endpoint_id, *_is_visible(project), differs)
        .values(updated_at=func.now(), **values)
        .returning(WebhookEndpoint)
    )


ENABLED: dict[str, Any] = {
    "state": "enabled",
    "disabled_reason": None,
    "failures": 0,
    "failing_since": None,
    "open_until": None,
    "held_until": None,
}
"""Columns of an endpoint that is to be tried as if it had never failed."""
DISABLED: dict[str, Any] = {"state": "disabled", "disabled_reason": BY_REQUEST}


def rotate(
    endpoint_id: str, secret: SigningSecret, *, vault: Vault, keeps: bool, project: str
) -> ReturningUpdate[WebhookEndpoint]:
    """Give an endpoint another secret; the one before signs on beside it for a day if it `keeps` it.

    Raises:
        WebhooksNotConfigured
    """
    return (
        _update()
        .where(WebhookEndpoint.id == endpoint_id, *_is_visible(project))
        .values(
            secret=vault.lock(secret),
            secret_hint=secret.hint,
            previous_secret=WebhookEndpoint.secret if keeps else None,
            previous_until=func.now() + OVERLAP if keeps else None,
            updated_at=func.now(),
        )
        .returning(WebhookEndpoint)
    )


def delete(endpoint_id: str, *, project: str) -> ReturningUpdate[WebhookEndpoint]:
    """End an endpoint. Its log stays; its secrets do not. To be followed by `deliveries.cancel_pending`."""
    return (
        _update()
        .where(WebhookEndpoint.id == endpoint_id, WebhookEndpoint.project == project, WebhookEndpoint.origin.is_(None))
        .values(
            deleted_at=func.coalesce(WebhookEndpoint.deleted_at, func.now()),
            state="disabled",
            # not null by a constraint
            secret=b"",
            previous_secret=None,
            previous_until=None,
        )
        .returning(WebhookEndpoint)
    )


def urls(*, project: str) -> Select[str | None]:
    """URLs of the endpoints of a project that are in use."""
    return select(WebhookEndpoint.url).where(*_is_visible(project), WebhookEndpoint.state == "enabled")


def secret_of(project: str) -> Select[WebhookSecret]:
    return select(WebhookSecret).where(WebhookSecret.project == project)


def rotate_secret(project: str, secret: SigningSecret, *, vault: Vault, keeps: bool) -> ReturningInsert[WebhookSecret]:
    """Give a project another secret for the `webhook_url`s of its jobs, or its first.

    Raises:
        WebhooksNotConfigured
    """
    new = {"secret": vault.lock(secret), "hint": secret.hint}
    return (
        insert(WebhookSecret)
        .values(project=project, **new)
        .on_conflict_do_update(
            index_elements=[WebhookSecret.project],
            set_=new
            | {
                "previous_secret": WebhookSecret.secret if keeps else None,
                "previous_until": func.now() + OVERLAP if keeps else None,
                "updated_at": func.now(),
            },
        )
        .returning(WebhookSecret)
    )
