"""Real Postgres, Valkey and S3 for tests: one embedded stack per session, a fresh part of each per module.

def test_x(settings: Settings) -> None: ...          # fresh and migrated, shared by the tests of one module
def test_y(stack: SharedStack) -> None:
    settings = stack.settings(lease_seconds=3)       # fresh again, with other settings
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# every test run loads this file: what only the servers need is imported where it is used
if TYPE_CHECKING:
    from rushes_cli.stack import EmbeddedStack
    from rushes_core.settings import Settings

REDIS_DATABASES = 1_024


class SharedStack:
    """A running stack that hands out databases, Redis numbers and buckets that nobody else in the session has."""

    def __init__(self, embedded: EmbeddedStack) -> None:
        from rushes_core.database import migrate

        self.embedded = embedded
        self._numbers = count(1)
        self._template = settings_of(embedded.settings_env)
        migrate(self._template)

    def env(self) -> dict[str, str]:
        """`RUSHES_*` variables of a migrated empty database, an empty Redis database and an empty bucket."""
        import psycopg
        from sqlalchemy import make_url

        number = next(self._numbers)
        assert number < REDIS_DATABASES
        env = dict(self.embedded.settings_env)
        url = make_url(env["RUSHES_DATABASE_URL"])
        with psycopg.connect(libpq_url(env, database="postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE test_{number} TEMPLATE "{url.database}"')
        env["RUSHES_DATABASE_URL"] = url.set(database=f"test_{number}").render_as_string(hide_password=False)
        env["RUSHES_REDIS_URL"] = env["RUSHES_REDIS_URL"].removesuffix("/0") + f"/{number}"
        env["RUSHES_S3_BUCKET"] = f"test-{number}"
        s3_client(env).create_bucket(Bucket=env["RUSHES_S3_BUCKET"])
        return env

    def settings(self, **overrides: Any) -> Settings:
        """Settings on a fresh `env()`; `overrides` are fields of Settings."""
        return settings_of(self.env(), **overrides)


def settings_of(env: dict[str, str], **overrides: Any) -> Settings:
    """Settings from `RUSHES_*` variables without touching this process's environment."""
    from rushes_core.settings import Settings

    fields: dict[str, Any] = {name.removeprefix("RUSHES_").lower(): value for name, value in env.items()}
    return Settings(**({"checkpoint": Path("/nonexistent"), "api_key": "test-key"} | fields | overrides))


def settings_env(settings: Settings) -> dict[str, str]:
    """`RUSHES_*` variables that give a child process the same settings."""
    from pydantic import SecretStr

    fields = settings.model_dump(mode="json", exclude_unset=True)
    secrets = {name for name in type(settings).model_fields if isinstance(getattr(settings, name), SecretStr)}
    plain = {name: str(value) for name, value in fields.items() if name not in secrets}
    plain |= {name: getattr(settings, name).get_secret_value() for name in secrets}
    return {f"RUSHES_{name.upper()}": value for name, value in plain.items()}


def libpq_url(env: dict[str, str], *, database: str | None = None) -> str:
    """The database's URL as psycopg takes it, of another `database` of the same server if given."""
    from sqlalchemy import make_url

    url = make_url(env["RUSHES_DATABASE_URL"]).set(drivername="postgresql")
    return (url if database is None else url.set(database=database)).render_as_string(hide_password=False)


def s3_client(env: dict[str, str]) -> Any:
    """A boto3 client of the stack's object store."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=env["RUSHES_S3_ENDPOINT_URL"],
        aws_access_key_id=env["RUSHES_S3_ACCESS_KEY_ID"],
        aws_secret_access_key=env["RUSHES_S3_SECRET_ACCESS_KEY"],
        region_name=env["RUSHES_S3_REGION"],
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    """One running stack for the whole session."""
    from rushes_cli.stack import EmbeddedStack

    with EmbeddedStack(tmp_path_factory.mktemp("stack")) as embedded:
        yield SharedStack(embedded)


@pytest.fixture(scope="module")
def stack_env(stack: SharedStack) -> dict[str, str]:
    """`RUSHES_*` variables of a fresh database, Redis database and bucket, one set per module."""
    return stack.env()


@pytest.fixture(scope="module")
def settings(stack_env: dict[str, str]) -> Settings:
    """Settings on `stack_env`; `checkpoint` is a path that does not exist and `api_key` is `test-key`."""
    return settings_of(stack_env)
