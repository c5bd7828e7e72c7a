"""`rushes keys`: make, list, change, rotate and revoke API keys, straight on the database."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from rushes_core import keys
from rushes_core.errors import RushesError
from rushes_core.fields import PRIORITIES
from rushes_core.ids import is_key_id
from rushes_core.models import ApiKey, ApiKeyUsage
from rushes_core.moment import parse_duration, parse_moment
from sqlalchemy.orm import Session

from rushes_cli.main import UsageError
from rushes_cli.operator import transaction
from rushes_cli.terminal import print_json, print_table

_LIMITS = {
    "requests_per_minute": "requests that it may send in any minute",
    "max_queued": "jobs that it may have waiting",
    "max_running": "jobs that may run at once; others wait",
    "daily_gpu_seconds": "GPU time that its jobs may take in a day, UTC",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `keys` with its actions."""
    parser = subparsers.add_parser("keys", help="make, list, change, rotate and revoke API keys")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    create = actions.add_parser("create", help="make a key; its secret is printed this once")
    create.add_argument("name", metavar="NAME", help="what it is for")
    create.add_argument("--project", default="default", metavar="NAME", help="default: default")
    create.add_argument(
        "--scope",
        action="append",
        dest="scopes",
        choices=keys.SCOPES,
        help=f"may be given again (default: {' and '.join(keys.DEFAULT_SCOPES)})",
    )
    create.add_argument(
        "--priority",
        action="append",
        dest="priorities",
        choices=list(PRIORITIES),
        help="a class that its jobs may have; may be given again (default: all)",
    )
    for name, what in _LIMITS.items():
        create.add_argument(_option(name), type=int, metavar="N", help=f"{what} (default: no limit)")
    create.add_argument(
        "--expires",
        type=_argument(_time),
        dest="expires_at",
        metavar="WHEN",
        help="from now, as 90d, or a time, as 2027-01-01T00:00:00Z (default: never)",
    )
    create.add_argument("--compat", choices=keys.COMPAT, help="answers use OpenAI's four status words")
    create.set_defaults(run=_create)

    listing = actions.add_parser("list", help="list keys")
    listing.add_argument("--project", metavar="NAME", help="only those of this project")
    listing.set_defaults(run=_list)

    show = actions.add_parser("show", help="show a key, its limits and what it used today")
    show.set_defaults(run=_show)

    change = actions.add_parser(
        "change", help="change what a key may do; what is not named stays", argument_default=argparse.SUPPRESS
    )
    change.add_argument("--name", metavar="NAME", help="what it is for")
    change.add_argument("--scope", action="append", dest="scopes", choices=keys.SCOPES, help="all of them anew")
    change.add_argument(
        "--priority", action="append", dest="priorities", choices=list(PRIORITIES), help="all of them anew"
    )
    for name, what in _LIMITS.items():
        change.add_argument(_option(name), type=_argument(_number_or_none), metavar="N", help=f"{what}, or none")
    change.add_argument("--compat", type=_word_or_none, metavar="openai", help="openai, or none")
    change.set_defaults(run=_change)

    rotate = actions.add_parser("rotate", help="give a key another secret, which is printed this once")
    rotate.add_argument(
        "--overlap",
        type=_argument(parse_duration),
        default=keys.OVERLAP,
        metavar="TIME",
        help="how long the old secret goes on working, as 0s or 7d (default 24h)",
    )
    rotate.set_defaults(run=_rotate)

    revoke = actions.add_parser("revoke", help="end a key for good; its jobs go on")
    revoke.set_defaults(run=_revoke)

    for action in (show, change, rotate, revoke):
        action.add_argument("id", type=_argument(_key_id), metavar="KEY", help="its id, key_...")
    for action in (create, listing, show, change, rotate, revoke):
        action.add_argument("--json", action="store_true", default=False, help="print one JSON object a line")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {text}") from None

    return checked


def _key_id(text: str) -> str:
    if not is_key_id(text):
        raise ValueError("must be the id of a key, key_ and 26 characters")
    return text


def _number_or_none(text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a whole number, or none for no limit")
    return int(text)


def _word_or_none(text: str) -> str | None:
    return None if text == "none" else text


def _time(text: str) -> float:
    for parse in (lambda: datetime.now(UTC) + parse_duration(text), lambda: parse_moment(text)):
        with suppress(ValueError, OverflowError):
            return parse().timestamp()
    raise ValueError("must be a time from now in days, hours, minutes and seconds, as 90d, or a time with its zone")


def _create(arguments: argparse.Namespace) -> int:
    names = ("name", "project", "scopes", "priorities", "compat", "expires_at", *keys.LIMITS)
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    wanted = keys.parse(keys.NewKey, given)
    secret = keys.Secret.new()
    with transaction() as session:
        if session.execute(keys.project(wanted.project)).first() is None:
            raise RushesError(f"no project {wanted.project}: make it with `rushes projects create {wanted.project}`")
        key = session.execute(keys.create(**keys.key_values(wanted, secret))).scalar_one()
    _print_secret(key, None, secret, as_json=arguments.json)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    statement = keys.with_usage().order_by(ApiKey.project, ApiKey.id)
    with transaction() as session:
        if arguments.project is not None:
            if session.execute(keys.project(arguments.project)).first() is None:
                raise RushesError(f"no project {arguments.project}")
            statement = statement.where(ApiKey.project == arguments.project)
        rows = session.execute(statement).all()
    if arguments.json:
        for key, usage in rows:
            print_json(keys.describe(key, usage))
        return 0
    print_table(
        ("KEY", "PROJECT", "NAME", "ENDS WITH", "STATE", "SCOPES", "LAST USED"),
        [
            (key.id, key.project, key.name, key.hint, _state(key), ",".join(key.scopes), _when(key.last_used_at))
            for key, _ in rows
        ],
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with transaction() as session:
        key, usage = _find(arguments.id, session)
    _print_key(key, usage, as_json=arguments.json)
    return 0


def _change(arguments: argparse.Namespace) -> int:
    names = ("name", "scopes", "priorities", "compat", *keys.LIMITS)
    sent = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if not sent:
        raise UsageError("nothing to change: name a limit, scopes, priorities, compat or a name")
    values = keys.parse(keys.KeyChanges, sent).model_dump(exclude_unset=True)
    with transaction() as session:
        _, usage = _find(arguments.id, session)
        key = session.execute(keys.change(arguments.id, values)).scalar_one()
    _print_key(key, usage, as_json=arguments.json)
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    overlap: timedelta = arguments.overlap
    keys.parse(keys.Rotation, {"overlap_seconds": int(overlap.total_seconds())})
    secret = keys.Secret.new()
    with transaction() as session:
        _, usage = _find(arguments.id, session)
        key = session.execute(keys.rotate(arguments.id, secret, overlap=overlap)).scalar_one_or_none()
        if key is None:
            raise RushesError(f"{arguments.id} was revoked or has expired: make a new key")
    _print_secret(key, usage, secret, as_json=arguments.json)
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    with transaction() as session:
        _, usage = _find(arguments.id, session)
        key = session.execute(keys.revoke(arguments.id)).scalar_one()
    if arguments.json:
        print_json(keys.describe(key, usage))
    else:
        print(f"rushes keys: {key.id} ({key.name}) is revoked; the API refuses it within a second")
    return 0


def _find(key_id: str, session: Session) -> tuple[ApiKey, ApiKeyUsage | None]:
    found = session.execute(keys.with_usage().where(ApiKey.id == key_id)).first()
    if found is None:
        raise RushesError(f"no API key with id {key_id}: `rushes keys list` lists them")
    return found


def _print_secret(key: ApiKey, usage: ApiKeyUsage | None, secret: keys.Secret, *, as_json: bool) -> None:
    if as_json:
        print_json(keys.describe(key, usage) | {"secret": secret.text})
        return
    _print_key(key, usage, as_json=False)
    print(f"secret                 {secret.text}")
    print("The secret is not stored and not shown again: keep it now.")


def _print_key(key: ApiKey, usage: ApiKeyUsage | None, *, as_json: bool) -> None:
    if as_json:
        print_json(keys.describe(key, usage))
        return
    used = keys.describe_usage(usage)
    lines = {
        "key": key.id,
        "name": key.name,
        "project": key.project,
        "ends with": key.hint,
        "state": _state(key),
        "scopes": ", ".join(key.scopes),
        "priorities": ", ".join(key.priorities),
        **{name.replace("_", " "): _limit(getattr(key, name)) for name in keys.LIMITS},
        **({} if key.compat is None else {"compat": key.compat}),
        "used today": f"{used['gpu_seconds']:g} GPU-seconds in {used['attempts']} attempts",
        "expires": _when(key.expires_at),
        "last used": _when(key.last_used_at),
        **({} if key.previous_until is None else {"old secret until": _when(key.previous_until)}),
    }
    for title, value in lines.items():
        print(f"{title:<22} {value}")


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= datetime.now(UTC) else "works"


def _when(time: datetime | None) -> str:
    return "never" if time is None else f"{time:%Y-%m-%d %H:%M} UTC"
