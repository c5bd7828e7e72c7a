"""The plans that Postgres makes for a statement."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from psycopg.types.json import Jsonb
from sqlalchemy import Connection


def generic_plan(connection: Connection, statement: Any) -> dict[str, Any]:
    """The plan that a statement gets when it has been prepared often enough: without a look at its parameters."""
    compiled = statement.compile(connection, compile_kwargs={"render_postcompile": True})
    numbers = {name: number for number, name in enumerate(compiled.params, 1)}

    def placeholder(match: re.Match[str]) -> str:
        cast = "::interval" if isinstance(compiled.params[match[1]], timedelta) else ""
        return f"${numbers[match[1]]}{cast}"

    numbered = re.sub(r"%\((\w+)\)s", placeholder, str(compiled))
    return connection.exec_driver_sql(f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {numbered}").scalar_one()[0]["Plan"]


def executed_plan(connection: Connection, statement: Any) -> dict[str, Any]:
    """The plan with what each node did."""
    compiled = statement.compile(connection, compile_kwargs={"render_postcompile": True})
    values = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in compiled.params.items()}
    return connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {compiled}", values).scalar_one()[0]["Plan"]


def scans(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan, from the top."""
    yield node
    for child in node.get("Plans", ()):
        yield from scans(child)


def rows_read(plan: dict[str, Any], table: str) -> int:
    """How many rows of `table` an executed plan looked at."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0))
        * node["Actual Loops"]
        for node in scans(plan)
        if node.get("Relation Name") == table
    )
