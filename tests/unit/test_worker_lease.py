from types import SimpleNamespace

import pytest
from rushes_worker.lease import Lease
from rushes_worker.stopping import Stopping

NOW = 1_000.0


@pytest.fixture(autouse=True)
def _no_time_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rushes_worker.lease.time", SimpleNamespace(monotonic=lambda: NOW))


def lease(*, age: float) -> Lease:
    return Lease("video_1", fence=1, seconds=30, asked_at=NOW - age)


@pytest.mark.parametrize(
    ("age", "doubtful", "over"), [(0, False, False), (28, False, False), (29.5, True, False), (31, True, True)]
)
def test_lease_that_is_not_renewed_is_doubtful_shortly_before_its_end_and_over_at_it(
    age: float, doubtful: bool, over: bool
) -> None:
    held = lease(age=age)
    assert (held.is_doubtful, held.is_over, held.has_run_out) == (doubtful, over, over)


def test_renewal_counts_from_when_it_was_asked_for() -> None:
    held = lease(age=31)
    held.renewed(NOW - 29.5)
    assert (held.is_doubtful, held.is_over) == (True, False)


def test_lost_lease_is_over_at_once() -> None:
    held = lease(age=0)
    held.lost = True
    assert (held.is_doubtful, held.is_over, held.has_run_out) == (True, True, False)


def test_asking_to_stop_again_changes_nothing() -> None:
    stopping = Stopping(grace_seconds=0)
    assert (stopping.requested, stopping.grace_is_over) == (False, False)
    assert stopping.seconds_left == float("inf")
    stopping.request()
    assert (stopping.requested, stopping.grace_is_over, stopping.seconds_left) == (True, True, 0)
    stopping.request()
    assert stopping.grace_is_over
