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
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = Ledger(settings, replica_id=REPLICA, model=MODEL)
    yield ledger
    ledger.close()


@pytest.fixture
def claimer(settings: Settings, rows: JobRows, ledger: Ledger) -> Iterator[Claimer]:
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


class TestStarts:
    def test_the_start_of_a_taken_job_holds_the_next(self, rows: JobRows, claimer: Claimer, ledger: Ledger) -> None:
        first, second = rows.add().id, rows.add().id
        claims: list[Claim | None] = []
        wait_until(lambda: claims.append(claimer.take()) or claims[-1] is not None)
        assert claims[-1] is not None
        assert claims[-1].job.id == first
        assert rows.read(second).state is JobState.QUEUED
        assert ledger.start(claims[-1].lease)
        # without the thread, which would take until its next tick
        behind = claimer.take()
        assert behind is not None
        assert behind.job.id == second

    def test_a_start_leaves_the_next_to_a_replica_that_is_idle(
        self, rows: JobRows, claimer: Claimer, ledger: Ledger
    ) -> None:
        claims: list[Claim | None] = []
        rows.add()
        wait_until(lambda: claims.append(claimer.take()) or claims[-1] is not None)
        with rows.engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO replicas (id, pool, layout, model, device, state, epoch, detail)"
                    " VALUES ('other-r0#1', 'default', 'r1s1', :model, 'cpu', 'ready', 1, '{}')"
                ),
                {"model": MODEL},
            )
        left = rows.add().id
        assert claims[-1] is not None
        assert ledger.start(claims[-1].lease)
        # before it is asked for: a replica that has nothing on its ranks claims whoever else is idle
        assert rows.read(left).state is JobState.QUEUED
        assert claimer.take() is None
