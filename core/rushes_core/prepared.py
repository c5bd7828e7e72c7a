"""Statements that are compiled once and run by the driver alone: for what is executed all the time."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from psycopg import RawCursor, generators
from psycopg.abc import Buffer
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import DictRow, dict_row
from sqlalchemy import Executable
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement

from rushes_core.impatient import Impatient

_DIALECT = PGDialect_psycopg(paramstyle="numeric_dollar")
_SERIALS = count()


class Session:
    """A connection in autocommit mode, and what the server has prepared on it, for one thread at a time.

    What is kept is run without psycopg's cursor, which takes longer than all else that the client does for it.

    Args:
        arguments: of `psycopg.connect`.

    Raises:
        psycopg.OperationalError
    """

    def __init__(self, **arguments: Any) -> None:
        self.connection = Impatient[DictRow].connect(**arguments, autocommit=True, row_factory=dict_row)
        self._cursor = RawCursor(self.connection)
        self._adapter = Transformer(self.connection)
        self._columns: dict[bytes, list[str]] = {}
        """Of what each statement that is prepared returns, by the statement's name."""

    def run_once(self, query: bytes, parameters: Sequence[Any] = ()) -> list[DictRow]:
        """Run a statement that will not come again; the rows that it returns.

        Raises:
            psycopg.Error
        """
        cursor = self._cursor.execute(query, parameters, prepare=False)
        return cursor.fetchall() if cursor.description else []

    def run(
        self, name: bytes, query: bytes, parameters: Sequence[Buffer | None], types: Sequence[int]
    ) -> list[DictRow]:
        """Run a statement that the server has prepared as `name`, or does now; the rows that it returns.

        Args:
            parameters: as text.
            types: ids of the parameters' types; 0: what the server infers from where it stands.

        Raises:
            psycopg.Error
        """
        server = self.connection.pgconn
        columns = self._columns.get(name)
        if columns is None:
            server.send_prepare(name, query, types)
            self._reply()
        server.send_query_prepared(name, parameters)
        reply = self._reply()
        if columns is None:
            fields = [reply.fname(number) or b"" for number in range(reply.nfields)]
            columns = self._columns[name] = [field.decode() for field in fields]
        if not reply.ntuples:
            return []
        self._adapter.set_pgresult(reply)
        rows = self._adapter.load_rows(0, reply.ntuples, tuple)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _reply(self) -> PGresult:
        reply = self.connection.wait(generators.execute(self.connection.pgconn))[-1]
        if reply.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise error_from_result(reply)
        return reply


class Prepared:
    """A statement of SQLAlchemy's as the server takes it.

    What it holds of values stays; its `bindparam`s are given with every execution, by name.

    Args:
        keep: have the server keep it and its plan on each connection. Not for a statement that is run once.
    """

    def __init__(self, statement: Executable, *, keep: bool = True) -> None:
        assert isinstance(statement, ClauseElement)
        compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
        assert isinstance(compiled, SQLCompiler)
        self._query = str(compiled).encode()
        self._name = f"rushes_{next(_SERIALS)}".encode() if keep else None
        self._processors: dict[str, Callable[[Any], Any]] = {
            name: processor
            for name, bind in compiled.binds.items()
            if (processor := bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)) is not None
        }
        names = list(compiled.positiontup or ())
        self._values = [self._processed(name, compiled.params[name]) for name in names]
        if keep:
            self._values, self._types = _as_text(self._values)
        self._places = {name: place for place, name in enumerate(names)}

    def execute(self, session: Session, **values: Any) -> list[DictRow]:
        """Run it; the rows that it returns. `values` that the statement has no parameter for are left out.

        Raises:
            psycopg.Error
        """
        names = [name for name in values if name in self._places]
        given = [self._processed(name, values[name]) for name in names]
        if self._name is not None:
            given, _ = _as_text(given)
        parameters = self._values.copy()
        for name, value in zip(names, given, strict=True):
            parameters[self._places[name]] = value
        if self._name is None:
            return session.run_once(self._query, parameters)
        return session.run(self._name, self._query, parameters, self._types)

    def _processed(self, name: str, value: Any) -> Any:
        processor = self._processors.get(name)
        return value if processor is None else processor(value)


def _as_text(values: list[Any]) -> tuple[list[Any], list[int]]:
    """The values as the server reads them, and the ids of their types; of a number 0, because it may be of several."""
    adapter = Transformer()
    texts = list(adapter.dump_sequence(values, [PyFormat.TEXT] * len(values)))
    types = [0 if type(value) is int else oid for value, oid in zip(values, adapter.types or (), strict=True)]
    return texts, types
