"""The denoise schedule of a distilled student and its solver step.

A rung of the contract is a noise level in thousandths: u = rung / 1000, and sigma = s*u / (1 + (s - 1)*u) with the
modality's shift s; a final sigma of 0 ends the grid. The model is told t = 1 - sigma, where t = 1 is clean. All fp32,
as in the FastH3 reference.

Shapes: N steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rushes_core.contract import InferenceContract
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """Noise levels of one modality."""

    sigmas: Tensor
    """(N + 1,) fp32 on the CPU, strictly decreasing to 0."""
    timesteps: Tensor
    """(N,) fp32 on the CPU: 1 - sigma."""

    @classmethod
    def from_rungs(cls, rungs: Sequence[int], shift: float) -> "Grid":
        """Shift the rungs of a contract.

        Raises:
            ValueError: the rungs are not strictly decreasing within (0, 1000], or the shift is not positive.
        """
        if not rungs or any(a <= b for a, b in zip([1001, *rungs], [*rungs, 0], strict=True)):
            raise ValueError(f"denoising steps must decrease strictly within 1..1000, got {list(rungs)}")
        if not shift > 0:
            raise ValueError(f"a scheduler's shift must be positive, got {shift}")
        levels = torch.tensor(rungs, dtype=torch.float32) / 1000
        sigmas = torch.cat([shift * levels / (1 + (shift - 1) * levels), torch.zeros(1)])
        return cls(sigmas, 1 - sigmas[:-1])

    def step(self, index: int, sample: Tensor, velocity: Tensor) -> Tensor:
        """Euler step `index` along the velocity towards the data, without fresh noise.

        With x0 = x + (1 - t) * v and r = sigma_next / sigma the result is r * x + (1 - r) * x0. 1 - t is taken from
        the fp32 time that the model saw and r from the sigmas: they differ by an ulp and the reference keeps them
        apart.

        Args:
            sample, velocity: fp32 of one shape.

        Returns:
            fp32 of that shape; after the last step it is x0.
        """
        to_clean, ratio, rest = self.coefficients[index].tolist()
        return ratio * sample + rest * (sample + to_clean * velocity)

    @property
    def coefficients(self) -> Tensor:
        """(N, 3) fp32 on the CPU: 1 - t, r and 1 - r of every step."""
        ratios = self.sigmas[1:] / self.sigmas[:-1]
        return torch.stack([1 - self.timesteps, ratios, 1 - ratios], dim=1)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The two grids that one forward per step feeds."""

    video: Grid
    audio: Grid

    @classmethod
    def from_contract(cls, contract: InferenceContract) -> "Schedule":
        """The contract's rungs under the shifts of the two scheduler configs."""
        rungs = contract.dmd_denoising_steps
        return cls(
            Grid.from_rungs(rungs, contract.video_scheduler_shift),
            Grid.from_rungs(rungs, contract.audio_scheduler_shift),
        )

    @property
    def num_steps(self) -> int:
        return len(self.video.timesteps)


def step_(sample: Tensor, velocity: Tensor, coefficients_3: Tensor) -> None:
    """`Grid.step` in place, with a row of `Grid.coefficients` that lies on the device."""
    to_clean, ratio, rest = coefficients_3.unbind()
    torch.add(ratio * sample, rest * (sample + to_clean * velocity), out=sample)
