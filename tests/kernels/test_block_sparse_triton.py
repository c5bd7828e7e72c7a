"""The Triton kernel against the reference in fp32, in Triton's interpreter on the CPU."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from rushes_kernels.providers import Provider
from support.tile_lists import Problem, run_on_poisoned_memory
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")


def interpreted(pool: ProcessPoolExecutor, problem: Problem) -> Tensor:
    return pool.submit(run_on_poisoned_memory, problem, Provider.TRITON).result()


@pytest.mark.parametrize(
    ("num_prefix_tiles", "counts"),
    [(1, [1]), (0, [0, 1]), (3, []), (2, [2, 0, 1]), (1, [5, 3, 1, 0, 4])],
    ids=str,
)
@pytest.mark.parametrize(("places", "dim"), [(16, 16), (16, 64), (64, 32)])
def test_agrees_with_the_reference(
    num_prefix_tiles: int, counts: list[int], places: int, dim: int, interpreter: ProcessPoolExecutor
) -> None:
    for seed in range(2):
        problem = Problem.random(
            heads=2, num_prefix_tiles=num_prefix_tiles, counts=counts, places=places, dim=dim, device="cpu", seed=seed
        )
        valid = torch.arange(places) < problem.sizes[:, None]
        actual = interpreted(interpreter, problem)
        assert actual.isfinite().all()
        torch.testing.assert_close(actual[:, valid], problem.reference()[:, valid])


def test_entries_out_of_range_are_passed_over(interpreter: ProcessPoolExecutor) -> None:
    problem = Problem.random(heads=2, num_prefix_tiles=1, counts=[3] * 4, places=16, dim=16, device="cpu")
    expected = interpreted(interpreter, problem)
    problem.counts = torch.full_like(problem.counts, 4)
    problem.lists = torch.cat([problem.lists, torch.zeros_like(problem.lists[..., :1])], dim=-1)
    for wild in (-1, 5, 2**31 - 1):
        problem.lists[..., 3] = wild
        actual = interpreter.submit(problem.run, Provider.TRITON).result()
        assert torch.equal(actual, expected)
