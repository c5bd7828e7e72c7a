"""What the load tests share: a database with everything that it needs, a filled queue, and figures."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rushes_cli.main import UsageError, one_line_database_errors
from rushes_cli.stack import EmbeddedStack
from rushes_core.database import create_sync_engine, migrate
from rushes_core.setting_rules import problems
from rushes_core.settings import Settings
from sqlalchemy import Engine, text

MODEL = "load"

_FILL = """
INSERT INTO jobs (
    id, project, model, priority, prompt, seed, width, height, num_frames, request, max_attempts, run_at {column}
) SELECT 'video_' || lpad(i::text, 26, '0'), 'project-' || lpad((i % :projects)::text, 4, '0'), :model,
    CASE WHEN i / :projects % 20 = 0 THEN 0 WHEN i / :projects % 4 = 0 THEN 2 ELSE 1 END,
    repeat('waves roll against a lighthouse ', 4), i, 832, 480, 107 + 17 * (i % 3),
    '{{"seconds": "4", "metadata": {{}}}}', 3,
    now() - (:jobs - i) * interval '1 ms' {value}
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS i
"""
_KEYS = """
WITH project AS (
    INSERT INTO projects (name) SELECT 'project-' || lpad(i::text, 4, '0') FROM generate_series(0, :projects - 1) AS i
    ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING name
)
INSERT INTO api_keys (id, project, name, hint, digest, scopes, priorities)
SELECT 'key_' || name, name, name, '0000', sha256(name::bytea), '{}', '{}' FROM project ON CONFLICT DO NOTHING
"""


@contextmanager
def servers() -> Iterator[Settings]:
    """Settings on the servers of the environment (`RUSHES_*`), or on an embedded stack in a temporary directory.

    Raises:
        UsageError: a variable is wrong.
        RushesError: the database cannot be reached.
    """
    if "RUSHES_DATABASE_URL" in os.environ:
        settings = _settings({})
        with one_line_database_errors():
            migrate(settings)
        yield settings
        return
    # what is wrong with the others is told before servers start
    _settings({"database_url": "postgresql+psycopg://host/name", "redis_url": "redis://host/0", "s3_bucket": "load"})
    with tempfile.TemporaryDirectory(prefix="rushes-load-") as directory, EmbeddedStack(directory) as stack:
        fields: dict[str, Any] = {name.removeprefix("RUSHES_").lower(): v for name, v in stack.settings_env.items()}
        settings = _settings(fields)
        migrate(settings)
        yield settings


def _settings(fields: dict[str, Any]) -> Settings:
    try:
        return Settings(checkpoint=Path("/nonexistent"), **fields)
    except ValidationError as error:
        raise UsageError(f"settings: {problems(error, Settings)}") from None


def patient_engine(settings: Settings, *, pool_size: int = 5) -> Engine:
    """For what sets tables up too, which takes longer than any statement of a process."""
    return create_sync_engine(settings, pool_size=pool_size, silence_seconds=3_600)


def clear(engine: Engine) -> None:
    """Empty the tables of jobs and their history."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, replicas"))


def fill(engine: Engine, *, jobs: int, projects: int, keys: bool = False, chunk: int = 50_000) -> None:
    """Accept `jobs` queued jobs of `projects` projects, each with all three classes, and let the planner know of them.

    Args:
        keys: each project's jobs count against an API key of its.
    """
    if keys:
        with engine.begin() as connection:
            connection.execute(text(_KEYS), {"projects": projects})
    key = ", 'key_project-' || lpad((i % :projects)::text, 4, '0')"
    statement = text(_FILL.format(column=", api_key" if keys else "", value=key if keys else ""))
    for first in range(1, jobs + 1, chunk):
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            values = {"first": first, "last": min(jobs, first + chunk - 1), "jobs": jobs}
            connection.execute(statement, values | {"projects": projects, "model": MODEL})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE jobs"))
        connection.execute(text("VACUUM ANALYZE project_shares"))


def postgres_cpu_seconds(engine: Engine) -> float | None:
    """CPU time that the server has used since it started; None when it runs on another machine."""
    with engine.connect() as connection:
        backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    own = _stat(backend)
    if not own:
        return None
    postmaster = own[1]
    found = [_stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()]
    ticks = sum(int(number) for fields in found if fields[1:2] == [postmaster] for number in fields[11:13])
    # what ended children used is part of the parent's account
    ticks += sum(int(number) for number in _stat(int(postmaster))[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def report(case: str, **figures: Any) -> None:
    """One line of JSON for one case."""
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"case": case, "cores": os.cpu_count()} | rounded), flush=True)
