"""One attempt at a job, as its client sees it."""

import re
from hashlib import sha256
from typing import Literal

from rushes_core.listed import Listed
from rushes_core.models import JobAttempt
from rushes_core.moment import unix_or_none
from rushes_core.replicas import name_of
from rushes_core.states import JobState
from rushes_core.video import VideoError, error_of

_ID = re.compile(r"attempt_([0-9]{1,18})", re.ASCII)

AttemptStatus = Literal["in_progress", "requeued", "completed", "failed", "cancelled", "expired"]


class VideoAttempt(Listed):
    """A replica's hold of a job, from the claim to its end. Times are Unix seconds."""

    object: Literal["video.attempt"]
    generation: int
    attempt: int
    """Counts within the generation. One that was given back without a fault does not count: the next has its number."""
    worker: str
    """The same for the same replica, restarted or not. Its own name is not told: that may be the name of a host."""
    status: AttemptStatus
    """`requeued`: given back, or lost, and the job waits for another attempt."""
    crashed: bool
    claimed_at: int
    started_at: int | None
    finished_at: int | None
    error: VideoError | None


_STATUS: dict[str | None, AttemptStatus] = {
    None: "in_progress",
    JobState.QUEUED: "requeued",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
}


def attempt_of(row: JobAttempt, number: int) -> VideoAttempt:
    """
    Args:
        number: its number among all attempts of the job.
    """
    return VideoAttempt(
        id=f"attempt_{number}",
        object="video.attempt",
        generation=row.generation,
        attempt=row.attempt,
        worker=_worker(row.lease_owner),
        status=_STATUS[row.outcome],
        crashed=row.crashed,
        claimed_at=int(row.claimed_at.timestamp()),
        started_at=unix_or_none(row.started_at),
        finished_at=unix_or_none(row.finished_at),
        error=error_of(row.error),
    )


def _worker(owner: str) -> str:
    name = name_of(owner)
    return f"worker_{sha256(name.encode()).hexdigest()[:12]}"


def number_of(attempt_id: str) -> int | None:
    """The number in an attempt's id; None for what is no such id."""
    found = _ID.fullmatch(attempt_id)
    return None if found is None else int(found[1])
