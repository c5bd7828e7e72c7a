"""What the dispatcher writes of the times that clips took."""

from collections.abc import Iterator
from typing import Any

import pytest
from rushes_core import jobs
from rushes_core.dispatcher import Dispatcher
from rushes_core.measured import measured, measured_shape
from rushes_core.models import Job, MeasuredTime
from rushes_core.settings import Settings
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session
from support.job_rows import MODEL, RESULT, JobRows


@pytest.fixture
def rows(engine: Engine) -> JobRows:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, measured_times CASCADE"))
    return JobRows(engine)


@pytest.fixture(scope="module")
def dispatcher(settings: Settings) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(settings)
    yield dispatcher
    dispatcher.close()


def completed(rows: JobRows, *, run_seconds: float, timings: dict[str, Any], **values: Any) -> Job:
    job = rows.running(**values)
    rows.run(jobs.complete(job.id, fence=job.fence or 0, result=RESULT, timings=timings))
    began = text(f"finished_at - interval '{run_seconds} s'")
    return rows.run(update(Job).where(Job.id == job.id).values(started_at=began).returning(Job))


def found(engine: Engine) -> list[MeasuredTime]:
    with Session(engine, expire_on_commit=False) as session:
        return list(session.scalars(measured(MODEL).order_by(MeasuredTime.num_frames)))


def test_each_shape_has_its_own_times(rows: JobRows, dispatcher: Dispatcher, engine: Engine) -> None:
    for seconds in (10, 12, 14, 16, 30):
        timings = {"denoising": seconds - 2, "uploading": 2, "total": seconds}
        completed(rows, run_seconds=seconds, timings=timings, num_frames=124)
    completed(rows, run_seconds=3, timings={}, num_frames=107)
    dispatcher.measure()
    short, long = found(engine)
    assert (short.num_frames, short.num_jobs, short.run_p50, short.phases) == (107, 1, 3.0, {})
    assert (long.num_frames, long.num_jobs, long.run_p50) == (124, 5, 14.0)
    assert 16 < long.run_p80 < 30
    assert long.phases == {"denoising": 14.4, "uploading": 2.0}


def test_only_the_latest_jobs_count(rows: JobRows, dispatcher: Dispatcher, engine: Engine) -> None:
    for _ in range(10):
        completed(rows, run_seconds=100, timings={})
    for _ in range(50):
        completed(rows, run_seconds=5, timings={})
    dispatcher.measure()
    (shape,) = found(engine)
    assert (shape.num_jobs, shape.run_p50, shape.run_p80) == (50, 5.0, 5.0)


def test_jobs_that_did_not_complete_say_nothing(rows: JobRows, dispatcher: Dispatcher, engine: Engine) -> None:
    job = rows.running()
    rows.run(jobs.fail(job.id, fence=job.fence or 0, error={"code": "generation_failed", "message": "no"}))
    rows.add()
    dispatcher.measure()
    assert found(engine) == []


def test_what_was_measured_is_kept_and_written_only_when_it_changes(
    rows: JobRows, dispatcher: Dispatcher, engine: Engine
) -> None:
    completed(rows, run_seconds=5, timings={"denoising": "slow", "decoding": 1.5})
    dispatcher.measure()
    (first,) = found(engine)
    assert first.phases == {"decoding": 1.5}
    dispatcher.measure()
    assert found(engine)[0].updated_at == first.updated_at
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    dispatcher.measure()
    with Session(engine) as session:
        shape = session.scalars(measured_shape(MODEL, width=480, height=480, num_frames=107)).one()
        assert shape.run_p50 == 5.0
