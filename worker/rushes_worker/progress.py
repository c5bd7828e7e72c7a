"""How far a job is, in percent of the time that it takes: each phase has the share that it was measured to take."""

from collections.abc import Mapping

from rushes_core.states import Phase

DEFAULT_SECONDS: Mapping[Phase, float] = {
    Phase.ENCODING: 0.5,
    Phase.DENOISING: 6.5,
    Phase.DECODING: 2.3,
    Phase.MUXING: 0.4,
    Phase.UPLOADING: 0.3,
}
"""What counts until a clip of the shape was measured; only the proportions matter."""

_MAX_PERCENT = 99
"""100 is written by the commit that completes the job."""
_ORDER = {phase: index for index, phase in enumerate(Phase)}


class Progress:
    """Where one attempt is. Never goes back to an earlier phase or a lower percentage.

    Args:
        seconds: what each phase is expected to take.
    """

    def __init__(self, *, num_steps: int, num_units: int = 1, seconds: Mapping[Phase, float] = DEFAULT_SECONDS) -> None:
        self.phase = Phase.ENCODING
        self.completed_steps = 0
        self.percent = 0
        self.num_units = num_units
        self._num_steps = num_steps
        self._num_finished_units = 0
        self._seconds = seconds if sum(seconds.values()) > 0 else DEFAULT_SECONDS

    def enter(self, phase: Phase, completed_steps: int = 0) -> None:
        """A rank entered `phase`, or finished a denoise step in it."""
        if _ORDER[phase] >= _ORDER[self.phase]:
            self.phase = phase
        self.completed_steps = max(self.completed_steps, min(completed_steps, self._num_steps))
        self._advance()

    @property
    def units_left(self) -> int:
        """Units whose frames were not handed over."""
        return self.num_units - self._num_finished_units

    def finish_unit(self) -> None:
        """The frames of one more temporal unit were handed over."""
        self._num_finished_units += 1
        self._advance()

    def _advance(self) -> None:
        before = sum(self._seconds.get(phase, 0.0) for phase in Phase if _ORDER[phase] < _ORDER[self.phase])
        done = {
            Phase.DENOISING: self.completed_steps / self._num_steps,
            Phase.DECODING: min(1.0, self._num_finished_units / self.num_units),
        }.get(self.phase, 0.0)
        spent = before + done * self._seconds.get(self.phase, 0.0)
        percent = int(_MAX_PERCENT * spent / sum(self._seconds.values()))
        self.percent = max(self.percent, min(percent, _MAX_PERCENT))
