"""The thread that keeps the lease of a campaign while it is worked on."""

import threading

import pytest
from rushes_worker.campaigns import renewal
from rushes_worker.campaigns.renewal import Renewal
from sqlalchemy.exc import OperationalError
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "RENEW_SECONDS", 0.01)


def test_renews_until_the_work_is_done() -> None:
    renewed = threading.Semaphore(0)

    def renew() -> bool:
        renewed.release()
        return True

    with Renewal(renew) as kept:
        for _ in range(3):
            assert renewed.acquire(timeout=60)
        assert kept.goes_on()
    assert not kept.is_alive()


def test_the_work_is_told_when_the_lease_is_lost() -> None:
    with Renewal(lambda: False) as kept:
        wait_until(lambda: not kept.goes_on())


def test_an_outage_is_no_loss() -> None:
    answers = iter([OperationalError("", {}, Exception("the server is away")), True])
    has_answered = threading.Event()

    def renew() -> bool:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        has_answered.set()
        return True

    with Renewal(renew) as kept:
        assert has_answered.wait(60)
        assert kept.goes_on()


def test_work_that_hangs_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "HANGING_SECONDS", -1.0)
    renewed = threading.Event()

    def renew() -> bool:
        renewed.set()
        return True

    with Renewal(renew):
        assert not renewed.wait(0.2)
