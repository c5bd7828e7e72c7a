"""Two workers of one name, of which the second is refused, and what takes the place of one that has died."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_core import replicas
from rushes_core.models import Replica
from rushes_core.settings import Settings
from rushes_worker import name
from rushes_worker.assignment import EXIT_NAME_TAKEN, EXIT_UNFIT
from rushes_worker.launcher import Refusals
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


def states(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.id: row.state for row in connection.execute(select(Replica.id, Replica.state))}


def be_silent(engine: Engine, replica_id: str, seconds: float) -> None:
    with engine.begin() as connection:
        silent = func.now() - timedelta(seconds=seconds)
        connection.execute(update(Replica).where(Replica.id == replica_id).values(last_seen=silent))


def test_who_has_the_name_of_one_that_died_takes_its_place_at_once(settings: Settings, engine: Engine) -> None:
    put(engine, detail=process_detail() | {"ticks": 1})
    claim(settings)
    assert states(engine) == {OLD: "stopped", NEW: "busy"}


def test_who_has_the_name_of_one_elsewhere_that_was_silent_for_a_lease_takes_its_place_until_that_is_heard_of(
    settings: Settings, engine: Engine
) -> None:
    put(engine, detail=elsewhere())
    be_silent(engine, OLD, settings.lease_seconds + 1)
    claim(settings)
    assert states(engine) == {OLD: "stopped", NEW: "busy"}
    put(engine, detail=elsewhere())
    assert states(engine) == {OLD: "busy", NEW: "busy"}


def test_a_worker_takes_the_places_of_all_replicas_of_this_machine_that_died(
    settings: Settings, engine: Engine
) -> None:
    """As after another layout, with fewer replicas."""
    dead, alive, far = "farm.one-r1#17-ab", "farm.two-r0#19-ef", "farm.three-r0#1-ab"
    put(engine, dead, detail=process_detail() | {"pid": 2**22 + 1})
    put(engine, alive)
    put(engine, far, detail=elsewhere())
    be_silent(engine, far, settings.lease_seconds + 1)
    claim(settings)
    assert states(engine) == {dead: "stopped", alive: "busy", far: "busy", NEW: "busy"}


def test_one_that_stops_and_lives_is_told_of_until_it_has(settings: Settings, engine: Engine) -> None:
    put(engine, state="stopping")
    claim(settings)
    assert states(engine) == {OLD: "stopping", NEW: "busy"}


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
    settings = settings.model_copy(update={"lease_seconds": 600})
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
        late = func.now() - timedelta(seconds=settings.lease_seconds - 120)
        connection.execute(update(Replica).values(last_seen=late))
    claim(settings, sleep=ages)
    assert waits == [[OLD]] * 2
    assert names(engine) == [OLD, NEW]


def proc(folder: Path, *, boot: bool = True) -> Path:
    """A `/proc` that shows no process, as one whose others are hidden does; without `boot` nothing of the system."""
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").touch()
    if boot:
        (folder / "sys/kernel/random").mkdir(parents=True)
        (folder / "sys/kernel/random/boot_id").write_text("0f3c")
    return folder


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Have `folder` be `/proc`; what a row says of this process that was written while it could be seen."""
    monkeypatch.setattr(name, "PROC", folder)
    return process_detail() | {"ticks": 1}


def awaited(settings: Settings) -> bool:
    """Whether the name is neither free nor refused at once."""
    waits: list[float] = []

    def stop(seconds: float) -> bool:
        waits.append(seconds)
        return False

    claim(settings, sleep=stop)
    return bool(waits)


def test_a_process_that_is_hidden_counts_as_long_as_it_is_heard_of(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(engine, detail=hide(monkeypatch, proc(tmp_path)))
    assert awaited(settings)
    assert names(engine) == [OLD]
    # of process 1 only root may ask more than whether it is there
    put(engine, detail=hide(monkeypatch, tmp_path) | {"pid": 1})
    assert awaited(settings)


def test_a_process_that_is_hidden_and_ended_takes_no_name(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(engine, detail=hide(monkeypatch, proc(tmp_path)) | {"pid": 2**22 + 1})
    claim(settings)
    assert names(engine) == [OLD, NEW]


def test_a_process_that_may_not_be_looked_at_counts_as_long_as_it_is_heard_of(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # root may read every file, but no directory as one
    (proc(tmp_path) / str(os.getpid()) / "stat").mkdir(parents=True)
    put(engine, detail=hide(monkeypatch, tmp_path))
    assert awaited(settings)


def test_where_the_system_is_not_seen_others_that_do_not_see_it_may_be_elsewhere(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    detail = hide(monkeypatch, proc(tmp_path, boot=False))
    assert detail["namespace"] is None
    put(engine, detail=detail | {"pid": 2**22 + 1})
    assert awaited(settings)


def test_a_row_that_could_not_tell_when_its_process_was_started_counts_as_long_as_it_is_refreshed(
    settings: Settings, engine: Engine
) -> None:
    put(engine, detail=process_detail() | {"ticks": None, "pid": 2**22 + 1})
    assert awaited(settings)


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


def test_a_worker_of_several_replicas_tells_once_that_its_name_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = Refusals()
    refusals.tell(EXIT_NAME_TAKEN, "the name farm is taken: replica farm-r0 is up")
    refusals.tell(EXIT_NAME_TAKEN, "the name farm is taken: replica farm-r1 is up")
    refusals.tell(EXIT_UNFIT, "a tensor is missing")
    refusals.tell(0, "")
    assert capsys.readouterr().err.splitlines() == [
        "rushes worker: the name farm is taken: replica farm-r0 is up",
        "rushes worker: a tensor is missing",
    ]
