"""When the requests of `rushes bench service --request-rate` are due."""

import random
from itertools import pairwise
from statistics import mean, stdev

import pytest
from rushes_cli.bench_service_loops import arrivals


def due(count: int, burstiness: float, seed: int = 0) -> list[float]:
    return arrivals(count, rate=4.0, burstiness=burstiness, order=random.Random(seed))


@pytest.mark.parametrize("burstiness", [0.01, 1.0, 1e6])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_requests_have_the_rate_that_is_asked_for_however_few_they_are(count: int, burstiness: float) -> None:
    times = due(count, burstiness)
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / 4)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
def test_gaps_vary_as_those_of_a_gamma_distribution(burstiness: float, variation: float) -> None:
    gaps = [after - before for before, after in pairwise(due(20_000, burstiness))]
    assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_seed_gives_the_same_times_again() -> None:
    assert due(9, 1.0, seed=3) == due(9, 1.0, seed=3) != due(9, 1.0, seed=4)
