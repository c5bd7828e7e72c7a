"""COPY, which SQLAlchemy does not have."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection


def copy_rows(connection: Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Run `COPY ... FROM STDIN` in the connection's transaction."""
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)
