import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from rushes_worker.pipeline.schedule import Grid, Schedule, step_
from support.tiny_model import RUNGS, tiny_contract

# sigma and time of the eight-step student, video shift 10 and audio shift 3 (FastH3 reference, fp32)
VIDEO_SIGMAS = [0.999899910, 0.985788405, 0.967575249, 0.943168077, 0.909090909, 0.857142857, 0.769230769, 0.588235294]
VIDEO_TIMES = [
    0.00010013580,
    0.01421165466,
    0.03242474794,
    0.05683189631,
    0.09090906382,
    0.14285713434,
    0.23076921701,
    0.41176468134,
]
VIDEO_RATIOS = [0.985887083, 0.981524274, 0.974774911, 0.963869464, 0.942857143, 0.897435897, 0.764705882, 0]
AUDIO_SIGMAS = [0.999666444, 0.954148472, 0.899519616, 0.832740214, 0.75, 0.642857143, 0.5, 0.3]
AUDIO_TIMES = [
    0.00033360720,
    0.04585158825,
    0.10048043728,
    0.16725987196,
    0.25,
    0.35714286566,
    0.5,
    0.69999998808,
]
AUDIO_RATIOS = [0.954466839, 0.942745959, 0.925761038, 0.900641026, 0.857142857, 0.777777778, 0.6, 0]


@pytest.mark.parametrize(
    ("shift", "sigmas", "times", "ratios"),
    [(10.0, VIDEO_SIGMAS, VIDEO_TIMES, VIDEO_RATIOS), (3.0, AUDIO_SIGMAS, AUDIO_TIMES, AUDIO_RATIOS)],
    ids=["video", "audio"],
)
def test_grid_of_the_eight_step_student(
    shift: float, sigmas: list[float], times: list[float], ratios: list[float]
) -> None:
    grid = Grid.from_rungs(RUNGS, shift)
    # an ulp below 1 is 6e-8; fp32 and fp64 computations differ by one
    torch.testing.assert_close(grid.sigmas, torch.tensor([*sigmas, 0.0]), atol=1e-7, rtol=0)
    torch.testing.assert_close(grid.timesteps, torch.tensor(times), atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(grid.sigmas[1:] / grid.sigmas[:-1], torch.tensor(ratios), atol=2e-7, rtol=0)
    assert grid.sigmas[-1] == 0


def test_grid_of_the_four_step_student() -> None:
    video, audio = (Grid.from_rungs([999, 749, 500, 250], shift) for shift in (12.0, 3.0))
    expected = torch.tensor([0.999916590, 0.972832558, 0.923076923, 0.8, 0])
    torch.testing.assert_close(video.sigmas, expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(audio.sigmas, torch.tensor([0.999666444, 0.899519616, 0.75, 0.5, 0]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("rungs", [[], [500, 500], [250, 500], [1001, 5], [500, 0]])
def test_rungs_that_do_not_decrease_are_refused(rungs: list[int]) -> None:
    with pytest.raises(ValueError, match="decrease"):
        Grid.from_rungs(rungs, 3.0)


def test_shift_must_be_positive() -> None:
    with pytest.raises(ValueError, match="shift"):
        Grid.from_rungs(RUNGS, 0.0)


@pytest.mark.parametrize("shift", [10.0, 3.0])
def test_every_step_equals_the_diffusers_scheduler(shift: float) -> None:
    grid = Grid.from_rungs(RUNGS, shift)
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(sigmas=grid.sigmas)
    assert torch.equal(scheduler.timesteps, grid.timesteps)
    generator = torch.Generator().manual_seed(3)
    sample = expected = torch.randn(40, 12, generator=generator)
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(40, 12, generator=generator)
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
        sample = grid.step(index, sample, velocity)
        assert torch.equal(sample, expected), index


def test_last_step_returns_the_clean_estimate() -> None:
    grid = Grid.from_rungs(RUNGS, 10.0)
    sample, velocity = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    expected = sample + (1 - grid.timesteps[-1]) * velocity
    assert torch.equal(grid.step(len(RUNGS) - 1, sample, velocity), expected)


def test_schedule_takes_rungs_and_shifts_from_the_contract() -> None:
    schedule = Schedule.from_contract(tiny_contract(video_shift=12.0, audio_shift=5.0))
    assert schedule.num_steps == len(RUNGS)
    assert torch.equal(schedule.video.sigmas, Grid.from_rungs(RUNGS, 12.0).sigmas)
    assert torch.equal(schedule.audio.sigmas, Grid.from_rungs(RUNGS, 5.0).sigmas)


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_step_in_place_with_coefficients_of_the_device_is_the_same_step(modality: str) -> None:
    grid: Grid = getattr(Schedule.from_contract(tiny_contract()), modality)
    sample, velocity = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    for index in range(len(grid.timesteps)):
        expected = grid.step(index, sample, velocity)
        step_(sample, velocity, grid.coefficients.index_select(0, torch.tensor([index]))[0])
        assert torch.equal(sample, expected)
