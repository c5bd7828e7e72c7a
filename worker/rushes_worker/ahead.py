"""The job behind the one on the ranks: started and told to them early enough for them to go on without a pause."""

import contextvars
import threading
from collections.abc import Callable

from rushes_core.log import get_logger
from structlog.contextvars import bound_contextvars

from rushes_worker.attempt import Attempt, Workshop
from rushes_worker.commands import Report
from rushes_worker.group import RankGroup
from rushes_worker.ledger import Claim

log = get_logger(__name__)

_MAX_ERRORS = 3
"""Starts that may go wrong beside one render: a fault of the replica would cost each job that is ready a lease."""


class Ahead:
    """Implements `attempt.NextJob`. Used by the main thread; its start, which may wait for the database, has its own.

    Args:
        take: a claimed job that may be started now, if there is one.
    """

    def __init__(self, workshop: Workshop, group: RankGroup, take: Callable[[], Claim | None]) -> None:
        self._workshop = workshop
        self._group = group
        self._take = take
        self._attempt: Attempt | None = None
        self._thread: threading.Thread | None = None
        self._is_started: bool | None = None
        """None until that is known."""
        self._is_told = False
        self._num_errors = 0

    def look(self, behind: int) -> None:
        if self._is_started is False and self._num_errors < _MAX_ERRORS:
            # that one was not to be run any more, or could not be: perhaps there is another
            self._attempt = self._is_started = None
        if self._attempt is None:
            claim = self._take()
            if claim is not None:
                self._begin(Attempt(self._workshop, claim, started_ahead=True))
        elif self._is_started and not self._is_told:
            self._tell(self._attempt, behind)

    def hear(self, rank: int, report: Report) -> None:
        if self._attempt is not None:
            self._attempt.hear_early(rank, report)

    def void(self) -> None:
        if self._attempt is not None and self._is_told:
            self._attempt.hand_again(self._group)

    def result(self) -> Attempt | None:
        """The attempt whose turn it is now, told to the ranks if there are any; None if there is none."""
        if self._thread is not None:
            self._thread.join()
        if self._attempt is None or not self._is_started:
            return None
        if not self._is_told and not self._group.ended:
            self._tell(self._attempt, 0)
        return self._attempt

    def _begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        with bound_contextvars(job_id=attempt.job.id, attempt=attempt.job.attempt):
            context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._start, attempt), name=f"start-{attempt.fence}")
        self._thread.start()

    def _start(self, attempt: Attempt) -> None:
        is_started = False
        try:
            is_started = attempt.start()
        except Exception:
            # the job on the ranks goes on; this one is queued again when its lease runs out
            log.exception("job_not_started")
            self._num_errors += 1
            attempt.abandon()
        self._is_started = is_started
        self._workshop.wake.poke()

    def _tell(self, attempt: Attempt, behind: int) -> None:
        self._is_told = True
        with bound_contextvars(job_id=attempt.job.id, attempt=attempt.job.attempt):
            attempt.hand_to(self._group, behind=behind)
