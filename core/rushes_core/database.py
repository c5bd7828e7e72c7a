"""Connections to Postgres, and the schema's revisions."""

import select
import time
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from rushes_core.impatient import SILENCE_SECONDS, Impatient
from rushes_core.settings import DatabaseSettings, Settings

# only migrations need it, and every process would take a fifth longer to start
if TYPE_CHECKING:
    from alembic.config import Config

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

MAX_API_CONNECTIONS = 20
MAX_IDLE_SECONDS = 1.0
"""A pooled connection that was used since then is not asked whether it still works, unless it shows that it ended."""
_RETURNED_AT = "rushes_returned_at"


def create_sync_engine(
    settings: DatabaseSettings, *, pool_size: int = 5, silence_seconds: float = SILENCE_SECONDS
) -> Engine:
    """Engine of a worker, the dispatcher or a command. A connection is checked before it is used.

    No plan is kept: one that the dispatcher made for an empty queue would be used for a full one.

    Args:
        silence_seconds: how long a statement may go without its result until the connection is given up.
    """
    engine = create_engine(
        settings.database_url,
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={**_CONNECT_ARGS, "prepare_threshold": None},
    )

    @event.listens_for(engine, "do_connect")
    def connect(dialect: object, entry: object, arguments: Any, parameters: Any) -> Impatient[Any]:
        connection = Impatient[Any].connect(*arguments, **parameters)
        connection.silence_seconds = silence_seconds
        return connection

    return engine


def create_api_engine(settings: Settings, *, pool_size: int = MAX_API_CONNECTIONS) -> AsyncEngine:
    """Engine of an API process. A request waits at most 1.5 seconds for a connection.

    Args:
        pool_size: connections that are kept; up to ten more, `MAX_API_CONNECTIONS` in all, are made and closed again.
            To make one takes longer than most requests.
    """
    engine = create_async_engine(
        settings.database_url,
        pool_size=pool_size,
        max_overflow=min(10, MAX_API_CONNECTIONS - pool_size),
        pool_timeout=1.5,
        # those used last have their statements prepared, and need not be asked
        pool_use_lifo=True,
        # errors go to the log, and what they would show are prompts
        hide_parameters=True,
        connect_args=_CONNECT_ARGS,
    )
    _check_before_use(engine.sync_engine)
    return engine


def _check_before_use(engine: Engine) -> None:
    """Replace pooled connections that have ended, as `pool_pre_ping` does, without a round trip for each request."""

    @event.listens_for(engine, "checkin")
    def returned(connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info[_RETURNED_AT] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def taken(connection: Any, entry: ConnectionPoolEntry, proxy: object) -> None:
        returned_at: float | None = entry.info.get(_RETURNED_AT)
        if returned_at is None:
            return
        driver_errors = engine.dialect.loaded_dbapi.Error
        try:
            is_idle = time.monotonic() - returned_at >= MAX_IDLE_SECONDS
            if is_idle or _has_news(entry.driver_connection):
                engine.dialect.do_ping(connection)
        except driver_errors as error:
            raise InvalidatePoolError from error


def _has_news(connection: Any) -> bool:
    """Whether the server has sent what nobody asked for: mostly, that it ends the connection."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def connect_arguments(settings: Settings) -> dict[str, Any]:
    """What the driver alone needs for a connection like those of the engines."""
    url = make_url(settings.database_url)
    _, arguments = url.get_dialect()().create_connect_args(url)
    return {**arguments, **_CONNECT_ARGS}


def migrate(settings: Settings, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to run from several processes at once: an advisory lock serialises them."""
    from alembic import command

    command.upgrade(alembic_config(settings.database_url), revision)


def alembic_config(database_url: str) -> "Config":
    """Alembic's configuration for the revisions that ship with Rushes."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations()))
    config.set_main_option("file_template", "%%(year)d%%(month).2d%%(day).2d_%%(hour).2d%%(minute).2d_%%(slug)s")
    config.set_main_option("timezone", "UTC")
    config.attributes["database_url"] = database_url
    return config


def migrations() -> Path:
    """Where the revisions that ship with Rushes lie."""
    installed = Path(str(files("rushes_core"))) / "_migrations"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"
