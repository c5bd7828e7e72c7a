"""Two workers of one name, of which the second is refused, and what takes the place of one that has died."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from rushes_core import replicas
from rushes_core.models import Replica
from rushes_core.settings import Settings
from rushes_worker.name import NameTaken, claim_name, process_detail
from sqlalchemy import Engine, func, select, text, update
from support.api import offline_settings

OLD, NEW = "farm.one-r0#17-ab", "farm.one-r0#18-cd"
ROW: dict[str, Any] = {
    "pool": "default",
    "layout": "r1s1",
    "model": "m",
    "device": "cpu",
    "state": "busy",
    "epoch": 1,
    "job_id": None,
}


@pytest.fixture(autouse=True)
def _no_replicas(engine: Engine) -> Iterator[None]:
    yield
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE replicas"))


def put(engine: Engine, replica_id: str = OLD, **values: Any) -> None:
    with engine.begin() as connection:
        row: dict[str, Any] = ROW | {"detail": process_detail()} | values
        connection.execute(replicas.upsert_replica(replica_id, **row))


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(select(Replica.id).order_by(Replica.id)))


def never(seconds: float) -> bool:
    raise AssertionError("it waited")


def claim(settings: Settings, replica_id: str = NEW, sleep: Any = never) -> None:
    claim_name(settings, replica_id, ROW | {"detail": process_detail()}, sleep=sleep)


def elsewhere() -> dict[str, Any]:
    """What the row of a replica says that runs in a container."""
    return process_detail() | {"namespace": "another", "host": "pod-7", "pid": 1}


def test_the_name_of_a_process_that_runs_is_refused_with_who_has_it_and_what_to_do(
    settings: Settings, engine: Engine
) -> None:
    put(engine)
    with pytest.raises(NameTaken) as refused:
        claim(settings)
    told = str(refused.value)
    assert (
        f"the name farm.one is taken: replica farm.one-r0 is up on {os.uname().nodename} as process {os.getpid()},"
        in told
    )
    assert told.startswith("RUSHES_WORKER_NAME: ")
    assert "Stop that worker, or give this one another name" in told
    assert names(engine) == [OLD]


@pytest.mark.parametrize(
    "values",
    [
        {"detail": process_detail() | {"ticks": 1}},
        {"detail": process_detail() | {"pid": 2**22 + 1}},
        {"state": "stopped"},
        {"state": "stopping"},
    ],
    ids=["another process has its number", "no process has its number", "stopped", "stopping"],
)
def test_the_name_of_one_that_died_or_stops_is_free_at_once(
    settings: Settings, engine: Engine, values: dict[str, Any]
) -> None:
    put(engine, **values)
    claim(settings)
    assert names(engine) == [OLD, NEW]


def test_others_names_are_free(settings: Settings, engine: Engine) -> None:
    put(engine, "farm.one-r1#17-ab")
    put(engine, "farm-one-r0#17-ab")
    claim(settings)
    assert NEW in names(engine)


def test_one_elsewhere_that_is_heard_of_again_is_up(settings: Settings, engine: Engine) -> None:
    put(engine, detail=elsewhere())
    waits: list[float] = []

    def beats(seconds: float) -> bool:
        waits.append(seconds)
        assert len(waits) == 1
        put(engine, detail=elsewhere())
        return True

    with pytest.raises(NameTaken, match="is up on pod-7 as process 1, since "):
        claim(settings, sleep=beats)


@pytest.mark.parametrize("detail", [elsewhere(), {"pid": 1}], ids=["elsewhere", "of the release before"])
def test_one_elsewhere_is_waited_for_until_it_was_silent_for_a_lease(
    settings: Settings, engine: Engine, detail: dict[str, Any]
) -> None:
    put(engine, detail=detail)
    waits: list[list[str]] = []

    def ages(seconds: float) -> bool:
        waits.append(names(engine))
        assert len(waits) < 3
        if len(waits) == 2:
            silent = func.now() - timedelta(seconds=settings.lease_seconds)
            with engine.begin() as connection:
                connection.execute(update(Replica).values(last_seen=silent))
        return True

    with engine.begin() as connection:
        late = func.now() - timedelta(seconds=settings.lease_seconds - 5)
        connection.execute(update(Replica).values(last_seen=late))
    claim(settings, sleep=ages)
    assert waits == [[OLD]] * 2
    assert names(engine) == [OLD, NEW]


def test_one_that_is_asked_to_stop_while_it_waits_waits_no_more(settings: Settings, engine: Engine) -> None:
    put(engine, detail=elsewhere())
    claim(settings, sleep=lambda seconds: False)
    assert names(engine) == [OLD]


def test_of_several_that_start_at_once_one_gets_the_name(settings: Settings, engine: Engine) -> None:
    def start(number: int) -> bool:
        try:
            claim(settings, f"farm.one-r0#{number}-ab")
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(start, range(4))) == 1
    assert len(names(engine)) == 1


def test_a_database_that_is_away_keeps_nobody_from_starting(settings: Settings) -> None:
    claim(offline_settings(settings.checkpoint))
