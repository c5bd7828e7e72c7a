"""The life of a job: its states, what each means in operation, and the only moves between them."""

from enum import StrEnum


class JobState(StrEnum):
    """State of a job as Postgres stores it."""

    QUEUED = "queued"
    """Accepted and waiting; also a job whose attempt was lost and that will run again."""
    CLAIMED = "claimed"
    """Held by a replica under a lease, not started: a cancel still wins."""
    RUNNING = "running"
    """On the GPUs, or its clip is being encoded or stored; the lease is renewed until the commit that ends it."""
    COMPLETED = "completed"
    """The clip is in the object store and the row points at it."""
    FAILED = "failed"
    """Out of attempts, or the request can never succeed."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Never started before its deadline."""

    @property
    def is_final(self) -> bool:
        """Whether no attempt will change the job any more. A retry starts a new generation of it."""
        return self in FINAL_STATES

    @property
    def public_status(self) -> str:
        """The status word that the API shows: a lease is an implementation detail."""
        return _PUBLIC_STATUS.get(self, self.value)


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.CLAIMED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED}),
    JobState.CLAIMED: frozenset(
        {JobState.RUNNING, JobState.QUEUED, JobState.CANCELLED, JobState.FAILED, JobState.EXPIRED}
    ),
    JobState.RUNNING: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.QUEUED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
}
"""The moves out of a final state are retries in place: each makes a new generation of the job."""

_PUBLIC_STATUS = {JobState.CLAIMED: "in_progress", JobState.RUNNING: "in_progress"}

FINAL_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
LEASED_STATES = (JobState.CLAIMED, JobState.RUNNING)
RETRYABLE_STATES = tuple(state for state in FINAL_STATES if JobState.QUEUED in TRANSITIONS[state])


def sources(target: JobState) -> tuple[JobState, ...]:
    """The states from which a job may move to `target`."""
    return tuple(state for state in JobState if target in TRANSITIONS[state])


def states_with_status(status: str) -> tuple[JobState, ...]:
    """The states that the API shows as `status`; empty for a word that is no status."""
    return tuple(state for state in JobState if state.public_status == status)


class Phase(StrEnum):
    """What a running job is doing; shown to clients."""

    ENCODING = "encoding"
    DENOISING = "denoising"
    DECODING = "decoding"
    MUXING = "muxing"
    UPLOADING = "uploading"
