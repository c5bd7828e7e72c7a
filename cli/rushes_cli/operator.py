"""What the commands for operators share: a short transaction on the database."""

from collections.abc import Iterator
from contextlib import contextmanager

from rushes_core.database import create_sync_engine
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from rushes_cli.main import UsageError, load_database_settings, one_line_database_errors


@contextmanager
def transaction() -> Iterator[Session]:
    """One transaction on the database that RUSHES_DATABASE_URL names.

    Raises:
        UsageError: it names none.
        RushesError: the database cannot be reached, or is not of this release.
    """
    settings = load_database_settings()
    try:
        engine = create_sync_engine(settings, pool_size=1)
    except (ArgumentError, ImportError):
        raise UsageError("RUSHES_DATABASE_URL must be postgresql+psycopg://user:password@host:port/name") from None
    try:
        with one_line_database_errors(), Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    finally:
        engine.dispose()
