"""How jobs ended, as it is counted."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from rushes_core import ends, jobs
from rushes_core.campaigns import closing
from rushes_core.dispatcher import Dispatcher
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from rushes_core.video import RETRYABLE_ERRORS
from sqlalchemy import Engine, func, text, update
from sqlalchemy.orm import Session
from support.campaign_rows import CampaignRows
from support.job_rows import ERROR, RESULT, JobRows


def counted(engine: Engine) -> dict[tuple[str, str], int]:
    with engine.connect() as connection:
        return {(state, code): int(count) for state, code, count in connection.execute(ends.counts())}


def num_written(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM job_ends")).scalar_one()


@pytest.fixture
def rows(rows: JobRows) -> JobRows:
    with rows.engine.begin() as connection:
        connection.execute(text("TRUNCATE job_ends, job_end_counts"))
    return rows


def fail(rows: JobRows, job: Any) -> None:
    rows.run(jobs.fail(job.id, fence=job.fence, error=ERROR))


def test_every_end_is_counted_by_its_state_and_code(rows: JobRows) -> None:
    completed = rows.running()
    rows.run(jobs.complete(completed.id, fence=completed.fence or 0, result=RESULT, timings={}))
    rows.run(jobs.cancel(rows.add().id, project="default"))
    rows.run(jobs.delete_job(rows.add().id, project="default"))
    failed = rows.running()
    fail(rows, failed)
    expected = {("completed", ""): 1, ("cancelled", "cancelled_by_user"): 2, ("failed", "generation_failed"): 1}
    assert counted(rows.engine) == expected
    rows.run(jobs.retry(failed.id, project="default"))
    assert counted(rows.engine) == expected
    fail(rows, rows.running_again())
    assert counted(rows.engine) == expected | {("failed", "generation_failed"): 2}


def test_what_is_not_an_end_is_not_counted(rows: JobRows) -> None:
    job = rows.running()
    rows.run(jobs.report(job.id, fence=job.fence or 0, phase="denoising", completed_steps=3, progress=40))
    rows.run(jobs.retry_or_fail(job.id, fence=job.fence or 0, error=ERROR, crashed=False))
    assert counted(rows.engine) == {}


def test_counts_outlast_the_jobs_and_never_fall(rows: JobRows, settings: Settings) -> None:
    for _ in range(3):
        fail(rows, rows.running())
    dispatcher = Dispatcher(settings)
    seen = [counted(rows.engine)]
    dispatcher.count_ends()
    seen.append(counted(rows.engine))
    with rows.engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    seen.append(counted(rows.engine))
    fail(rows, rows.running())
    dispatcher.count_ends()
    dispatcher.close()
    assert [one["failed", "generation_failed"] for one in (*seen, counted(rows.engine))] == [3, 3, 3, 4]
    assert num_written(rows.engine) == 0


def test_dispatchers_that_count_at_once_count_each_end_once(
    rows: JobRows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "MAX_AT_ONCE", 7)
    with rows.engine.begin() as connection:
        connection.execute(
            text("INSERT INTO job_ends (state, code) SELECT 'failed', 'c' || n % 5 FROM generate_series(1, 500) AS n")
        )
    dispatchers = [Dispatcher(settings) for _ in range(4)]
    while num_written(rows.engine):
        with ThreadPoolExecutor(len(dispatchers)) as pool:
            list(pool.map(Dispatcher.count_ends, dispatchers))
        assert sum(counted(rows.engine).values()) == 500
    assert counted(rows.engine) == {("failed", f"c{n}"): 100 for n in range(5)}
    for dispatcher in dispatchers:
        dispatcher.close()


def close_campaign(rows: JobRows) -> None:
    with Session(rows.engine) as session, session.begin():
        found = session.execute(closing.to_close()).one()
        session.execute(closing.close_some(found.id, found.target, found.why))


def test_every_end_that_is_neither_a_clip_nor_a_failure_is_known_with_its_code(rows: JobRows) -> None:
    rows.add(deadline_at=func.now() - timedelta(seconds=1))
    rows.run(jobs.expire())
    again = rows.running()
    rows.run(jobs.retry_or_fail(again.id, fence=again.fence or 0, error=ERROR, crashed=False))
    late = update(Job).where(Job.id == again.id).values(deadline_at=func.now() - timedelta(seconds=1))
    rows.run(late.returning(Job))
    rows.run(jobs.expire())
    rows.run(jobs.cancel(rows.add().id, project="default"))

    campaigns = CampaignRows(rows.engine)
    campaigns.measure(p50=8, p90=10)
    campaigns.campaign(budget_gpu_seconds=15, on_budget="cancel")
    campaigns.feed()
    campaigns.complete(campaigns.take(9, campaigns.claim_and_start()))
    campaigns.feed()
    close_campaign(rows)
    campaigns.campaign(max_failures=1, on_failure="cancel")
    campaigns.feed()
    campaigns.fail(campaigns.claim_and_start())
    campaigns.feed()
    close_campaign(rows)
    campaigns.campaign(expires_at=func.now())
    close_campaign(rows)
    ended = counted(rows.engine)
    campaigns.clear()

    others = (JobState.COMPLETED, JobState.FAILED)
    assert {pair for pair in ended if pair[0] not in others} == {pair for pair in ends.KNOWN if pair[0] not in others}


def test_every_code_is_told_of_from_the_beginning() -> None:
    assert {code for _, code in ends.KNOWN} == {"", *RETRYABLE_ERRORS}
    assert {state for state, _ in ends.KNOWN} == set(FINAL_STATES)
