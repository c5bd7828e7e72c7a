"""Transactions that move jobs of one campaign at the same time take their locks in one order."""

import threading

from rushes_core import claims, jobs
from rushes_core.campaigns.tables import Campaign
from rushes_core.database import create_sync_engine
from rushes_core.ids import new_campaign_id
from rushes_core.settings import Settings
from sqlalchemy import Connection, insert, text
from sqlalchemy.orm import Session
from support.job_rows import MODEL, RESULT, JobRows
from support.waiting import wait_until


def _backend(connection: Connection) -> int:
    pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    connection.commit()
    return pid


def test_a_claim_and_an_end_of_jobs_that_are_counted_in_one_row_wait_and_do_not_die(settings: Settings) -> None:
    engine = create_sync_engine(settings, pool_size=20)
    rows = JobRows(engine)
    campaign_id = new_campaign_id()
    with engine.begin() as connection:
        row = {"model": MODEL, "input_file_id": "file_x", "project": "default", "state": "in_progress"}
        connection.execute(insert(Campaign).values(id=campaign_id, **row))
    started = rows.running(campaign_id=campaign_id, line=1)
    assert started.fence is not None
    ending = jobs.complete(started.id, fence=started.fence, result=RESULT, timings={})
    with engine.begin() as connection:
        # as when somebody else waited, too: its end puts the share of the project right
        connection.execute(text("UPDATE jobs SET charged = 1"))
    waiting = rows.add(campaign_id=campaign_id, line=2)
    # two processes that would count in the same row
    connections = [engine.connect() for _ in range(9)]
    by_shard: dict[int, Connection] = {}
    for connection in connections:
        other = by_shard.setdefault(_backend(connection) % 8, connection)
        if other is not connection:
            break
    else:
        raise AssertionError("nine processes, eight rows")
    claimer, ender, ender_pid = other, connection, _backend(connection)

    def end() -> None:
        with Session(ender) as session, session.begin():
            ended.append(session.scalars(ending).one().id)

    ended: list[str] = []
    # as a claim of the project that is under way holds it
    claimer.execute(text("SELECT FROM project_shares WHERE project = 'default' FOR NO KEY UPDATE"))
    thread = threading.Thread(target=end)
    thread.start()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        waits = text("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = :pid")
        wait_until(lambda: bool(watcher.execute(waits, {"pid": ender_pid}).scalar_one()))
    with Session(claimer) as session:
        statement = claims.claim(model=MODEL, owner="second", lease_seconds=60)
        assert session.scalars(statement).one().id == waiting.id
    claimer.commit()
    thread.join(30)
    assert not thread.is_alive()
    assert ended == [started.id]
    for connection in connections:
        connection.close()
    engine.dispose()
