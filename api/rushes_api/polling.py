"""How often it is worth asking for a job."""

from datetime import UTC, datetime

from rushes_core.holds import CAMPAIGN
from rushes_core.models import Job
from rushes_core.video import Eta, is_held

MIN_POLL_MS = 1_000
MAX_POLL_MS = 10_000
POLLS_UNTIL_ETA = 20
"""How often a client asks between now and the end of its job, as far as the bounds allow."""


def poll_after_ms(job: Job, num_ahead: int | None, eta: Eta | None) -> int | None:
    """When it is worth asking again, in whole milliseconds; None when nothing will change.

    A small part of the time that is left: OpenAI's SDK keeps to the first value that it hears.
    """
    if job.state.is_final:
        return None
    ends_at = None if eta is None else eta.completes_at or eta.starts_at
    if ends_at is not None:
        wait_ms = int((ends_at - datetime.now(UTC).timestamp()) * 1_000 / POLLS_UNTIL_ETA)
    elif job.hold == CAMPAIGN:
        wait_ms = MAX_POLL_MS
    elif is_held(job):
        wait_ms = int((job.run_at - datetime.now(UTC)).total_seconds() * 1_000)
    else:
        wait_ms = MIN_POLL_MS * (1 + (num_ahead or 0))
    return min(MAX_POLL_MS, max(wait_ms, MIN_POLL_MS))
