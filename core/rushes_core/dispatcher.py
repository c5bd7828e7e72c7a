"""The dispatcher: wakes who has work, opens jobs, settles shares, and runs the sweeper. Any number may run."""

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import FrameType
from typing import Any

from kombu.exceptions import OperationalError as BrokerError
from redis import RedisError
from sqlalchemy import Boolean, Engine, Executable, column, exists, or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rushes_core import backlog, beats, ends, holds, measured, shares
from rushes_core.campaigns import closing, feeding, loading
from rushes_core.campaigns import events as campaign_events
from rushes_core.campaigns.feeding import Feeder
from rushes_core.campaigns.foresight import FORESEE_SECONDS, Foresight
from rushes_core.database import EACH_ALONE, create_sync_engine
from rushes_core.errors import StorageError
from rushes_core.log import get_logger
from rushes_core.queue import CAMPAIGN_QUEUE, MAX_HINTS, WEBHOOK_QUEUE, HintQueue
from rushes_core.settings import Settings
from rushes_core.sweeper import Sweeper
from rushes_core.webhooks import deliveries

log = get_logger(__name__)

SWEEP_SECONDS = 1.0
"""How often dead leases, passed deadlines and deleted jobs are looked for."""
UNSEEN_SECONDS = 1.0
"""How often is done what nobody knows whether it is to be done."""
PROGRESS_SECONDS = 5.0
"""How often campaigns are looked at for progress that is to be told."""
TIDY_SECONDS = 60.0
"""How often retention and other leftovers are looked for."""
PURGE_AGAIN_SECONDS = 600.0
"""How often deleted jobs are looked at again for objects that came late."""
ORPHAN_SECONDS = 3_600.0
"""How often the whole store is listed for orphans."""
_STOP_SECONDS = 5.0


class Dispatcher:
    """One pass each of what keeps jobs moving; `run` repeats them."""

    def __init__(self, settings: Settings) -> None:
        self._engine: Engine = create_sync_engine(settings, pool_size=4)
        self._each_alone = self._engine.execution_options(**EACH_ALONE)
        self._hints = HintQueue(settings)
        self._webhook_hints = HintQueue(settings, queue=WEBHOOK_QUEUE)
        self._campaign_hints = HintQueue(settings, queue=CAMPAIGN_QUEUE)
        self._feeder = Feeder(
            self._engine, seen_within_seconds=settings.lease_seconds, patience_seconds=settings.patience_seconds
        )
        self._foresight = Foresight(self._engine, seen_within_seconds=settings.lease_seconds)
        # made once: SQLAlchemy takes many times longer to build them than to have them run
        self._num_ready = backlog.num_ready(pool=settings.pool, limit=MAX_HINTS)
        self._has_campaign_work = select(
            or_(loading.is_any_to_load().scalar_subquery(), closing.is_any_to_end().scalar_subquery())
        )
        self._glance = select(
            exists(select(holds.keys_to_open().subquery())).label("holds"),
            feeding.is_any_fed().scalar_subquery().label("feed"),
            (self._num_ready.scalar_subquery() > 0).label("hint"),
            deliveries.is_any_due().columns(column("is_due", Boolean)).scalar_subquery().label("webhook_hint"),
            self._has_campaign_work.scalar_subquery().label("campaign_hint"),
        )
        self._beat_from = float("-inf")
        self._settle_shares = (shares.forgive_lag(), shares.bound_lag(seen_within_seconds=settings.lease_seconds))

    def glance(self) -> frozenset[str]:
        """Which of the passes that are repeated every moment have something to do, by their names in `run`.

        All of them are asked about at once: mostly there is nothing, and to find that out five times is what an idle
        dispatcher would spend its time on.
        """
        with self._each_alone.connect() as connection:
            found = connection.execute(self._glance).one()._mapping  # pyright: ignore[reportPrivateUsage]
        return frozenset(name for name, is_due in found.items() if is_due)

    def hint(self) -> int:
        """Keep as many hints in Redis as jobs are ready, up to a bound; returns how many were sent."""
        ready: int = self._answer(self._num_ready)
        return self._hints.top_up(ready) if ready else 0

    def hint_webhooks(self) -> int:
        """Wake a process that delivers webhooks while a delivery is due; returns how many hints were sent."""
        return self._webhook_hints.top_up(1) if self._answer(deliveries.is_any_due()) else 0

    def hint_campaigns(self) -> int:
        """Wake a process that loads and ends campaigns while there is one to work on; returns how many were sent."""
        return self._campaign_hints.top_up(1) if self._answer(self._has_campaign_work) else 0

    def open_holds(self) -> None:
        """Let held jobs of keys with room become claimable, and hold those that are too many after a limit changed."""
        with self._each_alone.connect() as connection:
            for key in connection.scalars(holds.keys_to_open()).all():
                while connection.execute(holds.open_holds(key)).scalar_one() >= holds.CHANGED_AT_ONCE:
                    pass

    def tell_progress(self) -> None:
        """Write events of campaigns that are further than they were when somebody was told last."""
        with self._engine.begin() as connection:
            connection.execute(campaign_events.tell_progress())

    def feed(self) -> None:
        """Open jobs of campaigns as they are needed, and close what is not to start any more."""
        self._feeder.feed()

    def foresee(self) -> None:
        """Bring the forecasts of campaigns up to date."""
        self._foresight.look()

    def settle_shares(self) -> None:
        """Keep what projects are owed to those whose work waits."""
        for statement in self._settle_shares:
            with self._engine.begin() as connection:
                connection.execute(statement)

    def measure(self) -> None:
        """Write what the phases of clips took lately."""
        with self._engine.begin() as connection:
            connection.execute(measured.measure())

    def count_ends(self) -> None:
        """Add how jobs ended lately to the counts."""
        num_counted = ends.MAX_AT_ONCE
        while num_counted >= ends.MAX_AT_ONCE:
            num_counted = self._answer(ends.count())

    def beat(self) -> None:
        """Say that this dispatcher works, unless it just did."""
        if time.monotonic() >= self._beat_from:
            with self._each_alone.connect() as connection:
                connection.execute(beats.beat(beats.DISPATCHER))
            self._beat_from = time.monotonic() + beats.BEAT_SECONDS

    def _answer(self, question: Executable) -> Any:
        with self._each_alone.connect() as connection:
            return connection.execute(question).scalar_one()

    def close(self) -> None:
        self._hints.close()
        self._webhook_hints.close()
        self._campaign_hints.close()
        self._engine.dispose()


def run(settings: Settings) -> int:
    """Dispatch and sweep until SIGTERM or SIGINT. An unreachable server is waited for, not an error."""
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    dispatcher, sweeper = Dispatcher(settings), Sweeper(settings)
    called: dict[str, Callable[[], object]] = {
        "holds": dispatcher.open_holds,
        "feed": dispatcher.feed,
        "hint": dispatcher.hint,
        "webhook_hint": dispatcher.hint_webhooks,
        "campaign_hint": dispatcher.hint_campaigns,
    }
    calls = Calls(dispatcher.glance, called)

    def sweep() -> None:
        # what nothing and nobody else does: a dispatcher that cannot end dead attempts is as good as none
        if sweeper.sweep():
            dispatcher.beat()

    repeated: list[tuple[str, float, Callable[[], object]]] = [
        ("glance", settings.dispatch_seconds, calls.look),
        ("shares", shares.SETTLE_SECONDS, dispatcher.settle_shares),
        ("sweep", SWEEP_SECONDS, sweep),
        ("purge", SWEEP_SECONDS, sweeper.purge),
        ("progress", PROGRESS_SECONDS, dispatcher.tell_progress),
        ("measure", measured.MEASURE_SECONDS, dispatcher.measure),
        ("count_ends", ends.COUNT_SECONDS, dispatcher.count_ends),
        ("foresee", FORESEE_SECONDS, dispatcher.foresee),
        ("tidy", TIDY_SECONDS, sweeper.tidy),
        ("purge_again", PURGE_AGAIN_SECONDS, sweeper.purge_again),
    ]
    if settings.sweep_orphans:
        repeated.append(("orphans", ORPHAN_SECONDS, lambda: list(sweeper.orphans(delete=True))))
    waits = [(name, partial(stop.wait, seconds), action) for name, seconds, action in repeated]
    waits += [(name, partial(calls.wait, name), action) for name, action in called.items()]
    # a thread each: a store that hangs must not hold up what only Postgres is needed for
    threads = [threading.Thread(target=_repeat, args=(stop, *each), name=each[0], daemon=True) for each in waits]
    log.info("dispatcher_started", pool=settings.pool)
    for thread in threads:
        thread.start()
    stop.wait()
    calls.end()
    for thread in threads:
        thread.join(_STOP_SECONDS)
    dispatcher.close()
    sweeper.close()
    log.info("dispatcher_stopped", pool=settings.pool)
    return 0


class Calls:
    """Calls those who mostly have nothing to do when there is something.

    Args:
        glance: who has something to do. While it fails, or does not end, all are called once in `UNSEEN_SECONDS`: what
            holds it up need not hold up each of them.
    """

    def __init__(self, glance: Callable[[], Collection[str]], names: Iterable[str]) -> None:
        self._glance = glance
        self._called = {name: threading.Event() for name in names}
        self._found: Collection[str] = ()
        self._seen_at = float("-inf")

    def look(self) -> None:
        """Call whoever has something to do, and once more who had until now."""
        found = self._glance()
        for name in {*found, *self._found}:
            self._called[name].set()
        self._found = found
        self._seen_at = time.monotonic()

    def wait(self, name: str) -> bool:
        """True when `name` is called, or at the end; False when nobody knows whether it should be."""
        called = self._called[name]
        while not called.wait(UNSEEN_SECONDS):
            if time.monotonic() - self._seen_at >= UNSEEN_SECONDS:
                return False
        called.clear()
        return True

    def end(self) -> None:
        """Call everybody: nobody is to wait any longer."""
        for called in self._called.values():
            called.set()


def _repeat(stop: threading.Event, name: str, wait: Callable[[], object], action: Callable[[], object]) -> None:
    failing = False
    while True:
        wait()
        if stop.is_set():
            return
        try:
            action()
        except (DBAPIError, PoolTimeout, BrokerError, RedisError, StorageError, OSError) as error:
            # once for an outage, which may be hours of passes
            if not failing:
                log.warning(f"{name}_failed", error=str(error).splitlines()[0])
            failing = True
        except Exception:
            # a bug met once must not end what keeps every other job going
            log.exception(f"{name}_failed")
        else:
            if failing:
                log.info(f"{name}_recovered")
            failing = False
