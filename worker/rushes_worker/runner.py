"""One job after another on the ranks of a replica, each from its claim to the commit that ends it.

How an attempt can end, and what becomes of the job:

| what happened | job | rank group |
|---|---|---|
| stored and committed | completed | lives |
| cancel or delete was seen | cancelled | lives |
| its campaign wants it back | queued again, nothing counted | lives |
| the request itself is wrong | failed, `invalid_request` | lives |
| an error raised on purpose by every rank, or a clip that breaks its contract | queued again, or failed | lives |
| any other error of a rank | queued again, or failed | ends |
| a rank died or fell silent | queued again, or failed; counts as a crash | ends |
| every rank reported that a device had no memory left | queued for the plan that needs less, or failed | lives |
| one rank reported it, and the others hang in step with it | queued for the plan that needs less, or failed | ends |
| the store took nothing for `upload_timeout_seconds` | queued again, or failed | lives |
| the lease was lost, or could not be renewed | nothing is written | lives |
| asked to stop, grace period over | queued again, nothing counted | ends |

While a job is decoded the next one is started and told to the ranks, which begin it when all work of the one before is
queued on their devices. A job that had an attempt before is rendered by itself: nothing is begun beside it. Of the one
that is behind:

| what happened | job |
|---|---|
| the one before it was cancelled or failed, and the ranks live | goes on; told again if they might be out of step |
| the ranks ended before they began it | queued again, nothing counted |
| the ranks ended when they had begun it and not handed over all of the one before | counts as a crash of both |
"""

from collections.abc import Callable

from structlog.contextvars import bound_contextvars

from rushes_worker.ahead import Ahead
from rushes_worker.attempt import Attempt, Workshop
from rushes_worker.group import RankGroup
from rushes_worker.ledger import Claim


class Runner:
    """Runs claimed jobs for one replica, one after another, on the group that it is given.

    The ranks are needed until the last frame and the sound are handed over. What is left to do then, and every other
    end of an attempt, happens in the spool while the next job is rendered.

    Args:
        take_ahead: a claimed job that may be started while another one is on the ranks, if there is one.
        on_turn: told of each job whose turn on the ranks it is.
    """

    def __init__(
        self, workshop: Workshop, *, take_ahead: Callable[[], Claim | None], on_turn: Callable[[str], None]
    ) -> None:
        self._workshop = workshop
        self._take_ahead = take_ahead
        self._on_turn = on_turn
        self._num_on_ranks = 0

    def has_room(self, rendering: bool) -> bool:
        """Whether one more job may be claimed, beside those on the ranks or told to them. Any thread may ask.

        Args:
            rendering: whether the job that was claimed last is on the ranks, or about to be.
        """
        on_ranks = max(self._num_on_ranks, int(rendering))
        return self._workshop.spool.has_room(on_ranks=on_ranks) and self._workshop.scratch.has_room

    @property
    def can_render(self) -> bool:
        """Whether a job may begin now."""
        return self._workshop.media.available

    def run(self, claim: Claim, group: RankGroup) -> bool:
        """Render a job and those that follow it without a pause; whether one of them succeeded. The group may have
        ended when this returns.

        The jobs are not settled yet then: the spool does that.
        """
        rendered = False
        attempt: Attempt | None = Attempt(self._workshop, claim)
        with bound_contextvars(job_id=claim.job.id, attempt=claim.job.attempt):
            if not attempt.start():
                return False
            attempt.hand_to(group)
        self._num_on_ranks = 1
        while attempt is not None:
            self._on_turn(attempt.job.id)
            following = Ahead(self._workshop, group, lambda: None if group.is_leaving else self._take_next())
            with bound_contextvars(job_id=attempt.job.id, attempt=attempt.job.attempt):
                rendered |= attempt.render(group, following)
                self._workshop.spool.end(attempt.fence, attempt.end)
            attempt = following.result()
            self._num_on_ranks = int(attempt is not None)
        return rendered

    def _take_next(self) -> Claim | None:
        if not self.can_render:
            return None
        # counted before it is taken: as soon as it is, the claimer asks whether there is room for another
        self._num_on_ranks = 2
        claim = self._take_ahead()
        if claim is None:
            self._num_on_ranks = 1
        return claim
