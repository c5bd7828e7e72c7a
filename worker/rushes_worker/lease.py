"""What a replica knows about its hold on one job."""

import time

MARGIN_SHARE = 0.1
MAX_MARGIN_SECONDS = 1.0
"""How long before its end a replica that could not renew a lease stops rendering: about what a boundary takes to come.

Rendering on until then is safe. By the replica's clock the lease ends no later than by the database's, which gives the
job to nobody before that; and should a step outlast the margin, the fence keeps what comes out of it from taking
effect. Stopping earlier would only throw away work that a database on its way back could still have counted.
"""


class Lease:
    """Written by the heartbeat, read by whoever works on the job; every attribute changes in one step.

    Args:
        asked_at: monotonic time just before the claim was sent. The database's clock started the lease later than
            that, so a lease that is over here may live on there, never the other way round.
    """

    def __init__(self, job_id: str, *, fence: int, seconds: float, asked_at: float) -> None:
        self.job_id = job_id
        self.fence = fence
        self.seconds = seconds
        self.lost = False
        """The database said that the job is no longer this attempt's."""
        self.cancel_requested = False
        self._renewed_at = asked_at

    def renewed(self, asked_at: float) -> None:
        """A renewal that was sent at monotonic time `asked_at` was confirmed."""
        self._renewed_at = asked_at

    @property
    def is_doubtful(self) -> bool:
        """The replica must stop rendering: another one may begin soon."""
        return self.lost or self._age > self.seconds - min(MAX_MARGIN_SECONDS, MARGIN_SHARE * self.seconds)

    @property
    def is_over(self) -> bool:
        """Nothing that this attempt writes can take effect any more."""
        return self.lost or self.has_run_out

    @property
    def has_run_out(self) -> bool:
        """No renewal was confirmed for as long as the lease is."""
        return self._age > self.seconds

    @property
    def _age(self) -> float:
        return time.monotonic() - self._renewed_at
