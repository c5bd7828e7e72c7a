"""How far a job is, in percent: each phase has a fixed share of the whole."""

from rushes_core.states import Phase

_SHARES: dict[Phase, tuple[int, int]] = {
    Phase.ENCODING: (0, 5),
    Phase.DENOISING: (5, 70),
    Phase.DECODING: (70, 93),
    Phase.MUXING: (93, 97),
    Phase.UPLOADING: (97, 99),
}
"""Percent at which a phase begins and ends. 100 is written by the commit that completes the job."""


class Progress:
    """Where one attempt is. Never goes back to an earlier phase or a lower percentage."""

    def __init__(self, *, num_steps: int, num_units: int = 1) -> None:
        self.phase = Phase.ENCODING
        self.completed_steps = 0
        self.percent = 0
        self._num_steps = num_steps
        self.num_units = num_units
        self._units = 0

    def enter(self, phase: Phase, completed_steps: int = 0) -> None:
        """A rank entered `phase`, or finished a denoise step in it."""
        if _ORDER[phase] >= _ORDER[self.phase]:
            self.phase = phase
        self.completed_steps = max(self.completed_steps, min(completed_steps, self._num_steps))
        self._advance()

    def finish_unit(self) -> None:
        """The frames of one more temporal unit were handed over."""
        self._units += 1
        self._advance()

    def _advance(self) -> None:
        begin, end = _SHARES[self.phase]
        done = {
            Phase.DENOISING: self.completed_steps / self._num_steps,
            Phase.DECODING: min(1.0, self._units / self.num_units),
        }.get(self.phase, 0.0)
        self.percent = max(self.percent, begin + int(done * (end - begin)))


_ORDER = {phase: index for index, phase in enumerate(Phase)}
