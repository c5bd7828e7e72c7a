"""Whether the database's schema is one that this release works with."""

import re
from functools import cache

from psycopg.errors import UndefinedTable
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from rushes_core.campaigns.tables import ACTIVE_STATES
from rushes_core.database import create_sync_engine, migrations
from rushes_core.errors import SchemaMismatch
from rushes_core.log import get_logger
from rushes_core.settings import Settings

log = get_logger(__name__)

CURRENT_REVISION = text("SELECT version_num FROM alembic_version")

# by the clock, in microseconds: no deployment claims as many jobs
_NOW = "(SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint AS fence) AS now"
_MOVE_ON = (
    f"SELECT setval('job_fence_seq', now.fence) FROM job_fence_seq, {_NOW} WHERE last_value < now.fence",
    f"SELECT setval('webhook_fence', now.fence) FROM webhook_fence, {_NOW} WHERE last_value < now.fence",
    # whoever works on one goes on; a database that somebody worked on within seconds lost no lease of others
    f"UPDATE campaigns SET fence = now.fence FROM {_NOW} WHERE campaigns.fence < now.fence AND id IN (SELECT id FROM "
    f"campaigns WHERE state = ANY (:active) AND (lease_owner IS NULL OR lease_until IS NULL OR lease_until <= now()) "
    f"FOR NO KEY UPDATE SKIP LOCKED)",
)

_REVISION = re.compile(r'^(revision|down_revision) = "([0-9a-f]+)"$', re.MULTILINE)


@cache
def known_revisions() -> tuple[str, frozenset[str]]:
    """The revision that this release needs, and all that lead to it: read from their files, Alembic is not loaded."""
    named = [dict(_REVISION.findall(path.read_text())) for path in (migrations() / "versions").glob("*.py")]
    known = frozenset(one["revision"] for one in named)
    (head,) = known - {one.get("down_revision") for one in named}
    return head, known


def is_newer(found: str | None) -> bool:
    """Whether revision `found` is of a later release, whose schema serves this one too."""
    return found is not None and found not in known_revisions()[1]


def mismatch(found: str | None) -> str | None:
    """What is wrong with a schema at revision `found`, None for one that was never migrated; None: nothing."""
    head, _ = known_revisions()
    if found == head or is_newer(found):
        return None
    where = "was never migrated" if found is None else f"is at revision {found} of an earlier release"
    return f"the database's schema {where}, needed is {head}: run `rushes migrate`"


def current_revision(settings: Settings) -> str | None:
    """The revision that the database's schema is at; None: it was never migrated.

    Raises:
        DBAPIError: the database cannot be asked.
    """
    engine = create_sync_engine(settings, pool_size=1)
    try:
        with engine.connect() as connection:
            found: str | None = connection.execute(CURRENT_REVISION).scalar_one_or_none()
            return found
    except ProgrammingError as error:
        if isinstance(error.orig, UndefinedTable):
            return None
        raise
    finally:
        engine.dispose()


def check_schema(settings: Settings) -> None:
    """Look at the schema before anything is started on it. A database that is away comes back by itself.

    Raises:
        SchemaMismatch: it was never migrated, or not to what this release needs.
    """
    try:
        found = current_revision(settings)
    except DBAPIError as error:
        log.warning("database_unreachable", error=str(error.orig).splitlines()[0])
        return
    if problem := mismatch(found):
        raise SchemaMismatch(problem)
    if is_newer(found):
        # or of something else that has revisions
        log.warning("schema_is_newer", revision=found, known=known_revisions()[0])


def move_fences_on(settings: Settings) -> None:
    """Have every fence from now on be another than all that were given before, also by what this database was before it
    was restored from a backup: what holds one of those may still run, and clips lie in the store under them.

    Raises:
        DBAPIError: the database cannot be asked.
    """
    engine = create_sync_engine(settings, pool_size=1)
    try:
        with engine.begin() as connection:
            for statement in _MOVE_ON:
                connection.execute(text(statement), {"active": list(ACTIVE_STATES)})
    finally:
        engine.dispose()
