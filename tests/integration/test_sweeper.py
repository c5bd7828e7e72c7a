"""The sweeper on real Postgres and SeaweedFS: what died, ran late, was deleted or was left behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.main import main
from rushes_core import jobs, leftovers, replicas
from rushes_core.database import create_sync_engine
from rushes_core.errors import StorageError
from rushes_core.models import IdempotencyKey, Job, ProjectShare, Replica
from rushes_core.object_keys import RESULTS, Destination, job_prefix, result_key
from rushes_core.replicas import forgotten_after
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import ERROR, RESULT, JobRows, wait_past_restart
from support.later import TwoDaysAhead
from support.media import file_sha256
from support.stack import s3_client

DAY = timedelta(days=1)
OTHER_BUCKET = "other-bucket"


@pytest.fixture
def sweeper(settings: Settings) -> Iterator[Sweeper]:
    sweeper = Sweeper(settings)
    yield sweeper
    sweeper.close()


@pytest.fixture
def rows(settings: Settings) -> Iterator[JobRows]:
    engine = create_sync_engine(settings)
    wait_past_restart(engine)
    yield JobRows(engine)
    with engine.begin() as connection:
        tables = "jobs, job_attempts, job_events, outbox, project_shares, idempotency_keys, replicas"
        connection.execute(text(f"TRUNCATE {tables}"))
    engine.dispose()


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper's clock is two days ahead: whatever is in the store has had its time."""
    monkeypatch.setattr("rushes_core.sweeper.datetime", TwoDaysAhead)


@pytest.fixture
def other(settings: Settings, stack_env: dict[str, str]) -> Iterator[Settings]:
    """The same settings with a second bucket that requests may name."""
    s3_client(stack_env).create_bucket(Bucket=OTHER_BUCKET)
    yield settings.model_copy(update={"s3_output_buckets": OTHER_BUCKET})
    ObjectStore(settings).in_bucket(OTHER_BUCKET).delete_prefix("")
    s3_client(stack_env).delete_bucket(Bucket=OTHER_BUCKET)


def put(store: ObjectStore, directory: Path, key: str) -> str:
    clip = directory / "clip"
    clip.write_bytes(key.encode())
    store.put_file(key, clip, content_type="video/mp4", sha256=file_sha256(clip))
    return key


def completed(rows: JobRows, store: ObjectStore, directory: Path, **values: Any) -> Job:
    """A completed job whose clip lies in the store, with a by-product beside it."""
    job = rows.running(**values)
    key_prefix = Destination.of(job.request).key_prefix
    key, _ = (
        put(store, directory, result_key(job.project, job.id, job.attempt, job.fence or 0, name, key_prefix=key_prefix))
        for name in ("video.mp4", "thumbnail.jpg")
    )
    result = {**RESULT, "bucket": store.bucket, "key": key}
    return rows.run(jobs.complete(job.id, fence=job.fence or 0, result=result, timings={}))


class TestSweep:
    def test_requeues_dead_attempts_and_expires_late_jobs(self, sweeper: Sweeper, rows: JobRows) -> None:
        dead = rows.running(lease_seconds=-2)
        late = rows.add(deadline_at=func.now() - text("interval '1 second'"))
        sweeper.sweep()
        assert rows.read(dead.id).state is JobState.QUEUED
        assert rows.read(late.id).state is JobState.EXPIRED

    def test_forgets_replicas_that_are_lost_for_an_hour_or_silent_where_another_one_has_the_name(
        self, settings: Settings, sweeper: Sweeper, rows: JobRows
    ) -> None:
        lease = settings.lease_seconds
        silence = {
            "forgotten-r0#1-a": forgotten_after(lease) + 1,
            "lost-r0#1-a": forgotten_after(lease) - 60,
            "replaced-r0#1-a": lease + 1,
            "replaced-r0#2-b": 0,
            "slow-r0#1-a": lease / 2,
            "slow-r0#2-b": 0,
            "stopped-r0#1-a": lease + 1,
            "stopped-r0#2-b": 0,
            "holder-r0#1-a": forgotten_after(lease) + 1,
        }
        values = {"pool": "default", "layout": "r1s1", "model": "tiny", "device": "cpu", "epoch": 1}
        with rows.engine.begin() as connection:
            for name, seconds in silence.items():
                state = "stopped" if name == "stopped-r0#2-b" else "ready"
                connection.execute(replicas.upsert_replica(name, state=state, **values))
                silent = func.now() - timedelta(seconds=seconds)
                connection.execute(update(Replica).where(Replica.id == name).values(last_seen=silent))
        held = rows.running(lease_seconds=60)
        with rows.engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == held.id).values(lease_owner="holder-r0#1-a"))
        sweeper.sweep()
        with Session(rows.engine) as session:
            left = set(session.scalars(select(Replica.id)))
        assert silence.keys() - left == {"forgotten-r0#1-a", "replaced-r0#1-a"}

    def test_ends_dead_attempts_while_files_are_locked(self, sweeper: Sweeper, rows: JobRows) -> None:
        with rows.engine.begin() as other:
            other.execute(text("LOCK TABLE files"))
            for _ in range(2):
                dead = rows.running(lease_seconds=-2)
                sweeper.sweep()
                assert rows.read(dead.id).state is JobState.QUEUED
                rows.run(jobs.cancel(dead.id, project="default"))


class TestPurge:
    def test_removes_every_object_of_a_deleted_job_and_its_prompt(
        self, sweeper: Sweeper, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        job = completed(rows, store, tmp_path)
        put(store, tmp_path, result_key(job.project, job.id, 7, 7))
        rows.run(jobs.delete_job(job.id, project="default"))

        sweeper.purge()

        assert store.delete_prefix(job_prefix(job.project, job.id)) == 0
        purged = rows.read(job.id)
        assert purged.purged_at is not None
        assert (purged.prompt, purged.request) == ("", {})

    def test_leaves_the_objects_of_a_job_that_still_runs(self, sweeper: Sweeper, rows: JobRows) -> None:
        job = rows.running()
        rows.run(jobs.delete_job(job.id, project="default"))
        sweeper.purge()
        assert rows.read(job.id).purged_at is None

    def test_removes_what_a_late_attempt_stored_after_the_purge(
        self, sweeper: Sweeper, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        job = completed(rows, store, tmp_path)
        rows.run(jobs.delete_job(job.id, project="default"))
        sweeper.purge()
        late = result_key(job.project, job.id, 9, 9)
        put(store, tmp_path, late)
        sweeper.purge_again()
        assert store.head(late) is None

    def test_finds_them_in_another_bucket_and_under_a_prefix_even_when_late(
        self, other: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        request = {"seconds": "4", "output": {"bucket": OTHER_BUCKET, "key_prefix": "acme/spring"}}
        elsewhere = store.in_bucket(OTHER_BUCKET)
        job = completed(rows, elsewhere, tmp_path, request=request)
        assert job.result is not None
        assert job.result["key"].startswith(f"results/default/acme/spring/{job.id}/")
        neighbour = put(elsewhere, tmp_path, result_key("default", "video_x", 1, 1, key_prefix="acme/spring"))
        rows.run(jobs.delete_job(job.id, project="default"))
        sweeper = Sweeper(other)
        sweeper.purge()
        assert [item.key for page in elsewhere.list_pages("") for item in page] == [neighbour]
        assert rows.read(job.id).request == {"output": request["output"]}

        put(elsewhere, tmp_path, result_key("default", job.id, 9, 9, key_prefix="acme/spring"))
        sweeper.purge_again()
        sweeper.close()
        assert [item.key for page in elsewhere.list_pages("") for item in page] == [neighbour]

    def test_finds_what_a_worker_of_the_release_before_stored_as_it_always_did(
        self, other: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path, old: None
    ) -> None:
        job = rows.running(request={"output": {"bucket": OTHER_BUCKET, "key_prefix": "acme"}})
        key = put(store, tmp_path, result_key(job.project, job.id, job.attempt, job.fence or 0))
        result = {**RESULT, "bucket": store.bucket, "key": key}
        rows.run(jobs.complete(job.id, fence=job.fence or 0, result=result, timings={}))
        sweeper = Sweeper(other)
        assert list(sweeper.orphans(delete=True)) == []
        rows.run(jobs.delete_job(job.id, project="default"))
        sweeper.purge()
        sweeper.close()
        assert store.head(key) is None

    def test_passes_over_a_job_whose_objects_cannot_be_removed(
        self, settings: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        stuck, free = (completed(rows, store, tmp_path) for _ in range(2))
        for job in (stuck, free):
            rows.run(jobs.delete_job(job.id, project="default"))
        sweeper = Sweeper(settings)
        remove = sweeper._store.delete_prefix

        def refuse(prefix: str) -> int:
            if prefix == job_prefix(stuck.project, stuck.id):
                raise StorageError(f"{prefix}: AccessDenied")
            return remove(prefix)

        sweeper._store.delete_prefix = refuse
        sweeper.purge()
        sweeper.close()
        assert rows.read(stuck.id).purged_at is None
        assert rows.read(free.id).purged_at is not None


class TestRetention:
    def test_removes_the_clip_and_says_when(
        self, settings: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        before, kept = (completed(rows, store, tmp_path) for _ in range(2))
        with rows.engine.begin() as connection:
            connection.execute(update(Job).where(Job.id == before.id).values(finished_at=func.now() - 31 * DAY))
        sweeper = Sweeper(settings.model_copy(update={"retention_days": 30}))
        sweeper.tidy()
        sweeper.tidy()
        sweeper.close()

        outlived = rows.read(before.id)
        assert outlived.state is JobState.COMPLETED
        assert outlived.result is not None
        assert datetime.fromisoformat(outlived.result["deleted_at"]) <= datetime.now(UTC) + DAY
        assert store.delete_prefix(job_prefix(before.project, before.id)) == 0
        assert rows.read(kept.id).result == kept.result

    def test_keeps_everything_unless_it_is_set(
        self, sweeper: Sweeper, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        job = completed(rows, store, tmp_path)
        with rows.engine.begin() as connection:
            connection.execute(update(Job).values(finished_at=func.now() - 3_000 * DAY))
        sweeper.tidy()
        assert rows.read(job.id).result == job.result

    def test_a_time_of_the_jobs_own_stands_instead_of_that_of_all(
        self, settings: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path
    ) -> None:
        short, long, other = (completed(rows, store, tmp_path) for _ in range(3))
        with rows.engine.begin() as connection:
            for job, ended, until in ((short, 0 * DAY, -DAY), (long, 31 * DAY, DAY)):
                times = {"finished_at": func.now() - ended, "retain_until": func.now() + until}
                connection.execute(update(Job).where(Job.id == job.id).values(**times))
        for days in (0, 30):
            sweeper = Sweeper(settings.model_copy(update={"retention_days": days}))
            sweeper.tidy()
            sweeper.close()
            stored = [store.head((job.result or {})["key"]) is not None for job in (short, long, other)]
            assert stored == [False, True, True]


class TestOrphans:
    def test_are_objects_that_no_row_and_no_lease_can_point_at(
        self, sweeper: Sweeper, rows: JobRows, store: ObjectStore, tmp_path: Path, old: None
    ) -> None:
        done = completed(rows, store, tmp_path)
        lost_attempt = put(store, tmp_path, result_key("default", done.id, 1, (done.fence or 0) - 1))
        failed = rows.running()
        of_failed = put(store, tmp_path, result_key("default", failed.id, 1, failed.fence or 0))
        rows.run(jobs.fail(failed.id, fence=failed.fence or 0, error=ERROR))
        running = rows.running()
        put(store, tmp_path, result_key("default", running.id, 1, running.fence or 0))
        of_nobody = put(store, tmp_path, result_key("default", "video_of_nobody", 1, 5))
        put(store, tmp_path, f"{RESULTS}README")

        orphans = {lost_attempt, of_failed, of_nobody}
        assert {orphan.key for orphan in sweeper.orphans(delete=False)} == orphans
        assert all(store.head(key) for key in orphans)

        assert {orphan.key for orphan in sweeper.orphans(delete=True)} == orphans
        assert not any(store.head(key) for key in orphans)
        assert len(next(store.list_pages(RESULTS))) == 4

    def test_in_another_bucket_are_only_those_of_known_jobs(
        self, other: Settings, rows: JobRows, store: ObjectStore, tmp_path: Path, old: None
    ) -> None:
        elsewhere = store.in_bucket(OTHER_BUCKET)
        done = completed(rows, elsewhere, tmp_path, request={"output": {"bucket": OTHER_BUCKET, "key_prefix": "a"}})
        lost = put(elsewhere, tmp_path, result_key("default", done.id, 1, (done.fence or 0) - 1, key_prefix="a"))
        put(elsewhere, tmp_path, result_key("default", "video_of_another_deployment", 1, 5))
        misplaced = put(store, tmp_path, result_key("default", done.id, 1, done.fence or 0))

        sweeper = Sweeper(other)
        found = {(orphan.bucket, orphan.key) for orphan in sweeper.orphans(delete=True)}
        sweeper.close()
        assert found == {(OTHER_BUCKET, lost), (store.bucket, misplaced)}
        assert sum(len(page) for page in elsewhere.list_pages("")) == 3

    def test_young_objects_are_left_alone(self, sweeper: Sweeper, store: ObjectStore, tmp_path: Path) -> None:
        put(store, tmp_path, result_key("default", "video_of_nobody", 1, 5))
        assert list(sweeper.orphans(delete=True)) == []


def test_command_lists_orphans_and_removes_them_only_when_told(
    settings: Settings,
    store: ObjectStore,
    tmp_path: Path,
    old: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = put(store, tmp_path, result_key("default", "video_of_nobody", 1, 5))
    monkeypatch.setattr("rushes_cli.sweep.load_settings", lambda: settings)
    monkeypatch.setattr("rushes_cli.sweep.configure_logging", lambda *arguments, **options: None)
    assert main(["sweep", "--orphans"]) == 0
    assert store.head(key) is not None
    assert key in capsys.readouterr().out
    assert main(["sweep", "--orphans", "--delete"]) == 0
    assert store.head(key) is None
    assert "1 orphan of" in capsys.readouterr().out


def test_unfinished_uploads_are_ended_when_they_are_old(
    sweeper: Sweeper, store: ObjectStore, stack_env: dict[str, str], request: pytest.FixtureRequest
) -> None:
    client = s3_client(stack_env)
    key = result_key("default", "video_x", 1, 1)
    client.create_multipart_upload(Bucket=store.bucket, Key=key)

    def unfinished() -> list[str]:
        listed = client.list_multipart_uploads(Bucket=store.bucket, Prefix=RESULTS)
        return [upload["Key"] for upload in listed.get("Uploads", ())]

    sweeper.tidy()
    assert unfinished() == [key]
    request.getfixturevalue("old")
    sweeper.tidy()
    assert unfinished() == []


def test_idempotency_keys_are_kept_for_a_day(sweeper: Sweeper, rows: JobRows) -> None:
    columns = {column.name for column in IdempotencyKey.__table__.columns} - {"created_at", "status", "body"}
    with Session(rows.engine) as session, session.begin():
        for key, hours in (("old", 25), ("young", 23)):
            values = dict.fromkeys(columns, "x") | {"key": key}
            session.add(IdempotencyKey(**values, created_at=datetime.now(UTC) - timedelta(hours=hours)))
    sweeper.tidy()
    with Session(rows.engine) as session:
        assert session.scalars(select(IdempotencyKey.key)).all() == ["young"]


def test_events_are_kept_for_a_month_though_nobody_delivers_webhooks(
    sweeper: Sweeper, rows: JobRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "MAX_EVENTS_AT_ONCE", 10)
    with rows.engine.begin() as connection:
        # the first of them wait for an endpoint that nobody tells
        connection.execute(
            text("""
INSERT INTO webhook_endpoints (id, project, origin) VALUES ('who_1', 'default', 'https://example.com');
INSERT INTO outbox (event_id, job_id, project, generation, type, created_at)
SELECT 'evt_' || n, 'video_' || n, 'default', 1, 'video.completed', now() - interval '30d' + (n - 35.5) * interval '1h'
FROM generate_series(1, 100) AS n;
INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, job_id, type)
SELECT 'whd_' || n, 'default', 'who_1', 'evt_' || n, 'video_' || n, 'video.completed' FROM generate_series(1, 25) AS n;
""")
        )
    sweeper.tidy()
    with rows.engine.begin() as connection:
        left = connection.scalars(text("SELECT event_id FROM outbox ORDER BY id")).all()
        connection.execute(text("TRUNCATE webhook_endpoints, webhook_deliveries, webhook_attempts"))
    assert left == [f"evt_{n}" for n in (*range(1, 26), *range(36, 101))]


def test_shares_of_idle_projects_are_forgotten_and_come_back(sweeper: Sweeper, rows: JobRows) -> None:
    def shares() -> set[str]:
        with Session(rows.engine) as session:
            return set(session.scalars(select(ProjectShare.project)))

    idle = rows.claimed(project="idle")
    rows.claimed(project="latest")
    rows.add(project="busy")
    with rows.engine.begin() as connection:
        connection.execute(update(ProjectShare).where(ProjectShare.project == "latest").values(last_start=5))
    sweeper.tidy()
    assert shares() == {"busy", "latest"}
    # a job that comes back to the queue brings its project's share back: without one it would never be claimed
    rows.run(jobs.release(idle.id, fence=idle.fence or 0))
    assert shares() == {"busy", "latest", "idle"}


def test_two_sweepers_at_once_do_everything_once(settings: Settings, rows: JobRows) -> None:
    dead = [rows.running(lease_seconds=-2, project=f"p{number}") for number in range(20)]
    sweepers = [Sweeper(settings) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Sweeper.sweep, sweepers))
    for sweeper in sweepers:
        sweeper.close()
    assert {rows.read(job.id).crash_count for job in dead} == {1}
