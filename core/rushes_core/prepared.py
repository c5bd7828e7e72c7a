"""Statements that are compiled once and run by the driver alone: for what is executed all the time."""

from collections.abc import Callable
from typing import Any

from psycopg import Cursor
from psycopg.rows import DictRow
from sqlalchemy import Executable
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement

_DIALECT = PGDialect_psycopg(paramstyle="numeric_dollar")


class Prepared:
    """A statement of SQLAlchemy's as the server takes it, for a `psycopg.RawCursor`.

    What it holds of values stays; its `bindparam`s are given with every execution, by name.

    Args:
        keep: have the server keep its plan on each connection. Not for a statement that is run once.
    """

    def __init__(self, statement: Executable, *, keep: bool = True) -> None:
        assert isinstance(statement, ClauseElement)
        compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
        assert isinstance(compiled, SQLCompiler)
        self._query = str(compiled).encode()
        self._keep = keep
        self._processors: dict[str, Callable[[Any], Any]] = {
            name: processor
            for name, bind in compiled.binds.items()
            if (processor := bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)) is not None
        }
        names = list(compiled.positiontup or ())
        self._values = [self._processed(name, compiled.params[name]) for name in names]
        self._places = {name: place for place, name in enumerate(names)}

    def execute(self, cursor: Cursor[DictRow], **values: Any) -> Cursor[DictRow]:
        """Run it. `values` that the statement has no parameter for are left out.

        Raises:
            psycopg.Error
        """
        parameters = self._values.copy()
        for name, value in values.items():
            if name in self._places:
                parameters[self._places[name]] = self._processed(name, value)
        return cursor.execute(self._query, parameters, prepare=self._keep)

    def _processed(self, name: str, value: Any) -> Any:
        processor = self._processors.get(name)
        return value if processor is None else processor(value)
