"""What a replica knows about its hold on one job."""

import time

FENCE_SHARE = 2 / 3
"""Share of the lease after which a replica that could not renew it stops rendering, by its own clock."""


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
        return self.lost or self._age > self.seconds * FENCE_SHARE

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
