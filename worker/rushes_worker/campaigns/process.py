"""`rushes loader`: a CPU worker of Celery that works on campaigns when it is woken, and looks by itself otherwise.

Loading has a thread of its own: however long a file is, no other campaign waits for its end because of it.
"""

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from rushes_core import beats
from rushes_core.campaigns.loading import STATEMENT_SECONDS
from rushes_core.database import create_sync_engine
from rushes_core.log import get_logger
from rushes_core.queue import CAMPAIGN_QUEUE
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rushes_worker.campaigns.ender import Ender
from rushes_worker.campaigns.loader import Loader
from rushes_worker.hints import HintListener

log = get_logger(__name__)

POLL_SECONDS = 1.0
_OUTAGE_SECONDS = 1.0
_STOP_SECONDS = 60.0


def run(settings: Settings) -> int:
    """Work until SIGTERM or SIGINT. An unreachable server is waited for, not an error.

    Raises:
        CheckpointError: the checkpoint that lines are checked against cannot be served.
    """
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    model = ServedModel.load(settings)
    engine = create_sync_engine(settings, silence_seconds=STATEMENT_SECONDS + 10)
    owner = f"loader-{socket.gethostname()}-{os.getpid()}"
    loader = Loader(settings, model, engine, owner=owner)
    ender = Ender(settings, model, engine, owner=owner)
    working = [Lane("load", loader.turn), Lane("end", ender.turn)]

    def beat() -> bool:
        with engine.begin() as connection:
            connection.execute(beats.beat(beats.LOADER))
        return False

    # beside them: one file may take many minutes
    lanes = [*working, Lane("beat", beat, poll_seconds=beats.BEAT_SECONDS)]

    def on_hint() -> None:
        for lane in working:
            lane.wake()

    HintListener(settings, replica_id=owner, on_hint=on_hint, queue=CAMPAIGN_QUEUE).start()
    # millions of short-lived objects pass through: what stays is not to be looked through for each of them
    gc.collect()
    gc.freeze()
    for lane in lanes:
        lane.start()
    log.info("loader_started", owner=owner)
    stop.wait()
    loader.stop()
    ender.stop()
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        lane.join(_STOP_SECONDS)
    engine.dispose()
    log.info("loader_stopped", owner=owner)
    return 0


class Lane(threading.Thread):
    """Repeats `turn` while it finds work, and waits otherwise."""

    def __init__(self, name: str, turn: Callable[[], bool], *, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(name=name, daemon=True)
        self._turn = turn
        self._poll_seconds = poll_seconds
        self._wake = threading.Event()
        self._stopping = False

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    def stop(self) -> None:
        """End after this turn."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        failing = False
        while not self._stopping:
            self._wake.clear()
            try:
                has_worked = self._turn()
            except (DBAPIError, PoolTimeout, OSError) as error:
                # once for an outage, which may be hours of turns
                if not failing:
                    log.warning(f"campaign_{self.name}_failed", error=str(error).splitlines()[0])
                failing = True
                self._wake.wait(_OUTAGE_SECONDS)
                continue
            except Exception:
                # a bug met with one campaign must not end what the others wait for
                log.exception(f"campaign_{self.name}_failed")
                self._wake.wait(_OUTAGE_SECONDS)
                continue
            if failing:
                log.info(f"campaign_{self.name}_recovered")
            failing = False
            if not has_worked and not self._stopping:
                self._wake.wait(self._poll_seconds)
