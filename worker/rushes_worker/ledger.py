"""A replica's entries in the job table: short transactions, retried while the lease may still hold."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rushes_core import jobs, measured, replicas
from rushes_core.database import create_sync_engine
from rushes_core.errors import RushesError
from rushes_core.log import get_logger
from rushes_core.models import Job, Replica
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from sqlalchemy import select
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate
from sqlalchemy.sql.selectable import TypedReturnsRows

from rushes_worker.lease import Lease

log = get_logger(__name__)

UNREACHABLE = (OperationalError, InterfaceError, InternalError, TimeoutError)
"""Errors of a database that is away, restarting, failing over (read-only) or too slow."""

_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0
_NUM_CONNECTIONS = 3


class LedgerUnreachable(RushesError):
    """The database did not answer before the lease had run out; what it holds about the attempt is unknown."""

    code = "database_unreachable"


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this replica holds."""

    job: Job
    lease: Lease


class Ledger:
    """Claims and settles jobs for one replica. One thread claims; any thread settles what it holds."""

    def __init__(self, settings: Settings, *, replica_id: str, model: str) -> None:
        self._engine = create_sync_engine(settings, pool_size=_NUM_CONNECTIONS)
        self._lease_seconds = float(settings.lease_seconds)
        self._replica_id = replica_id
        self._model = model
        self._may_hold_unknown = False

    def claim(self, known: Collection[int]) -> Claim | None:
        """The next job of this model, or None.

        Args:
            known: fences that this replica holds already.

        Raises:
            one of `UNREACHABLE`: the database is away; a job may have been claimed all the same, which the next call
                gives back.
        """
        if self._may_hold_unknown:
            self._release_unknown(known)
        self._may_hold_unknown = True
        asked_at = time.monotonic()
        job = self._execute(jobs.claim(model=self._model, owner=self._replica_id, lease_seconds=self._lease_seconds))
        self._may_hold_unknown = False
        if job is None:
            return None
        assert job.fence is not None
        return Claim(job, Lease(job.id, fence=job.fence, seconds=self._lease_seconds, asked_at=asked_at))

    def start(self, lease: Lease) -> bool:
        """CLAIMED -> RUNNING; False if a cancel or another holder came first."""
        asked_at = time.monotonic()
        statement = jobs.start(lease.job_id, fence=lease.fence, lease_seconds=lease.seconds)
        if self._settle(lease, statement, JobState.RUNNING) is None:
            return False
        lease.renewed(asked_at)
        return True

    def complete(self, lease: Lease, *, result: dict[str, Any], timings: dict[str, float]) -> bool:
        """The commit point of the job; False if a cancel or another holder came first."""
        statement = jobs.complete(lease.job_id, fence=lease.fence, result=result, timings=timings)
        return self._settle(lease, statement, JobState.COMPLETED) is not None

    def fail(self, lease: Lease, error: dict[str, Any]) -> JobState | None:
        """End the job for an error that another attempt would meet again; the state that it has then."""
        return _state(self._settle(lease, jobs.fail(lease.job_id, fence=lease.fence, error=error), *FINAL_STATES))

    def out_of_memory(self, lease: Lease, stage: str) -> JobState | None:
        """Give the job one more attempt, with the plan that needs less memory; the state that it has then."""
        statement = jobs.out_of_memory(lease.job_id, fence=lease.fence, stage=stage)
        return _state(self._settle(lease, statement, JobState.QUEUED, *FINAL_STATES))

    def retry_or_fail(self, lease: Lease, error: dict[str, Any], *, crashed: bool) -> JobState | None:
        """Give the job another attempt if it has one left; the state that it has then."""
        statement = jobs.retry_or_fail(lease.job_id, fence=lease.fence, error=error, crashed=crashed)
        return _state(self._settle(lease, statement, JobState.QUEUED, *FINAL_STATES))

    def confirm_cancel(self, lease: Lease) -> bool:
        """End the job for a cancel that was asked for, or a deadline that has passed; False if it was for neither, or
        is no longer this attempt's."""
        statement = jobs.confirm_cancel(lease.job_id, fence=lease.fence)
        return self._settle(lease, statement, JobState.CANCELLED, JobState.EXPIRED) is not None

    def release(self, lease: Lease) -> bool:
        """Give the job back without counting anything against it; False if it is no longer this attempt's."""
        statement = jobs.release(lease.job_id, fence=lease.fence)
        return self._settle(lease, statement, JobState.QUEUED, JobState.CANCELLED) is not None

    def try_release(self, lease: Lease) -> bool:
        """`release`, tried once: while the database is away the lease simply runs out."""
        try:
            return self._execute(jobs.release(lease.job_id, fence=lease.fence)) is not None
        except UNREACHABLE:
            return False

    def measured_phases(self, job: Job) -> dict[str, float] | None:
        """Mean seconds per phase of the clips of this job's shape, if any was measured and the database answers."""
        shape = measured.measured_shape(job.model, width=job.width, height=job.height, num_frames=job.num_frames)
        try:
            with Session(self._engine) as session, session.begin():
                found = session.scalars(shape).one_or_none()
                return None if found is None else found.phases
        except UNREACHABLE:
            return None

    def close(self) -> None:
        self._engine.dispose()

    def _settle(self, lease: Lease, statement: ReturningUpdate[Job], *targets: JobState) -> Job | None:
        """Run a transition until its effect is known; the row, or None if another transition came first.

        A reply that was lost is resolved by reading: a row with this fence in one of `targets` is this attempt's doing.

        Raises:
            LedgerUnreachable: the lease ran out before the database answered.
        """
        in_doubt = False
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                job = self._execute(statement)
                if job is None and in_doubt:
                    job = self._execute(
                        select(Job).where(Job.id == lease.job_id, Job.fence == lease.fence, Job.state.in_(targets))
                    )
                return job
            except UNREACHABLE as error:
                reason = str(error).splitlines()[0]
                if lease.has_run_out:
                    raise LedgerUnreachable(f"the lease ran out while the database was away: {reason}") from error
                if not in_doubt:
                    log.warning("database_unreachable", error=reason)
            in_doubt = True
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    def _execute(self, statement: TypedReturnsRows[Job]) -> Job | None:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            return session.scalars(statement).one_or_none()

    def other_is_idle(self, *, seen_within_seconds: float) -> bool:
        """Whether another replica of this model waits for work, by what it said within `seen_within_seconds`."""
        live = replicas.live_replicas(seen_within_seconds=seen_within_seconds)
        idle = live.where(Replica.model == self._model, Replica.state == "ready", Replica.id != self._replica_id)
        with Session(self._engine) as session, session.begin():
            return session.scalars(idle.limit(1)).first() is not None

    def _release_unknown(self, known: Collection[int]) -> None:
        """Give back what a claim took whose reply never came."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            for job in session.scalars(jobs.release_unknown(owner=self._replica_id, fences=known)):
                log.warning("job_released", job_id=job.id, reason="the reply to its claim was lost")


def _state(job: Job | None) -> JobState | None:
    return None if job is None else job.state
