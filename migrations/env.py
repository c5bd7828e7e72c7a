"""Runs the revisions, one transaction each, one process at a time, never waiting long for a lock."""

import time
from importlib import import_module

from alembic import context
from rushes_core.models import Base
from sqlalchemy import create_engine, pool, text

for part in ("campaigns", "webhooks"):
    import_module(f"rushes_core.{part}.tables")

ADVISORY_LOCK = 7_387_643_741


def run() -> None:
    engine = create_engine(context.config.attributes["database_url"], poolclass=pool.NullPool)
    with engine.connect() as connection:
        # asked for again and again: a statement that waits for the lock would hold up an index that is being built
        while not connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": ADVISORY_LOCK}).scalar_one():
            connection.commit()
            time.sleep(0.1)
        # a lock that is not to be had soon would keep everybody else from the table meanwhile: fail, and be run again
        connection.execute(text("SET lock_timeout = '900ms'"))
        connection.execute(text("SET statement_timeout = '30s'"))
        connection.commit()
        context.configure(connection=connection, target_metadata=Base.metadata, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
        connection.commit()
    engine.dispose()


run()
