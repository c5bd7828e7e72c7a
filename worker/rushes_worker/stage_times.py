"""What the phases of a clip take on this replica, by shape."""

from collections.abc import Callable, Mapping

from rushes_core.claims import ClaimedJob
from rushes_core.states import Phase

from rushes_worker.progress import DEFAULT_SECONDS

_NEWEST_SHARE = 0.3
"""What one more clip counts in the mean of its shape."""

Shape = tuple[int, int, int]
"""Width, height and frames."""
Known = Callable[[ClaimedJob], Mapping[str, float] | None]
"""What the deployment has measured of clips like this job's, if anything."""


class StageTimes:
    """Starts from what the deployment knows of a shape, and goes on with what this replica measures. For any thread."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._seconds: dict[Shape, Mapping[Phase, float]] = {}

    def expected(self, job: ClaimedJob) -> Mapping[Phase, float]:
        """Seconds that each phase of `job` will take; of no meaning but their proportions until one was measured."""
        shape = _shape(job)
        if shape not in self._seconds:
            known = self._known(job)
            if not known:
                return DEFAULT_SECONDS
            self._seconds[shape] = _phases(known)
        return self._seconds[shape]

    def note(self, job: ClaimedJob, timings: Mapping[str, float]) -> None:
        """`job` completed, and its phases took this many seconds."""
        if job.low_memory:
            # the plan that needs less memory takes another time
            return
        new, old = _phases(timings), self._seconds.get(_shape(job))
        if old is not None:
            new = {phase: old[phase] + _NEWEST_SHARE * (seconds - old[phase]) for phase, seconds in new.items()}
        self._seconds[_shape(job)] = new


def _shape(job: ClaimedJob) -> Shape:
    return job.width, job.height, job.num_frames


def _phases(timings: Mapping[str, float]) -> Mapping[Phase, float]:
    return {phase: float(timings.get(phase.value, 0.0)) for phase in Phase}
