"""What values of settings must be beyond their type, and how one that is not is told to the operator."""

import re
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from rushes_core.redact import without_password

PREFIX = "RUSHES_"

# S3's rules for names of buckets
_BUCKET = re.compile(r"(?!.*\.\.)(?!(?:[0-9]+\.){3}[0-9]+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
# what the store's client takes for a host: no underscores, as names of containers may have
_LABEL = "(?!-)[a-z0-9-]{1,63}(?<!-)"
_STORE_HOST = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}\.?|[0-9a-f.]*:[0-9a-f:.]*", re.ASCII)
# what the store's client takes for a region, whose name may become part of a host's
_REGION = re.compile(r"(?![0-9]+$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)", re.ASCII)
_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*)"
_HTTP_ORIGIN = re.compile(rf"(https?)://{_HOST}(?::([0-9]{{1,5}}))?", re.ASCII)
_VIEW_ORIGIN = re.compile(
    r"(?:capacitor|ionic|tauri|chrome-extension|moz-extension|safari-web-extension)://[a-z0-9._-]+", re.ASCII
)
_HOST_RULE = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*", re.ASCII)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class InvalidSettings(ValueError):
    """Variables of the environment are missing or wrong; names each."""


def variable(name: str) -> str:
    """The environment variable of the setting `name`."""
    return f"{PREFIX}{name.upper()}"


def problems(error: ValidationError, model: type[BaseModel]) -> str:
    """Every variable that is missing or wrong, with its value, unless that is secret, and what it must be."""
    return "; ".join(_problem(detail, model) for detail in error.errors())


def _problem(detail: Any, model: type[BaseModel]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    name = str(detail["loc"][0])
    if detail["type"] == "missing":
        return f"{variable(name)} is missing"
    if detail["type"] == "value_error":
        return f"{variable(name)}: {message}"
    return f"{variable(name)}: {message}{_shown(detail['input'], model.model_fields[name])}"


def _shown(value: Any, field: FieldInfo) -> str:
    if not is_secret(field):
        return f", got {value!r}"
    return "" if _holds_secret(field) else _without_secrets(str(value))


def _without_secrets(url: str) -> str:
    """What was given, where it is plain which part of it is the password."""
    return f", got {without_password(url)}" if "@" in url else ""


def is_secret(field: FieldInfo) -> bool:
    """Whether what is set there, or a part of it, is nobody's business."""
    return not field.repr or _holds_secret(field)


def _holds_secret(field: FieldInfo) -> bool:
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def listed(text: str) -> list[str]:
    """What `text` lists, separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def stripped(value: object) -> object:
    """`value` without the line end that a file or a secret of Kubernetes often has."""
    return value.strip() if isinstance(value, str) else value


def check_database_url(url: str) -> str:
    """
    Raises:
        ValueError: `url` is not one of Postgres with the psycopg driver.
    """
    if not re.match(r"postgresql\+psycopg://.", url) or not _is_database_url(url):
        raise ValueError(
            f"must be postgresql+psycopg://user:password@host:port/name, the port in 1..65535{_without_secrets(url)}"
        )
    return url


def _is_database_url(url: str) -> bool:
    # clients that speak HTTP read in this module and no database
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        port = make_url(url).port
    except (ArgumentError, ValueError):
        return False
    return port is None or 1 <= port <= 65_535


def check_redis_url(url: str) -> str:
    """
    Raises:
        ValueError: `url` is not one of Redis.
    """
    try:
        is_one = bool(re.match("rediss?://.", url)) and urlsplit(url).port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError(f"must be redis:// or rediss:// and a host, the port in 1..65535{_without_secrets(url)}")
    return url


def check_buckets(names: str) -> str:
    """`names`, separated by commas.

    Raises:
        ValueError: one is no name of a bucket.
    """
    for name in listed(names):
        if not _BUCKET.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name of a bucket, which has 3 to 63 lower-case letters, digits, hyphens and single "
                "dots, begins and ends with a letter or digit, and is no IP address"
            )
    return names


def check_region(name: str) -> str:
    """
    Raises:
        ValueError: `name` is none that a region of a store can have.
    """
    if not _REGION.fullmatch(name):
        raise ValueError(
            f"{name!r} is no region, which has at most 63 letters, digits and inner hyphens, as eu-north-1"
        )
    return name


def check_page_origins(origins: str) -> str:
    """`origins`, separated by commas.

    Raises:
        ValueError: one is nothing that a browser sends as the `Origin` of a page.
    """
    for origin in listed(origins):
        if origin != "*" and not _is_page_origin(origin.lower()):
            raise ValueError(
                f"{origin!r} is no origin of a web page, as https://app.example or http://localhost:3000, nor *: "
                "http or https, a host, and its port unless that is the usual one, without path and without user; or "
                "that of an app's own view, as capacitor://localhost. Any page can make itself null"
            )
    return origins


def check_own_origin(origin: str) -> str:
    """
    Raises:
        ValueError: `origin` is set and no origin of http or https.
    """
    if origin and not _is_http_origin(origin.lower().removesuffix("/")):
        raise ValueError(f"{origin!r} is no origin: https://host or http://host:port, without path and without user")
    return origin


def check_endpoint(url: str) -> str:
    """
    Raises:
        ValueError: `url` is set and no http or https URL of a host.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(_STORE_HOST.fullmatch(parts.hostname or ""))
        is_one = is_one and parts.port != 0 and not re.search(r"\s|[?#@]", url)
    except ValueError:
        is_one = False
    if url and not is_one:
        raise ValueError(
            f"{without_password(url)!r} is no endpoint: https://host or http://host:port, without user, the host of "
            "letters, digits, inner hyphens and dots"
        )
    return url


def check_hosts(hosts: str) -> str:
    """`hosts`, separated by commas.

    Raises:
        ValueError: one is neither the name of a host nor `*.` and such a name.
    """
    for host in listed(hosts):
        if not _HOST_RULE.fullmatch(host.lower().rstrip(".")):
            raise ValueError(f"{host!r} is no host, as hooks.example.com, nor all below one, as *.example.com")
    return hosts


def _is_page_origin(origin: str) -> bool:
    return _is_http_origin(origin, with_usual_port=False) or bool(_VIEW_ORIGIN.fullmatch(origin))


def _is_http_origin(origin: str, *, with_usual_port: bool = True) -> bool:
    found = _HTTP_ORIGIN.fullmatch(origin)
    if found is None:
        return False
    try:
        urlsplit(origin)
    except ValueError:
        return False
    scheme, port = found[1], found[2]
    if port is None:
        return True
    return 1 <= int(port) <= 65_535 and (with_usual_port or port != _DEFAULT_PORTS[scheme])
