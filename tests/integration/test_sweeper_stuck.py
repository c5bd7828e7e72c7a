"""What a bucket that is gone, or gives nothing away, keeps the sweeper from: nothing elsewhere."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.main import main
from rushes_core import jobs, leftovers
from rushes_core import sweeper as sweeper_module
from rushes_core.errors import StorageError
from rushes_core.models import IdempotencyKey, Job
from rushes_core.object_keys import FILES, file_key, result_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import PART_BYTES
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, insert, select
from support.job_rows import JobRows
from support.later import TwoDaysAhead
from support.media import file_sha256
from support.stack import s3_client

GONE = "gone-bucket"


@pytest.fixture
def sweeper(settings: Settings) -> Iterator[Sweeper]:
    """Of a deployment that still names the bucket which is gone."""
    sweeper = Sweeper(settings.model_copy(update={"s3_output_buckets": GONE}))
    yield sweeper
    sweeper.close()


def deleted(rows: JobRows, **values: Any) -> Job:
    job = rows.add(**values)
    rows.run(jobs.delete_job(job.id, project="default"))
    return job


def test_jobs_whose_objects_stay_hold_up_no_others_however_many_they_are(sweeper: Sweeper, rows: JobRows) -> None:
    stuck = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(41)]
    free = deleted(rows)
    for _ in range(3):
        sweeper.purge()
    assert rows.read(free.id).purged_at is not None
    assert [rows.read(job.id).purged_at for job in stuck] == [None] * 41
    # the oldest are tried again
    assert rows.run(leftovers.unpurged(limit=1)).id == stuck[0].id
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ObjectStore, "delete_prefix", lambda store, prefix: 0)
        sweeper.purge()
    assert rows.read(stuck[0].id).purged_at is not None


def test_the_command_goes_on_past_all_that_stays_and_tells_how_much_that_is(
    settings: Settings, rows: JobRows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = settings.model_copy(update={"s3_output_buckets": GONE})
    monkeypatch.setattr("rushes_cli.sweep.load_settings", lambda: named)
    monkeypatch.setattr("rushes_cli.sweep.configure_logging", lambda *arguments, **options: None)
    stuck = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(41)]
    free = deleted(rows)
    late = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(23)]
    for job in late:
        rows.run(leftovers.mark_purged(job.id).returning(Job))
    assert main(["sweep"]) == 1
    assert rows.read(free.id).purged_at is not None
    assert [rows.read(job.id).purged_at for job in stuck] == [None] * 41
    said = capsys.readouterr().err
    assert "objects of 41 jobs or files could not be removed" in said
    assert "23 jobs removed before could not be looked at" in said
    monkeypatch.setattr("rushes_cli.sweep.load_settings", lambda: settings)
    assert main(["sweep"]) == 0


def test_the_command_ends_when_the_store_is_away(
    settings: Settings, rows: JobRows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = settings.model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"})
    monkeypatch.setattr("rushes_cli.sweep.load_settings", lambda: away)
    monkeypatch.setattr("rushes_cli.sweep.configure_logging", lambda *arguments, **options: None)
    tried: list[str] = []

    def refuse(store: ObjectStore, prefix: str) -> int:
        tried.append(prefix)
        raise StorageError("away")

    monkeypatch.setattr(ObjectStore, "delete_prefix", refuse)
    for _ in range(45):
        deleted(rows)
    with rows.engine.begin() as connection:
        key = dict.fromkeys(("project", "api_key", "route", "key", "fingerprint"), "old")
        connection.execute(insert(IdempotencyKey).values(**key, created_at=func.now() - timedelta(days=2)))
    assert main(["sweep"]) == 1
    assert len(tried) == 20
    assert "objects of 45 jobs or files could not be removed, and stay\n" in capsys.readouterr().err
    with rows.engine.connect() as connection:
        assert not connection.execute(select(IdempotencyKey)).all()


def test_the_command_tries_a_bucket_that_is_away_no_more_and_all_of_others(
    settings: Settings, rows: JobRows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = settings.model_copy(update={"s3_output_buckets": GONE})
    monkeypatch.setattr("rushes_cli.sweep.load_settings", lambda: named)
    logged: list[str] = []
    monkeypatch.setattr("rushes_cli.sweep.configure_logging", lambda *arguments, **options: None)
    monkeypatch.setattr(sweeper_module.log, "warning", lambda event, **values: logged.append(values.get("job_id", "")))
    tried: list[str] = []
    delete_prefix = ObjectStore.delete_prefix

    def note(store: ObjectStore, prefix: str) -> int:
        tried.append(store.bucket)
        return delete_prefix(store, prefix)

    monkeypatch.setattr(ObjectStore, "delete_prefix", note)
    stuck = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(30)]
    free = [deleted(rows) for _ in range(3)]
    late = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(5)]
    for job in late:
        rows.run(leftovers.mark_purged(job.id).returning(Job))
    assert main(["sweep"]) == 1
    assert tried.count(GONE) == 20
    assert all(rows.read(job.id).purged_at is not None for job in free)
    assert {job.id for job in (*stuck, *late)} <= set(logged)
    assert "objects of 30 jobs or files" in capsys.readouterr().err


def test_jobs_in_a_bucket_that_is_gone_for_good_are_purged(settings: Settings, rows: JobRows) -> None:
    job = deleted(rows, request={"output": {"bucket": GONE}}, prompt="secret")
    sweeper = Sweeper(settings)
    sweeper.purge()
    sweeper.close()
    purged = rows.read(job.id)
    assert purged.purged_at is not None
    assert purged.prompt == ""


def test_late_objects_are_removed_though_others_cannot_be(
    sweeper: Sweeper, rows: JobRows, store: ObjectStore, tmp_path: Path
) -> None:
    gone = [deleted(rows, request={"output": {"bucket": GONE}}) for _ in range(21)]
    for job in (*gone, late := deleted(rows)):
        rows.run(leftovers.mark_purged(job.id).returning(Job))
    clip = tmp_path / "clip"
    clip.write_bytes(b"clip")
    key = result_key("default", late.id, 9, 9)
    store.put_file(key, clip, content_type="video/mp4", sha256=file_sha256(clip))
    with pytest.raises(StorageError, match=GONE):
        sweeper.purge_again()
    assert store.head(key) is None


def test_uploads_and_orphans_elsewhere_are_found(
    sweeper: Sweeper, rows: JobRows, store: ObjectStore, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, unfinished = (store.begin(file_key("default", f"file_{n}"), max_bytes=PART_BYTES) for n in range(2))
    whole.write(b"line")
    whole.complete()
    unfinished.write(bytes(PART_BYTES))
    for one in (whole, unfinished):
        one.close()
    monkeypatch.setattr("rushes_core.sweeper.datetime", TwoDaysAhead)
    sweeper.tidy()
    assert "Uploads" not in s3_client(stack_env).list_multipart_uploads(Bucket=store.bucket, Prefix=FILES)
    with pytest.raises(StorageError, match=GONE):
        list(sweeper.orphans(delete=True))
    assert store.head(whole.key) is None
