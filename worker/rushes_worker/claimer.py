"""Claims one job ahead of the ranks, so that they need not wait for the database between two jobs."""

import multiprocessing.connection
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from rushes_core.log import get_logger
from rushes_core.settings import Settings
from rushes_core.states import JobState
from structlog.contextvars import bind_contextvars

from rushes_worker.connections import UNREACHABLE
from rushes_worker.heartbeat import Heartbeat
from rushes_worker.ledger import Claim, Ledger, LedgerUnreachable
from rushes_worker.stopping import Stopping
from rushes_worker.wake import Wake

log = get_logger(__name__)

_JITTER = 0.25
_TICK_SECONDS = 0.5


def log_stopped(state: JobState, **fields: Any) -> None:
    """Log that a job was not to go on, by what became of it."""
    if state is JobState.QUEUED:
        log.info("job_released", reason="its campaign wants it back", **fields)
    else:
        log.info("job_cancelled", **fields)


class Claimer:
    """A thread that holds at most one job that nobody has taken yet. Implements `ledger.Along`.

    A held job's lease is renewed like every other; it is started when it is taken, and the next one is claimed in the
    transaction that starts it. While this replica is busy, a job is claimed ahead only if no other replica is idle,
    which would start it at once. A held job is given back, with nothing counted, when the replica stops, drains or has
    no ranks, and when a more urgent one takes its place.

    Args:
        has_room: whether one more job may be held, told whether the one taken last is still on the ranks; asked before
            every claim, from the thread.
        on_claim: called from the thread when there is a job to take.
        wake: poked when a lease, the room, or whether the replica goes on has changed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ledger: Ledger,
        heartbeat: Heartbeat,
        stopping: Stopping,
        has_room: Callable[[bool], bool],
        on_claim: Callable[[], None],
        wake: Wake,
        replica_id: str,
    ) -> None:
        self._poll_seconds = settings.poll_seconds
        self._ledger = ledger
        self._heartbeat = heartbeat
        self._stopping = stopping
        self._has_room = has_room
        self._on_claim = on_claim
        self._replica_id = replica_id
        self._wake = wake
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        """Held by who claims."""
        self._claim: Claim | None = None
        self._foremost: Claim | None = None
        self._is_asked = False
        self._open = False
        self._busy = False
        self._due = True
        self._closing = False
        self._reachable = True
        self._thread = threading.Thread(target=self._run, name="claimer", daemon=True)
        ledger.claim_with_starts(self)

    def start(self) -> None:
        self._thread.start()

    def open(self) -> None:
        """There are ranks to claim for."""
        self._open, self._busy = True, False
        self.hint()

    def shut(self) -> None:
        """There are none: give back what nobody has taken."""
        self._open = False
        self._wake.poke()

    def take(self) -> Claim | None:
        """The held job, if there is one, to be started at once; the ranks are done with the one taken before."""
        with self._lock:
            claim, self._claim = self._claim, None
            was_busy, self._busy = self._busy, claim is not None
        if claim is not None:
            # its start looks for the next
            self._due = True
        elif was_busy:
            self.hint()
        return claim

    def take_ahead(self) -> Claim | None:
        """The held job, if there is one that may be started while another is on the ranks: not after a lost attempt,
        and not before the thread has looked once more whether a more urgent one is to go first. `on_claim` is called
        when it has: ask again then."""
        with self._lock:
            claim = self._claim
            if claim is None or claim.job.attempt > 1:
                return None
            is_foremost = claim is self._foremost
            if is_foremost:
                self._claim = self._foremost = None
        if not is_foremost:
            self._is_asked = True
            self._wake.poke()
            return None
        self._due = True
        return claim

    def ask(self) -> bool:
        if self._claiming.acquire(blocking=False):
            try:
                if self._may_claim() and not (self._busy and self._ledger.other_is_idle()):
                    return True
            except UNREACHABLE:
                log.debug("claim_failed", reason="whether another replica is idle is not known")
            self._claiming.release()
        self.hint()
        return False

    def tell(self, claim: Claim | None) -> None:
        try:
            if claim is not None:
                self._hold(claim)
        finally:
            self._claiming.release()
        if claim is None:
            self.hint()

    def hint(self) -> None:
        """There may be work."""
        self._due = True
        self._wake.poke()

    def close(self) -> None:
        """Give back what nobody has taken, and end."""
        self._closing = True
        self._wake.poke()
        self._thread.join()

    def _run(self) -> None:
        bind_contextvars(replica=self._replica_id)
        try:
            self._serve()
        except Exception:
            # a replica that claims nothing would wait for good: start again from the beginning
            log.exception("claimer_died")
            os._exit(1)

    def _serve(self) -> None:
        next_poll = next_look = 0.0
        while True:
            self._wake.clear()
            closing = self._closing
            self._look_after_held()
            if closing:
                return
            if self._is_asked or time.monotonic() >= next_look:
                next_look = time.monotonic() + _TICK_SECONDS
                self._look_for_more_urgent()
            if self._may_claim() and (self._due or time.monotonic() >= next_poll):
                self._due = False
                self._try_claim()
                next_poll = time.monotonic() + self._poll_seconds * random.uniform(1 - _JITTER, 1 + _JITTER)
                continue
            seconds = _TICK_SECONDS
            if self._may_claim():
                seconds = min(seconds, max(0.0, next_poll - time.monotonic()))
            multiprocessing.connection.wait([self._wake.fileno()], seconds)

    @property
    def _serving(self) -> bool:
        return self._open and not (self._closing or self._stopping.requested or self._heartbeat.drain_requested)

    def _may_claim(self) -> bool:
        with self._lock:
            is_held, busy = self._claim is not None, self._busy
        return not is_held and self._serving and self._has_room(busy)

    def _try_claim(self) -> None:
        with self._claiming:
            # a start may have claimed one meanwhile
            if not self._may_claim():
                return
            try:
                if self._busy and self._ledger.other_is_idle():
                    return
                claim = self._ledger.claim(self._heartbeat.fences)
            except UNREACHABLE as error:
                if self._reachable:
                    log.warning("claim_failed", error=str(error).splitlines()[0])
                self._reachable = False
                return
            self._reachable = True
            if claim is not None:
                self._hold(claim)

    def _hold(self, claim: Claim) -> None:
        self._heartbeat.hold(claim.lease)
        with self._lock:
            self._claim = claim
        self._on_claim()

    def _look_for_more_urgent(self) -> None:
        """Hold the job that is to be next now, and say so if that was asked."""
        was_asked, self._is_asked = self._is_asked, False
        knows = self._overtake()
        with self._lock:
            # what nobody took meanwhile is looked at again
            self._foremost = self._claim if was_asked and knows else None
            is_told = self._foremost is not None
        if is_told:
            self._on_claim()

    def _overtake(self) -> bool:
        """Hold something more urgent instead of what is held, if there is such a job. False: the database is away."""
        with self._lock:
            held = self._claim
        if held is None or held.is_overdue or not self._serving:
            return True
        try:
            if not self._ledger.more_urgent_waits(held.job.priority):
                return True
            with self._claiming:
                claim = self._ledger.claim(self._heartbeat.fences, by_class=True)
        except UNREACHABLE as error:
            log.debug("claim_failed", error=str(error).splitlines()[0])
            return False
        if claim is None:
            return True
        self._heartbeat.hold(claim.lease)
        given_back: Claim | None = claim
        with self._lock:
            # the ranks may have taken the other one meanwhile: then this is the next
            if self._claim is None or claim.job.priority < held.job.priority:
                self._claim, given_back = claim, self._claim
        self._on_claim()
        if given_back is not None:
            if self._ledger.try_release(given_back.lease):
                log.info("job_released", job_id=given_back.job.id, reason="another one is more urgent")
            self._heartbeat.drop(given_back.lease)
        return True

    def _look_after_held(self) -> None:
        """Let go of a held job that is not to be run here any more."""
        with self._lock:
            claim = self._claim
            if claim is None or not (claim.lease.cancel_requested or claim.lease.is_over or not self._serving):
                return
            self._claim = None
        lease = claim.lease
        fields = {"job_id": claim.job.id, "attempt": claim.job.attempt}
        try:
            if lease.is_over:
                log.warning("lease_lost", reason="before the job was started", **fields)
            elif lease.cancel_requested and (state := self._ledger.confirm_cancel(lease)):
                log_stopped(state, **fields)
            elif self._ledger.try_release(lease):
                log.info("job_released", reason="it was not started", **fields)
        except LedgerUnreachable as error:
            log.warning("lease_lost", reason=str(error), **fields)
        finally:
            self._heartbeat.drop(lease)
