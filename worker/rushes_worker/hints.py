"""The Celery side of who claims work: its only task wakes the claimer and is over at once."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from rushes_core.log import get_logger
from rushes_core.queue import WAKE_TASK, create_celery
from rushes_core.settings import Settings

log = get_logger(__name__)

POOL = "threads"
"""Never prefork: children forked beside live threads and connections are nobody's friend, and a wake-up needs none."""
_MAX_BACKOFF_SECONDS = 30.0


class HintListener:
    """Consumes a queue's hints in a thread of its own, through every absence of Redis, until the process ends.

    Args:
        replica_id: of who is woken, different from every other's.
        on_hint: called from another thread for every hint.
        queue: None: that of the pool.
    """

    def __init__(
        self, settings: Settings, *, replica_id: str, on_hint: Callable[[], None], queue: str | None = None
    ) -> None:
        self._settings = settings
        self._replica_id = replica_id
        self._queue = queue or settings.gpu_queue
        self._on_hint = on_hint
        # hints hold nothing, so nothing is lost when the process ends with the thread
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        # the first tells of a lost connection with a traceback, the others of every single hint
        logging.getLogger("celery.worker.consumer.consumer").setLevel(logging.ERROR)
        for name in ("celery.worker.strategy", "celery.app.trace"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._thread.start()

    def _run(self) -> None:
        backoff = 1.0
        while True:
            began = time.monotonic()
            try:
                self._consume()
            except Exception:
                log.exception("hints_failed")
            if time.monotonic() - began > _MAX_BACKOFF_SECONDS:
                backoff = 1.0
            log.warning("hints_restarting", seconds=backoff)
            time.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _consume(self) -> None:
        """Consume until Celery gives up, which it says in the log."""
        app = create_celery(self._settings, client_name=f"rushes-{self._replica_id}", queue=self._queue)

        @app.task(name=WAKE_TASK)
        def wake() -> None:
            self._on_hint()

        worker = app.WorkController(
            consumer_cls=_Consumer,
            pool=POOL,
            concurrency=1,
            queues=[self._queue],
            hostname=f"{self._replica_id}@{socket.gethostname()}",
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.start()


class _Consumer(Consumer):
    """Lets go of a connection that it could not use.

    Celery forgets one that fails after it was opened, as each does while Redis is read-only or full, and tries again
    several times a second until the process has no descriptors left.
    """

    def connect(self) -> Any:
        connection = self.connection_for_read(heartbeat=self.amqheartbeat)
        try:
            if self.hub:
                connection.transport.register_with_event_loop(connection.connection, self.hub)
        except BaseException:
            connection.close()
            raise
        return connection
