"""A replica's entries in the job table: a transaction each, retried while the lease may still hold."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import psycopg
from psycopg.rows import DictRow
from rushes_core import claims, jobs, measured, replicas
from rushes_core.claims import ClaimedJob
from rushes_core.errors import RushesError
from rushes_core.log import get_logger
from rushes_core.models import Job, Replica
from rushes_core.prepared import Prepared
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from sqlalchemy import Executable, Integer, bindparam, select
from sqlalchemy.orm import load_only
from sqlalchemy.sql.dml import ReturningUpdate

from rushes_worker.connections import UNREACHABLE, Connections
from rushes_worker.lease import Lease
from rushes_worker.storable import storable

log = get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0
_IDLE_KNOWN_SECONDS = 0.05
"""How long an answer to whether another replica is idle is used again, for jobs that take no time."""
_FRESH_HEARTBEATS = 3
"""Heartbeats for which what another replica said of itself is believed."""


class LedgerUnreachable(RushesError):
    """The database did not answer before the lease had run out; what it holds about the attempt is unknown."""

    code = "database_unreachable"


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this replica holds."""

    job: ClaimedJob
    lease: Lease
    is_overdue: bool = False
    """It was claimed because it had waited for too long: nothing overtakes it any more."""


class Along(Protocol):
    """Who decides whether a job is claimed in the transaction that starts another one, and holds it then."""

    def ask(self) -> bool:
        """Whether one is to be claimed: nobody else claims from then on until `tell` is called."""
        ...

    def tell(self, claim: Claim | None) -> None:
        """What was claimed, if anything was."""
        ...


class Ledger:
    """Claims and settles jobs for one replica. One thread at a time claims; any thread settles what it holds."""

    def __init__(self, settings: Settings, *, replica_id: str, model: str) -> None:
        self._connections = Connections(settings)
        self._lease_seconds = float(settings.lease_seconds)
        self._replica_id = replica_id
        self._may_hold_unknown = False
        self._num_claims = 0
        self._along: Along | None = None
        self._other_is_idle = False
        self._idle_asked_at = float("-inf")
        job_id, fence = bindparam("job_id"), bindparam("fence")
        columns = [field.name for field in fields(ClaimedJob)]
        claim: dict[str, Any] = {
            "model": model,
            "owner": replica_id,
            "lease_seconds": self._lease_seconds,
            "only": columns,
        }
        self._claim = Prepared(claims.claim(**claim, may_wait=False))
        self._claim_any = Prepared(claims.claim(**claim))
        self._claim_overdue = Prepared(claims.claim(**claim, patience_seconds=settings.patience_seconds))
        self._more_urgent = Prepared(
            claims.more_urgent(model=model, owner=replica_id, than=bindparam("than", type_=Integer))
        )
        self._start = Prepared(_lean(jobs.start(job_id, fence=fence, lease_seconds=self._lease_seconds)))
        started = jobs.started(job_id, fence=fence, lease_seconds=self._lease_seconds)
        self._start_and_claim = Prepared(claims.claim_along(started, **claim))
        self._complete = Prepared(
            _lean(jobs.complete(job_id, fence=fence, result=bindparam("result"), timings=bindparam("timings")))
        )
        self._idle = Prepared(
            replicas.up(seen_within_seconds=settings.heartbeat_seconds * _FRESH_HEARTBEATS)
            .where(Replica.model == model, Replica.state == "ready", Replica.id != replica_id)
            .limit(1)
        )

    def claim(self, known: Collection[int], *, by_class: bool = False) -> Claim | None:
        """The next job of this model, or None.

        One in `claims.OVERDUE_EVERY` is the one that has waited longest of those that were passed over for too long.

        Args:
            known: fences that this replica holds already.
            by_class: it is none of those.

        Raises:
            one of `UNREACHABLE`: the database is away; a job may have been claimed all the same, which the next call
                gives back.
        """
        if self._may_hold_unknown:
            self._release_unknown(known)
        asked_at = time.monotonic()
        with self._claiming():
            overdue = self._fetch(self._claim_overdue) if self._is_turn_of_overdue and not by_class else None
            row = overdue or self._fetch(self._claim) or self._fetch(self._claim_any)
        if row is None:
            return None
        self._num_claims += not by_class
        return self._claimed(row, asked_at, is_overdue=overdue is not None)

    def more_urgent_waits(self, priority: int) -> bool:
        """Whether a job of a more urgent class could be claimed now."""
        return priority > 0 and self._fetch(self._more_urgent, than=priority) is not None

    def claim_with_starts(self, along: Along) -> None:
        """Have every start claim another job if `along` wants one."""
        self._along = along

    def start(self, lease: Lease) -> bool:
        """CLAIMED -> RUNNING; False if a cancel, the campaign or another holder came first."""
        asked_at = time.monotonic()
        is_started = None
        if self._along is not None and self._along.ask():
            claim = None
            try:
                is_started, claim = self._start_along(lease, asked_at)
            finally:
                self._along.tell(claim)
        if is_started is None:
            is_started = self._settle(lease, self._start, JobState.RUNNING, in_doubt=True) is not None
        if is_started:
            lease.renewed(asked_at)
        return is_started

    def _start_along(self, lease: Lease, asked_at: float) -> tuple[bool | None, Claim | None]:
        """Whether the job was started, None if that is not known, and what was claimed beside it."""
        if self._may_hold_unknown or self._is_turn_of_overdue:
            return None, None
        try:
            with self._claiming():
                row = self._fetch(self._start_and_claim, job_id=lease.job_id, fence=lease.fence)
        except UNREACHABLE as error:
            log.warning("database_unreachable", error=str(error).splitlines()[0])
            return None, None
        assert row is not None
        is_started = row.pop("started") is not None
        if row["id"] is None:
            return is_started, None
        self._num_claims += 1
        return is_started, self._claimed(row, asked_at)

    @contextmanager
    def _claiming(self) -> Iterator[None]:
        """A claim whose reply is lost may have taken a job all the same; one that the database refused has not."""
        self._may_hold_unknown = True
        try:
            yield
        except UNREACHABLE:
            raise
        except psycopg.Error:
            self._may_hold_unknown = False
            raise
        self._may_hold_unknown = False

    @property
    def _is_turn_of_overdue(self) -> bool:
        return self._num_claims % claims.OVERDUE_EVERY == claims.OVERDUE_EVERY - 1

    def _claimed(self, row: DictRow, asked_at: float, *, is_overdue: bool = False) -> Claim:
        job = ClaimedJob(**row)
        lease = Lease(job.id, fence=job.fence, seconds=self._lease_seconds, asked_at=asked_at)
        return Claim(job, lease, is_overdue=is_overdue)

    def complete(self, lease: Lease, *, result: dict[str, Any], timings: dict[str, float]) -> bool:
        """The commit point of the job; False if a cancel or another holder came first."""
        state = self._settle(lease, self._complete, JobState.COMPLETED, result=result, timings=timings)
        return state is not None

    def fail(self, lease: Lease, error: dict[str, Any]) -> JobState | None:
        """End the job for an error that another attempt would meet again; the state that it has then."""
        statement = jobs.fail(lease.job_id, fence=lease.fence, error=_storable(error))
        return self._settle(lease, _once(statement), *FINAL_STATES)

    def out_of_memory(self, lease: Lease, stage: str) -> JobState | None:
        """Give the job one more attempt, with the plan that needs less memory; the state that it has then."""
        statement = jobs.out_of_memory(lease.job_id, fence=lease.fence, stage=stage)
        return self._settle(lease, _once(statement), JobState.QUEUED, *FINAL_STATES)

    def retry_or_fail(self, lease: Lease, error: dict[str, Any], *, crashed: bool) -> JobState | None:
        """Give the job another attempt if it has one left; the state that it has then."""
        statement = jobs.retry_or_fail(lease.job_id, fence=lease.fence, error=_storable(error), crashed=crashed)
        return self._settle(lease, _once(statement), JobState.QUEUED, *FINAL_STATES)

    def confirm_cancel(self, lease: Lease) -> JobState | None:
        """End the job for a cancel that was asked for, or a deadline that has passed, or give it back to its campaign;
        the state that it has then. None if it was for none of them, or is no longer this attempt's."""
        statement = jobs.confirm_cancel(lease.job_id, fence=lease.fence)
        return self._settle(lease, _once(statement), JobState.CANCELLED, JobState.EXPIRED, JobState.QUEUED)

    def release(self, lease: Lease) -> bool:
        """Give the job back without counting anything against it; False if it is no longer this attempt's."""
        statement = jobs.release(lease.job_id, fence=lease.fence)
        return self._settle(lease, _once(statement), JobState.QUEUED, JobState.CANCELLED) is not None

    def try_release(self, lease: Lease) -> bool:
        """`release`, tried once: while the database is away the lease simply runs out."""
        try:
            return self._fetch(_once(jobs.release(lease.job_id, fence=lease.fence))) is not None
        except UNREACHABLE:
            return False

    def measured_phases(self, job: ClaimedJob) -> dict[str, float] | None:
        """Mean seconds per phase of the clips of this job's shape, if any was measured and the database answers."""
        shape = measured.measured_shape(job.model, width=job.width, height=job.height, num_frames=job.num_frames)
        try:
            row = self._fetch(Prepared(shape, keep=False))
        except UNREACHABLE:
            return None
        return None if row is None else row["phases"]

    def other_is_idle(self) -> bool:
        """Whether another replica of this model waits for work, by what it said lately."""
        now = time.monotonic()
        if now - self._idle_asked_at > _IDLE_KNOWN_SECONDS:
            self._other_is_idle = self._fetch(self._idle) is not None
            self._idle_asked_at = now
        return self._other_is_idle

    def close(self) -> None:
        self._connections.close()

    def _settle(
        self, lease: Lease, transition: Prepared, *targets: JobState, in_doubt: bool = False, **values: Any
    ) -> JobState | None:
        """Run a transition until its effect is known; the state it led to, or None if another transition came first.

        A reply that was lost is resolved by reading: a row with this fence in one of `targets` is this attempt's doing.

        Args:
            in_doubt: it may have been tried before.

        Raises:
            LedgerUnreachable: the lease ran out before the database answered.
        """
        is_told = False
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                row = self._fetch(transition, job_id=lease.job_id, fence=lease.fence, **values)
                if row is None and in_doubt:
                    own = (Job.id == lease.job_id, Job.fence == lease.fence, Job.state.in_(targets))
                    row = self._fetch(Prepared(select(Job.state).where(*own), keep=False))
                return None if row is None else JobState(row["state"])
            except UNREACHABLE as error:
                reason = str(error).splitlines()[0]
                if lease.has_run_out:
                    raise LedgerUnreachable(f"the lease ran out while the database was away: {reason}") from error
                if not is_told:
                    log.warning("database_unreachable", error=reason)
            in_doubt = is_told = True
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    def _fetch(self, statement: Prepared, **values: Any) -> DictRow | None:
        """The row that a statement returns, if it does; it is committed by then."""
        with self._connections.lend() as session:
            rows = statement.execute(session, **values)
        return rows[0] if rows else None

    def _release_unknown(self, known: Collection[int]) -> None:
        """Give back what a claim took whose reply never came."""
        statement = _once(jobs.release_unknown(owner=self._replica_id, fences=known))
        with self._connections.lend() as session:
            for row in statement.execute(session):
                log.warning("job_released", job_id=row["id"], reason="the reply to its claim was lost")


def _lean(transition: ReturningUpdate[Job]) -> Executable:
    """The transition, of whose row nothing comes back that nobody reads."""
    return transition.options(load_only(Job.state))


def _once(transition: ReturningUpdate[Job]) -> Prepared:
    return Prepared(_lean(transition), keep=False)


def _storable(error: dict[str, Any]) -> dict[str, Any]:
    """`error` whose texts, which a pipeline may have made of anything, have no character that Postgres refuses."""
    return {name: storable(value) if isinstance(value, str) else value for name, value in error.items()}
