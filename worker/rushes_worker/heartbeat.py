"""The heartbeat of a replica: renews leases, sees cancels, writes progress and the replica's own row.

One thread with a connection of its own, so that nothing else can hold up a renewal, and so that a slow database holds
up nothing else.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rushes_core import jobs, replicas
from rushes_core.database import create_sync_engine
from rushes_core.impatient import SILENCE_SECONDS
from rushes_core.log import get_logger
from rushes_core.settings import Settings
from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from rushes_worker.lease import Lease

log = get_logger(__name__)

_WATCH_SECONDS = 1.0
"""How often a held job is looked at for a cancel between renewals."""
_RETRY_SECONDS = 0.5


@dataclass
class _Held:
    lease: Lease
    wanted: dict[str, Any] = field(default_factory=dict)
    """Progress to be written; `written` is what the row has."""
    written: dict[str, Any] = field(default_factory=dict)


class Heartbeat:
    """Keeps what a replica holds alive until it is closed.

    Args:
        on_change: called from the heartbeat's thread when a lease was lost, a cancel was seen, or a drain was asked for
            or taken back.
        is_stopping: whether the replica was asked to stop; then its row says so instead of `ready` or `busy`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        replica_id: str,
        replica: dict[str, Any],
        on_change: Callable[[], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._replica_id = replica_id
        self._replica = replica
        self._written_replica: dict[str, Any] | None = None
        self._on_change = on_change
        self._is_stopping = is_stopping
        # what is left of a lease is for another try
        silence = min(SILENCE_SECONDS, settings.lease_seconds / 3)
        self._engine = create_sync_engine(settings, pool_size=1, silence_seconds=silence)
        self._held: dict[int, _Held] = {}
        self._drain_requested = self._drains_itself = False
        self._condition = threading.Condition()
        self._dirty = True
        self._closing = False
        self._reachable = True
        self._beat_at = self._watch_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hold(self, lease: Lease) -> None:
        """Renew `lease` from now on."""
        with self._condition:
            self._held[lease.fence] = _Held(lease)

    def drop(self, lease: Lease) -> None:
        """Let `lease` be: its job has been settled, or given up."""
        with self._condition:
            self._held.pop(lease.fence, None)

    @property
    def fences(self) -> frozenset[int]:
        """Of the leases that are held."""
        with self._condition:
            return frozenset(self._held)

    def report(
        self, lease: Lease, *, phase: str, completed_steps: int, progress: int, started_ahead: bool = False
    ) -> None:
        """Write progress when it differs from what was written, soon; only the latest matters.

        Args:
            started_ahead: the job was started before its turn, which has come: the same in all reports of it.
        """
        with self._condition:
            held = self._held.get(lease.fence)
            if held is not None:
                held.wanted = {
                    "phase": phase,
                    "completed_steps": completed_steps,
                    "progress": progress,
                    "started_ahead": started_ahead,
                }
                self._wake()

    def describe(self, **values: Any) -> None:
        """Change columns of the replica's row."""
        with self._condition:
            self._replica = {**self._replica, **values}
            self._wake()

    @property
    def drain_requested(self) -> bool:
        """Whether the replica is to take no more jobs, by what its row said last."""
        return self._drains_itself or self._drain_requested

    def drain(self) -> None:
        """Ask in the replica's row, where an operator may take it back, that it takes no more jobs."""
        with self._condition:
            self._drains_itself = True
            self._wake()

    def close(self) -> None:
        """Write the replica's row once more and stop."""
        with self._condition:
            self._closing = True
            self._wake()
        # a database that is away must not keep the process from ending
        self._thread.join(self._settings.heartbeat_seconds)
        self._engine.dispose()

    def _wake(self) -> None:
        self._dirty = True
        self._condition.notify()

    def _run(self) -> None:
        try:
            self._beat()
        except Exception:
            # a replica without a heartbeat would lose every job that it claims: start again from the beginning
            log.exception("heartbeat_died")
            os._exit(1)

    def _beat(self) -> None:
        while True:
            with self._condition:
                due = min(self._beat_at, self._watch_at) if self._held else self._beat_at
                self._condition.wait_for(lambda: self._dirty, max(0.0, due - time.monotonic()))
                self._dirty = False
                held, replica, closing = list(self._held.values()), self._replica, self._closing
            try:
                self._pass(held, replica)
            except SQLAlchemyError as error:
                self._unreachable(error)
                if not closing:
                    time.sleep(_RETRY_SECONDS)
                    with self._condition:
                        self._dirty = True
            else:
                if not self._reachable:
                    self._reachable = True
                    log.info("database_reached")
            if closing:
                return

    def _pass(self, held: list[_Held], replica: dict[str, Any]) -> None:
        now = time.monotonic()
        beat = now >= self._beat_at
        watch = now >= self._watch_at
        for one in held:
            if beat:
                self._renew(one.lease)
            elif watch:
                self._watch(one.lease)
            self._write_progress(one)
        if watch:
            self._watch_at = now + _WATCH_SECONDS
        if beat or replica is not self._written_replica or self._drains_itself:
            self._write_replica(replica)
        if beat:
            self._beat_at = now + self._settings.heartbeat_seconds

    def _renew(self, lease: Lease) -> None:
        asked_at = time.monotonic()
        statement = jobs.renew(lease.job_id, fence=lease.fence, lease_seconds=lease.seconds)
        cancel = self._scalar(statement)
        if cancel is None:
            self._lose(lease)
        else:
            lease.renewed(asked_at)
            self._see(lease, cancel)

    def _watch(self, lease: Lease) -> None:
        cancel = self._scalar(jobs.watch(lease.job_id, fence=lease.fence))
        if cancel is None:
            self._lose(lease)
        else:
            self._see(lease, cancel)

    def _write_progress(self, held: _Held) -> None:
        wanted = held.wanted
        if wanted == held.written:
            return
        cancel = self._scalar(jobs.report(held.lease.job_id, fence=held.lease.fence, **wanted))
        held.written = wanted
        # no row: not running any more, which the next renewal will tell
        self._see(held.lease, bool(cancel))

    def _write_replica(self, replica: dict[str, Any]) -> None:
        values = dict(replica)
        if self._is_stopping() and values["state"] != "stopped":
            values["state"] = "stopping"
        drains_itself = self._drains_itself
        statement = replicas.upsert_replica(
            self._replica_id, drain=drains_itself, was_drained=self._drain_requested, **values
        )
        drain_requested = bool(self._scalar(statement))
        self._written_replica = replica
        changed, self._drain_requested = drain_requested is not self._drain_requested, drain_requested
        if drains_itself:
            self._drains_itself = False
        if changed:
            self._on_change()

    def _scalar(self, statement: Executable) -> bool | None:
        with self._engine.begin() as connection:
            value: bool | None = connection.execute(statement).scalar_one_or_none()
        return value

    def _see(self, lease: Lease, cancel: bool) -> None:
        if cancel and not lease.cancel_requested:
            lease.cancel_requested = True
            self._on_change()

    def _lose(self, lease: Lease) -> None:
        with self._condition:
            still_held = lease.fence in self._held
        if still_held and not lease.lost:
            lease.lost = True
            self._on_change()

    def _unreachable(self, error: SQLAlchemyError) -> None:
        if self._reachable:
            self._reachable = False
            log.warning("database_unreachable", error=str(error).splitlines()[0])
