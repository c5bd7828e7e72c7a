"""The sweeper: puts right what died, ran late, was deleted or was left behind. Any number may run at once."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, TypeVar

from sqlalchemy import Engine, Select, Update, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from rushes_core import files, jobs, leftovers, replicas
from rushes_core.campaigns import statements
from rushes_core.database import create_sync_engine
from rushes_core.errors import BucketMissing, StorageError
from rushes_core.log import get_logger
from rushes_core.models import File, Job
from rushes_core.object_keys import FILES, RESULTS, Destination, bucket_of_result, file_key
from rushes_core.settings import Settings
from rushes_core.states import LEASED_STATES
from rushes_core.storage import ObjectStore, StoredItem
from rushes_core.webhooks import deliveries

log = get_logger(__name__)

_AFTER_OUTAGE_SECONDS = 5.0
"""How long after an outage of the database its silence is not held against those who hold leases."""

_RESULT_KEY = re.compile(rf"(?P<folder>{RESULTS}[^/]+/(?:[^/]+/)*(?P<job_id>[^/]+)/[0-9]+-(?P<fence>[0-9]+)/)[^/]+")
_FILE_KEY = re.compile(rf"{FILES}[^/]+/(?P<file_id>[^/]+)")

_Owner = TypeVar("_Owner", Job, File)

_PURGED_AGAIN_HOURS = 24
_MAX_FAILURES = 20
"""Jobs or files whose objects stay after which a pass ends: the store is down, or refuses everything. The next one goes
on behind them. A patient one asks their bucket then whether it answers."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object beside no job's clip, and that no attempt may still come to point at; or a file that has no row."""

    bucket: str
    key: str
    num_bytes: int
    modified: datetime


@dataclass(slots=True)
class _Removal(Generic[_Owner]):
    """Which rows' objects are removed, how, and what is written down and logged then."""

    find: Callable[..., Select[_Owner]]
    by: str
    """The column that orders them."""
    store_of: Callable[[_Owner], ObjectStore]
    """The bucket that their objects lie in."""
    remove: Callable[[_Owner], int]
    mark: Callable[[str], Update]
    event: str
    after: leftovers.Place | None = None
    """Where the next pass goes on."""


class _Failures:
    """Those of one pass, by bucket: what one keeps holds up nothing in others.

    Args:
        is_patient: a bucket that gives nothing away is tried on while it answers.
    """

    def __init__(self, *, is_patient: bool) -> None:
        self.is_patient = is_patient
        self._num_since_answer: Counter[str] = Counter()
        self._left_alone: dict[str, StorageError] = {}
        self.first: StorageError | None = None
        self.num = 0

    def left_alone(self, store: ObjectStore) -> StorageError | None:
        """Why this bucket is not tried any more in this pass; None if it is."""
        return self._left_alone.get(store.bucket)

    def add(self, store: ObjectStore, error: StorageError) -> None:
        self.first = self.first or error
        self.num += 1
        self._num_since_answer[store.bucket] += 1
        if self._num_since_answer[store.bucket] < _MAX_FAILURES:
            return
        if self.is_patient:
            try:
                store.check()
            except StorageError as reason:
                error = reason
            else:
                self._num_since_answer[store.bucket] = 0
                return
        self._left_alone[store.bucket] = error


class Sweeper:
    """One pass each of what has to be done; whoever holds it repeats them.

    Args:
        is_patient: there is no next pass: each goes on to its end while the store answers, however many objects stay.
    """

    def __init__(self, settings: Settings, *, is_patient: bool = False) -> None:
        self._is_patient = is_patient
        self.num_stuck = 0
        """Jobs and files whose objects stayed, in all passes."""
        self.num_unsure = 0
        """Jobs whose objects were removed before, and of which nobody could see whether any came late."""
        self._failures = _Failures(is_patient=is_patient)
        self._engine: Engine = create_sync_engine(settings, pool_size=2)
        self._store = ObjectStore(settings)
        self._deleted_jobs = _Removal(
            leftovers.unpurged,
            "deleted_at",
            self._store_of,
            self._remove_objects_of,
            leftovers.mark_purged,
            "job_purged",
        )
        self._deleted_files = _Removal(
            files.unpurged,
            "deleted_at",
            lambda file: self._store,
            self._remove_object_of,
            files.mark_purged,
            "file_purged",
        )
        outlived: list[tuple[Callable[..., Select[Job]], str]] = [(leftovers.results_past_their_time, "retain_until")]
        if settings.retention_days:
            outlived.append((partial(leftovers.outlived_results, days=settings.retention_days), "finished_at"))
        self._outlived = [
            _Removal(
                find, by, self._store_of, self._remove_objects_of, leftovers.mark_result_removed, "result_outlived"
            )
            for find, by in outlived
        ]
        self._orphan_age = timedelta(seconds=settings.orphan_age_seconds)
        self._reap_from = float("-inf")
        # made once: SQLAlchemy takes longer to build them than to have them run
        self._end_dead_attempts = jobs.reap()
        self._expire_late_jobs = jobs.expire()
        self._expire_files = files.expire()
        self._forget_stale_replicas = replicas.forget_stale_replicas(lease_seconds=settings.lease_seconds)

    def sweep(self) -> bool:
        """End dead attempts, expire late jobs, forget silent replicas. Touches nothing else: what holds that up must
        not look like an outage.

        A database that was away took no renewal from anybody: when it is back, replicas get time to say that they
        live before their attempts are ended and count as crashes.

        Returns:
            Whether dead attempts were ended, if there were any: not within that time.
        """
        is_reaping = time.monotonic() >= self._reap_from
        try:
            if is_reaping:
                self._reap()
            self._expire()
        except DBAPIError:
            self._reap_from = time.monotonic() + _AFTER_OUTAGE_SECONDS
            raise
        return is_reaping

    def purge(self) -> None:
        """Remove the objects of deleted jobs and what is in their rows of the request; and those of files that were
        deleted or have had their time."""
        self._remove_objects(self._deleted_jobs)
        with self._engine.begin() as connection:
            expired = connection.scalars(self._expire_files).all()
        for file_id in expired:
            log.info("file_expired", file_id=file_id)
        self._remove_objects(self._deleted_files)

    def purge_again(self) -> None:
        """Remove what an attempt that had lost its lease may have stored after its deleted job was purged.

        Raises:
            StorageError: some may be left. The first of them.
        """
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            purged = session.scalars(leftovers.purged_lately(hours=_PURGED_AGAIN_HOURS)).all()
        failures = self._failures_of_pass()
        for job in purged:
            outcome = _try(job, self._store_of(job), self._remove_objects_of, failures)
            if not isinstance(outcome, int):
                self.num_unsure += 1
                if outcome is not None:
                    log.warning("late_objects_may_stay", error=_line(outcome), **_named(job))
            elif outcome:
                log.info("late_objects_removed", job_id=job.id, count=outcome)
        if failures.first is not None:
            raise failures.first

    def tidy(self) -> list[str]:
        """Remove what has had its time: old keys, deliveries of webhooks, events and dry runs, idle shares, unfinished
        uploads, clips beyond retention.

        What fails is logged and left to the next pass; the rest is done all the same. The names of what failed.
        """
        failed: list[str] = []
        # an event stays for as long as its deliveries
        webhooks = (self._forget_deliveries, self._forget_events)
        rows = (self._forget_keys, *webhooks, self._forget_dry_runs, self._forget_idle_shares)
        for step in (*rows, self._abort_uploads, self._remove_outlived):
            try:
                step()
            except (DBAPIError, StorageError) as error:
                failed.append(step.__name__.strip("_"))
                log.warning("tidy_failed", step=failed[-1], error=str(error).splitlines()[0])
        return failed

    def orphans(self, *, delete: bool) -> Iterator[Orphan]:
        """Every orphan that is old enough, found page by page; `delete` removes a page before it is handed out.

        A result key names its attempt's fence. The attempt can still complete only while the row holds that fence under
        a lease, and rows are read after the listing: an object that is an orphan then stays one.
        """
        places: list[tuple[str, ObjectStore, Callable[[list[StoredItem]], list[Orphan]]]] = [
            (RESULTS, store, partial(self._orphaned_results, store.bucket)) for store in self._store.buckets
        ]
        # a file gets its row within seconds of its object, or never
        places.append((FILES, self._store, self._orphaned_files))
        failures: list[StorageError] = []
        for prefix, store, sift in places:
            try:
                yield from self._orphans_below(prefix, store, sift, delete=delete)
            except StorageError as error:
                # what is in the others is found all the same
                failures.append(error)
        _raise_first(failures)

    def close(self) -> None:
        self._engine.dispose()

    def _reap(self) -> None:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            ended = session.scalars(self._end_dead_attempts).all()
        for job in ended:
            log.warning(
                "lease_expired", job_id=job.id, attempt=job.attempt, state=job.state, crash_count=job.crash_count
            )

    def _expire(self) -> None:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            expired = session.scalars(self._expire_late_jobs).all()
            forgotten = session.scalars(self._forget_stale_replicas).all()
        for job in expired:
            log.info("job_expired", job_id=job.id)
        for replica_id in forgotten:
            log.info("replica_forgotten", replica=replica_id)

    def _failures_of_pass(self) -> _Failures:
        # all that a patient one does is one pass
        return self._failures if self._is_patient else _Failures(is_patient=False)

    def _store_of(self, job: Job) -> ObjectStore:
        return self._store.in_bucket(Destination.of(job.request).bucket)

    def _remove_objects_of(self, job: Job) -> int:
        prefix = Destination.of(job.request).prefix(job.project, job.id)
        store = self._store_of(job)
        count = self._remove_below(prefix, store)
        if job.result is not None:
            of_result = self._store.in_bucket(bucket_of_result(job.request, job.result))
            if of_result.bucket != store.bucket or not job.result["key"].startswith(prefix):
                count += self._remove_below(_folder(job.result["key"]), of_result)
        return count

    def _remove_below(self, prefix: str, store: ObjectStore) -> int:
        try:
            return store.delete_prefix(prefix)
        except BucketMissing:
            if store.is_used:
                raise
            # no bucket of this deployment any more, and removed with all that was in it
            return 0

    def _orphans_below(
        self, prefix: str, store: ObjectStore, sift: Callable[[list[StoredItem]], list[Orphan]], *, delete: bool
    ) -> Iterator[Orphan]:
        before = datetime.now(UTC) - self._orphan_age
        for page in store.list_pages(prefix):
            orphans = sift([item for item in page if item.modified < before])
            if delete:
                store.delete_keys([orphan.key for orphan in orphans])
                for orphan in orphans:
                    log.info("orphan_removed", key=orphan.key, num_bytes=orphan.num_bytes)
            yield from orphans

    def _orphaned_results(self, bucket: str, items: list[StoredItem]) -> list[Orphan]:
        # a key of another form is not ours to judge
        matches = [(item, match) for item in items if (match := _RESULT_KEY.fullmatch(item.key))]
        if not matches:
            return []
        with self._engine.begin() as connection:
            found = connection.execute(leftovers.owners_of_objects([match["job_id"] for _, match in matches])).all()
        usual = self._store.bucket
        # by-products lie beside the clip
        kept_folders = {
            _folder(result["key"])
            for _, _, _, result, request in found
            if result is not None and (bucket_of_result(request, result) or usual) == bucket
        }
        held = {(job_id, fence) for job_id, state, fence, _, _ in found if state in LEASED_STATES}
        # another bucket may be shared with others, whose jobs are not known here
        known = {job_id for job_id, *_ in found} if bucket != usual else None
        return [
            Orphan(bucket, item.key, item.num_bytes, item.modified)
            for item, match in matches
            if match["folder"] not in kept_folders
            and (match["job_id"], int(match["fence"])) not in held
            and (known is None or match["job_id"] in known)
        ]

    def _orphaned_files(self, items: list[StoredItem]) -> list[Orphan]:
        matches = [(item, match["file_id"]) for item in items if (match := _FILE_KEY.fullmatch(item.key))]
        if not matches:
            return []
        with self._engine.begin() as connection:
            known = set(connection.scalars(files.known([file_id for _, file_id in matches])))
        return [
            Orphan(self._store.bucket, item.key, item.num_bytes, item.modified)
            for item, file_id in matches
            if file_id not in known
        ]

    def _remove_outlived(self) -> None:
        for removal in self._outlived:
            self._remove_objects(removal)

    def _remove_object_of(self, file: File) -> int:
        self._store.delete_keys([file_key(file.project, file.id)])
        return 1

    def _remove_objects(self, removal: _Removal[_Owner]) -> None:
        """Remove the objects of every job or file that is found, and mark each.

        One whose objects stay is passed over until all others were tried: locked objects must not hold up others,
        however many they are.
        """
        failures = self._failures_of_pass()
        while self._is_patient or failures.num < _MAX_FAILURES:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                found = session.scalars(removal.find(after=removal.after)).all()
            if not found:
                removal.after = None
                return
            for row in found:
                outcome = _try(row, removal.store_of(row), removal.remove, failures)
                if not isinstance(outcome, int):
                    self.num_stuck += 1
                    if outcome is not None:
                        log.warning("objects_stay", error=_line(outcome), **_named(row))
                else:
                    with self._engine.begin() as connection:
                        connection.execute(removal.mark(row.id))
                    log.info(removal.event, **_named(row))
                removal.after = getattr(row, removal.by), row.id

    def _forget_keys(self) -> None:
        while True:
            with self._engine.begin() as connection:
                if not connection.execute(leftovers.forget_idempotency_keys()).all():
                    return

    def _forget_deliveries(self) -> None:
        count = deliveries.MAX_AT_ONCE
        while count >= deliveries.MAX_AT_ONCE:
            with self._engine.begin() as connection:
                count = len(connection.execute(deliveries.forget()).all())
            if count:
                log.info("deliveries_forgotten", count=count)

    def _forget_events(self) -> None:
        after: int | None = 0
        while after is not None:
            with self._engine.begin() as connection:
                num_forgotten, after = connection.execute(leftovers.forget_events(after=after)).one()
            if num_forgotten:
                log.info("events_forgotten", count=num_forgotten)

    def _forget_dry_runs(self) -> None:
        with self._engine.begin() as connection:
            forgotten = connection.scalars(statements.forget_dry_runs()).all()
            for campaign_id in forgotten:
                connection.execute(statements.delete_input(campaign_id))
        for campaign_id in forgotten:
            log.info("dry_run_forgotten", campaign_id=campaign_id)

    def _abort_uploads(self) -> None:
        before = datetime.now(UTC) - self._orphan_age
        failures: list[StorageError] = []
        for store, prefix in (*((store, RESULTS) for store in self._store.buckets), (self._store, FILES)):
            try:
                for key in store.abort_uploads(prefix, before=before):
                    log.info("upload_aborted", key=key)
            except StorageError as error:
                # those of the others are ended all the same
                failures.append(error)
        _raise_first(failures)

    def _forget_idle_shares(self) -> None:
        try:
            with self._engine.begin() as connection:
                # everybody who accepts or claims a job waits behind this lock: better never than late
                connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
                connection.execute(leftovers.lock_shares())
                connection.execute(leftovers.forget_idle_shares())
        except OperationalError as error:
            log.debug("shares_busy", error=str(error).splitlines()[0])


def _try(
    row: _Owner, store: ObjectStore, remove: Callable[[_Owner], int], failures: _Failures
) -> int | StorageError | None:
    """How many objects of a job or file in this bucket were removed, or why they may stay; None where that is told of
    the bucket already."""
    if (error := failures.left_alone(store)) is not None:
        # the next pass may come to it, and would name it again and again
        return error if failures.is_patient else None
    try:
        return remove(row)
    except StorageError as failure:
        failures.add(store, failure)
        return failure


def _line(error: StorageError) -> str:
    return str(error).splitlines()[0]


def _named(row: Job | File) -> dict[str, str]:
    return {"job_id" if isinstance(row, Job) else "file_id": row.id}


def _raise_first(failures: list[StorageError]) -> None:
    if failures:
        raise failures[0]


def _folder(key: str) -> str:
    """Prefix of everything that lies beside the object with this key."""
    return key.rpartition("/")[0] + "/"
