"""Whether a replica is sick: jobs that have nothing to do with each other crash on it."""

import time

WINDOW_SECONDS = 1_800.0


class Crashes:
    """The jobs that a replica crashed on lately.

    One job that crashes every replica is to blame itself; several different ones within half an hour blame the replica.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._at: dict[str, float] = {}

    def note(self, job_id: str) -> None:
        """The ranks ended under this job."""
        self._at[job_id] = time.monotonic()

    def forget(self) -> None:
        """Somebody has looked at the replica."""
        self._at.clear()

    @property
    def jobs(self) -> list[str]:
        """The different jobs of the last half hour."""
        since = time.monotonic() - WINDOW_SECONDS
        return [job_id for job_id, at in self._at.items() if at > since]

    @property
    def too_many(self) -> bool:
        return len(self.jobs) >= self._limit
