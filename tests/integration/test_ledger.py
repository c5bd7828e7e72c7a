"""A replica's ledger on real Postgres, through a proxy that breaks its connections."""

from collections.abc import Iterator

import pytest
from rushes_core import backlog, jobs
from rushes_core.claims import OVERDUE_EVERY
from rushes_core.models import Job
from rushes_core.prepared import Prepared
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker import connections
from rushes_worker.connections import UNREACHABLE, Connections
from rushes_worker.lease import Lease
from rushes_worker.ledger import Claim, Ledger, LedgerUnreachable
from sqlalchemy import bindparam, make_url, select, text
from support.faults.proxy import Mode, TcpProxy
from support.job_rows import ERROR, MODEL, RESULT, JobRows
from support.waiting import wait_until

REPLICA = "bench-r0#1"


@pytest.fixture
def proxy(settings: Settings) -> Iterator[TcpProxy]:
    url = make_url(settings.database_url)
    assert url.host is not None
    assert url.port is not None
    with TcpProxy(url.host, url.port) as proxy:
        yield proxy


@pytest.fixture
def ledger(settings: Settings, proxy: TcpProxy) -> Iterator[Ledger]:
    url = make_url(settings.database_url).set(host="127.0.0.1", port=proxy.port)
    changed = settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})
    ledger = Ledger(changed, replica_id=REPLICA, model=MODEL)
    yield ledger
    ledger.close()


def held(ledger: Ledger) -> Lease:
    claim = ledger.claim(())
    assert claim is not None
    return claim.lease


def test_a_job_goes_through_with_what_its_replica_needs_to_know(rows: JobRows, ledger: Ledger) -> None:
    added = rows.add(request={"metadata": {"a": "b"}}, low_memory=True)
    claim = ledger.claim(())
    assert claim is not None
    for name in ("id", "project", "model", "prompt", "seed", "width", "height", "num_frames", "request", "low_memory"):
        assert getattr(claim.job, name) == getattr(added, name)
    assert (claim.job.attempt, claim.job.fence) == (1, claim.lease.fence)
    assert ledger.start(claim.lease)
    assert ledger.complete(claim.lease, result=RESULT, timings={"total": 1.5})
    job = rows.read(added.id)
    assert (job.state, job.result, job.timings, job.lease_owner) == (JobState.COMPLETED, RESULT, {"total": 1.5}, None)
    assert ledger.claim(()) is None


class _Wanting:
    """Wants a job with each start, until it has one."""

    def __init__(self) -> None:
        self.claim: Claim | None = None

    def ask(self) -> bool:
        return self.claim is None

    def tell(self, claim: Claim | None) -> None:
        self.claim = claim


class TestStartsThatClaim:
    @pytest.fixture
    def along(self, ledger: Ledger) -> _Wanting:
        along = _Wanting()
        ledger.claim_with_starts(along)
        return along

    def test_the_next_job_is_claimed_in_the_transaction_that_starts_one(
        self, rows: JobRows, ledger: Ledger, along: _Wanting
    ) -> None:
        for _ in range(3):
            rows.add(request={"metadata": {"a": "b"}})
        lease = held(ledger)
        assert ledger.start(lease)
        assert along.claim is not None
        job = rows.read(along.claim.job.id)
        assert (job.state, job.fence, job.lease_owner) == (JobState.CLAIMED, along.claim.lease.fence, REPLICA)
        assert (along.claim.job.request, along.claim.job.attempt) == (job.request, 1)
        with rows.engine.connect() as connection:
            writers = connection.execute(text("SELECT count(DISTINCT xmin::text) FROM jobs WHERE state <> 'queued'"))
            assert writers.scalar_one() == 1
        assert ledger.start(along.claim.lease)
        assert [rows.read(one).state for one in (lease.job_id, job.id)] == [JobState.RUNNING] * 2

    def test_one_alone_is_started_all_the_same(self, rows: JobRows, ledger: Ledger, along: _Wanting) -> None:
        rows.add()
        assert ledger.start(held(ledger))
        assert along.claim is None

    def test_a_job_that_is_not_to_start_does_not_keep_the_next_from_being_claimed(
        self, rows: JobRows, ledger: Ledger, along: _Wanting
    ) -> None:
        rows.add()
        lease = held(ledger)
        rows.run(jobs.cancel(lease.job_id, project="default"))
        behind = rows.add().id
        assert not ledger.start(lease)
        assert rows.read(lease.job_id).state is JobState.CLAIMED
        assert along.claim is not None
        assert along.claim.job.id == behind

    def test_a_reply_that_was_lost_leaves_the_one_started_and_the_other_given_back_with_the_next_claim(
        self, rows: JobRows, ledger: Ledger, along: _Wanting, proxy: TcpProxy
    ) -> None:
        for _ in range(2):
            rows.add()
        lease = held(ledger)
        proxy.set(Mode.LOSE_REPLY, triggers=(REPLICA.encode(),), budget=1)
        assert ledger.start(lease)
        assert proxy.strikes == 1
        assert rows.read(lease.job_id).state is JobState.RUNNING
        assert along.claim is None
        behind = ledger.claim((lease.fence,))
        assert behind is not None
        assert (behind.job.attempt, behind.lease.fence > lease.fence + 1) == (1, True)

    def test_one_in_twenty_looks_for_what_has_waited_too_long_in_a_claim_of_its_own(
        self, rows: JobRows, ledger: Ledger, along: _Wanting
    ) -> None:
        for _ in range(OVERDUE_EVERY + 1):
            rows.add()
        claims = [held(ledger) for _ in range(OVERDUE_EVERY - 1)]
        assert ledger.start(claims[0])
        assert along.claim is None
        held(ledger)
        assert ledger.start(claims[1])
        assert along.claim is not None


class TestEnds:
    def test_what_came_first_wins(self, rows: JobRows, ledger: Ledger) -> None:
        rows.add()
        lease = held(ledger)
        rows.run(jobs.cancel(lease.job_id, project="default"))
        assert not ledger.start(lease)
        assert ledger.confirm_cancel(lease)
        assert not ledger.complete(lease, result=RESULT, timings={})
        assert ledger.fail(lease, ERROR) is None
        assert not ledger.release(lease)

    def test_each_says_what_became_of_the_job(self, rows: JobRows, ledger: Ledger) -> None:
        rows.add(max_attempts=2)
        for end in (
            lambda lease: ledger.retry_or_fail(lease, ERROR, crashed=False),
            lambda lease: ledger.release(lease) and JobState.QUEUED,
            lambda lease: ledger.out_of_memory(lease, "denoising"),
        ):
            with rows.engine.begin() as connection:
                connection.execute(text("UPDATE jobs SET run_at = now()"))
            lease = held(ledger)
            assert ledger.start(lease)
            state = end(lease)
            assert state is rows.read(lease.job_id).state
        assert state is JobState.FAILED


class TestBrokenConnections:
    def test_one_that_ended_while_nobody_used_it_is_not_noticed(self, rows: JobRows, settings: Settings) -> None:
        ledger = Ledger(settings, replica_id=REPLICA, model=MODEL)
        rows.add()
        lease = held(ledger)
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # returns when the other end is closed
            ended = connection.scalars(
                text(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND datname = current_database() AND query LIKE '%WITH ready AS%'"
                )
            )
            assert ended.all() == [True]
        assert ledger.try_release(lease)
        ledger.close()

    def test_a_claim_whose_reply_was_lost_is_given_back_with_the_next(
        self, rows: JobRows, ledger: Ledger, proxy: TcpProxy
    ) -> None:
        added = rows.add()
        assert ledger.claim(()) is not None
        rows.run(jobs.release(added.id, fence=rows.read(added.id).fence or 0))
        proxy.set(Mode.LOSE_REPLY, triggers=(REPLICA.encode(),), budget=1)
        with pytest.raises(UNREACHABLE):
            ledger.claim(())
        assert rows.read(added.id).state is JobState.CLAIMED
        claim = ledger.claim(())
        assert claim is not None
        assert (claim.job.id, claim.job.attempt) == (added.id, 1)
        assert proxy.strikes == 1

    @pytest.mark.parametrize("mode", [Mode.LOSE_REPLY, Mode.REPLY_THEN_CUT])
    def test_a_completion_whose_reply_was_lost_is_found_by_reading(
        self, rows: JobRows, ledger: Ledger, proxy: TcpProxy, mode: Mode
    ) -> None:
        rows.add()
        lease = held(ledger)
        assert ledger.start(lease)
        proxy.set(mode, triggers=(b"completed",), budget=1)
        assert ledger.complete(lease, result=RESULT, timings={})
        assert rows.read(lease.job_id).state is JobState.COMPLETED
        assert proxy.strikes == 1

    def test_a_database_that_takes_no_writes_is_waited_for_as_one_that_is_away(
        self, rows: JobRows, ledger: Ledger, settings: Settings
    ) -> None:
        rows.add()
        lease = held(ledger)
        name = make_url(settings.database_url).database
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
            ledger.close()
            try:
                assert not ledger.try_release(lease)
                with pytest.raises(UNREACHABLE):
                    ledger.claim(())
                over = Lease(lease.job_id, fence=lease.fence, seconds=0.0, asked_at=0.0)
                with pytest.raises(LedgerUnreachable):
                    ledger.start(over)
            finally:
                connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = off"))
        assert rows.read(lease.job_id).state is JobState.CLAIMED


def test_a_plan_for_an_empty_queue_is_not_kept_for_a_full_one(
    rows: JobRows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PLANS_KEPT_SECONDS", 0.0)
    read = text("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'jobs'")
    with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE jobs"))
        made_after = connection.execute(text("SELECT now()")).scalar_one()
    ledger = Ledger(settings, replica_id=REPLICA, model=MODEL)
    for _ in range(3):
        assert ledger.claim(()) is None
    with rows.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts)"
                " SELECT 'video_' || i, 'p' || i % 20, :model, 'x', 1, 480, 480, 107, '{}', 3"
                " FROM generate_series(1, 3000) AS i"
            ),
            {"model": MODEL},
        )
        before = connection.execute(read).scalar_one()
    for _ in range(3):
        assert ledger.claim(()) is not None
    # what a backend counted is known when it has ended
    ledger.close()
    backends = text(
        "SELECT FROM pg_stat_activity WHERE query LIKE '%WITH ready AS%' AND backend_start > :made_after"
        " AND pid <> pg_backend_pid()"
    ).bindparams(made_after=made_after)
    with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_until(lambda: not connection.execute(backends).all())
        assert connection.execute(read).scalar_one() - before < 3000


def test_a_connection_that_failed_is_not_lent_again(settings: Settings) -> None:
    lender = Connections(settings)
    with pytest.raises(ZeroDivisionError), lender.lend() as first:
        raise ZeroDivisionError
    assert first.connection.closed
    with lender.lend() as second:
        pass
    with lender.lend() as third:
        assert third is second
    lender.close()
    assert second.connection.closed


def test_a_prepared_statement_takes_its_values_and_those_that_it_is_given(settings: Settings, rows: JobRows) -> None:
    job = rows.add(project="p")
    statement = Prepared(select(Job.state, Job.request).where(Job.id == bindparam("job_id"), Job.project == "p"))
    pause = Prepared(backlog.pause_queue("p"), keep=False)
    lender = Connections(settings)
    with lender.lend() as session:
        for job_id, found in ((job.id, [{"state": "queued", "request": job.request}]), ("another", [])):
            assert statement.execute(session, job_id=job_id, nothing="of it") == found
        assert [row["project"] for row in pause.execute(session)] == ["p"]
    lender.close()
    rows.run(backlog.resume_queue("p"))
