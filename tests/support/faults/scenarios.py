"""The fault matrix: rows by number and name, each a function that breaks a running cluster, or a reason why not."""

from support.faults import campaign_rows, postgres_rows, queue_rows, redis_rows, store_rows, worker_rows
from support.faults.rows import ROWS, NotHere, Row

__all__ = [
    "ROWS",
    "NotHere",
    "Row",
    "campaign_rows",
    "postgres_rows",
    "queue_rows",
    "redis_rows",
    "store_rows",
    "worker_rows",
]
