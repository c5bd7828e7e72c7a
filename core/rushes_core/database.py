"""Connections to Postgres, and the schema's revisions."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rushes_core.settings import DatabaseSettings, Settings

_CONNECT_ARGS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    # bound what a lost client or a lock can hold up
    "options": "-c statement_timeout=10s -c lock_timeout=4s -c idle_in_transaction_session_timeout=10s -c timezone=UTC",
}

EACH_ALONE = {"isolation_level": "AUTOCOMMIT"}
"""Execution options of a connection whose statements are a transaction each: while one of them waits for a table, which
a migration may hold, it holds no other one."""


def create_sync_engine(settings: DatabaseSettings, *, pool_size: int = 5) -> Engine:
    """Engine of a worker, the dispatcher or a command. A connection is checked before it is used.

    No plan is kept: one that the dispatcher made for an empty queue would be used for a full one.
    """
    return create_engine(
        settings.database_url,
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={**_CONNECT_ARGS, "prepare_threshold": None},
    )


def create_api_engine(settings: Settings, *, pool_size: int = 10) -> AsyncEngine:
    """Engine of an API process. A request waits at most 1.5 seconds for a connection."""
    return create_async_engine(
        settings.database_url,
        pool_size=pool_size,
        max_overflow=10,
        pool_timeout=1.5,
        pool_pre_ping=True,
        # errors go to the log, and what they would show are prompts
        hide_parameters=True,
        connect_args=_CONNECT_ARGS,
    )


def connect_arguments(settings: Settings) -> dict[str, Any]:
    """What the driver alone needs for a connection like those of the engines."""
    url = make_url(settings.database_url)
    _, arguments = url.get_dialect()().create_connect_args(url)
    return {**arguments, **_CONNECT_ARGS}


def migrate(settings: Settings, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to run from several processes at once: an advisory lock serialises them."""
    command.upgrade(alembic_config(settings.database_url), revision)


def alembic_config(database_url: str) -> Config:
    """Alembic's configuration for the revisions that ship with Rushes."""
    config = Config()
    config.set_main_option("script_location", str(_migrations()))
    config.set_main_option("file_template", "%%(year)d%%(month).2d%%(day).2d_%%(hour).2d%%(minute).2d_%%(slug)s")
    config.set_main_option("timezone", "UTC")
    config.attributes["database_url"] = database_url
    return config


def _migrations() -> Path:
    installed = Path(str(files("rushes_core"))) / "_migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"
