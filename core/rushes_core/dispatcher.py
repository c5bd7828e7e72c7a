"""The dispatcher: wakes workers while work is ready and sweeps up after those that died. Any number may run."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from kombu.exceptions import OperationalError as BrokerError
from redis import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.errors import StorageError
from rushes_core.log import get_logger
from rushes_core.queue import MAX_HINTS, HintQueue
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore, job_prefix

log = get_logger(__name__)

SWEEP_SECONDS = 1.0
"""How often dead leases, passed deadlines and deleted jobs are looked for."""


class Dispatcher:
    """One pass each of hinting and sweeping; `run` repeats them."""

    def __init__(self, settings: Settings) -> None:
        self._engine: Engine = create_sync_engine(settings, pool_size=2)
        self._hints = HintQueue(settings)
        self._store = ObjectStore(settings)

    def hint(self) -> int:
        """Keep as many hints in Redis as jobs are ready, up to a bound; returns how many were sent."""
        with Session(self._engine) as session:
            ready = session.execute(jobs.num_ready(limit=MAX_HINTS)).scalar_one()
        return self._hints.top_up(ready) if ready else 0

    def sweep(self) -> None:
        """End dead attempts, expire late jobs, remove the objects of deleted ones, forget silent replicas."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            for job in session.scalars(jobs.reap()):
                log.warning("lease_expired", job_id=job.id, attempt=job.attempt, state=job.state)
            for job in session.scalars(jobs.expire()):
                log.info("job_expired", job_id=job.id)
            session.execute(jobs.forget_stale_replicas())
        self._purge()

    def _purge(self) -> None:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            deleted = session.scalars(jobs.unpurged()).all()
        for job in deleted:
            self._store.delete_prefix(job_prefix(job.project, job.id))
            with self._engine.begin() as connection:
                connection.execute(jobs.mark_purged(job.id))
            log.info("job_purged", job_id=job.id)

    def close(self) -> None:
        self._hints.close()
        self._engine.dispose()


def run(settings: Settings) -> int:
    """Dispatch until SIGTERM or SIGINT. An unreachable server is waited for, not an error."""
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    dispatcher = Dispatcher(settings)
    log.info("dispatcher_started", pool=settings.pool)
    swept_at = float("-inf")
    while not stop.wait(settings.dispatch_seconds):
        _attempt("hint_failed", dispatcher.hint)
        if time.monotonic() - swept_at >= SWEEP_SECONDS:
            swept_at = time.monotonic()
            _attempt("sweep_failed", dispatcher.sweep)
    dispatcher.close()
    log.info("dispatcher_stopped", pool=settings.pool)
    return 0


def _attempt(event: str, action: Callable[[], object]) -> None:
    try:
        action()
    except (DBAPIError, BrokerError, RedisError, StorageError, OSError) as error:
        log.warning(event, error=str(error).splitlines()[0])
