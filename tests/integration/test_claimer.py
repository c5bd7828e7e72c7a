"""The job that a replica holds behind the one on its ranks, on real Postgres."""

from collections.abc import Callable, Iterator

import pytest
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker.claimer import Claimer
from rushes_worker.heartbeat import Heartbeat
from rushes_worker.ledger import Claim, Ledger
from rushes_worker.stopping import Stopping
from rushes_worker.wake import Wake
from sqlalchemy import text
from support.job_rows import MODEL, JobRows
from support.waiting import wait_until

REPLICA = "bench-r0#1"


@pytest.fixture
def claimer(settings: Settings, rows: JobRows) -> Iterator[Claimer]:
    ledger = Ledger(settings, replica_id=REPLICA, model=MODEL)
    replica = {"pool": "default", "layout": "r1s1", "model": MODEL, "device": "cpu", "state": "busy", "epoch": 1}
    heartbeat = Heartbeat(
        settings,
        replica_id=REPLICA,
        replica=replica | {"job_id": None, "detail": {}},
        on_change=lambda: None,
        is_stopping=lambda: False,
    )
    claimer = Claimer(
        settings,
        ledger=ledger,
        heartbeat=heartbeat,
        stopping=Stopping(60),
        has_room=lambda rendering: True,
        on_claim=lambda: None,
        wake=Wake(),
        replica_id=REPLICA,
    )
    heartbeat.start()
    claimer.start()
    claimer.open()
    yield claimer
    claimer.close()
    heartbeat.close()
    ledger.close()


def taken(take: Callable[[], Claim | None]) -> str:
    """Id of the job that is given at last."""
    found: list[Claim] = []

    def is_given() -> bool:
        claim = take()
        found.extend([] if claim is None else [claim])
        return claim is not None

    wait_until(is_given)
    return found[0].job.id


def hold(rows: JobRows, claimer: Claimer, *, priority: int) -> str:
    """Have a job on the ranks, and one of this class held behind it."""
    first = rows.add().id
    assert taken(claimer.take) == first
    held = rows.add(priority=priority).id
    wait_until(lambda: rows.read(held).state is JobState.CLAIMED)
    return held


def test_a_held_job_is_given_ahead_of_its_turn(rows: JobRows, claimer: Claimer) -> None:
    held = hold(rows, claimer, priority=2)
    assert taken(claimer.take_ahead) == held


def test_none_is_given_ahead_of_its_turn_while_a_more_urgent_one_waits(rows: JobRows, claimer: Claimer) -> None:
    held = hold(rows, claimer, priority=2)
    urgent = rows.add(priority=0).id
    assert taken(claimer.take_ahead) == urgent
    wait_until(lambda: states(rows, held)[:3] == ["queued", "claimed", "queued"])


def states(rows: JobRows, job_id: str) -> list[str]:
    with rows.engine.begin() as connection:
        told = text("SELECT new_state FROM job_events WHERE job_id = :id ORDER BY id")
        return list(connection.execute(told, {"id": job_id}).scalars())
