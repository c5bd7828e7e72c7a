"""Makes jobs of the lines of campaigns: one campaign at a time, read in one thread and written in another."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
from rushes_core import files
from rushes_core.campaigns import closing, events, loading, statements
from rushes_core.campaigns.items import Terms
from rushes_core.campaigns.lines import BEGINNING, FileUnreadable, Position, Reader, format_of, no_requests, survey
from rushes_core.campaigns.loading import MAX_FAILURES, Lease
from rushes_core.campaigns.tables import Campaign
from rushes_core.errors import ObjectMissing, RushesError, StorageError
from rushes_core.ids import video_ids
from rushes_core.log import get_logger
from rushes_core.models import File
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from rushes_worker.campaigns.chunks import Chunk, chunks
from rushes_worker.campaigns.copying import copy_rows
from rushes_worker.campaigns.examination import Examination
from rushes_worker.campaigns.renewal import Renewal
from rushes_worker.campaigns.source import content_of

log = get_logger(__name__)

SLICE_SECONDS = 10.0
"""How long one campaign is loaded while another one waits for it."""
STORE_RETRY_SECONDS = 5.0
"""How long a campaign is left alone whose file the store did not give; after a fault of this service that long, and
`_LONGER` times as long after each further one."""
STORE_PATIENCE = timedelta(hours=24)
"""How long the store may fail to give a campaign's file, from the first time after it gave some of it."""
_LONGER = 4


class LeaseLost(Exception):
    """Another process has the campaign, or there is nothing to load any more."""


class Loader:
    """
    Args:
        owner: of leases, different from every other process's.
    """

    def __init__(self, settings: Settings, model: ServedModel, engine: Engine, *, owner: str) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._store = ObjectStore(settings)
        self._owner = owner
        self._stopping = False

    def stop(self) -> None:
        """Return from `turn` after the chunk that is being loaded."""
        self._stopping = True

    def turn(self) -> bool:
        """Load one campaign, or a part of it. False: there was none."""
        with self._engine.begin() as connection:
            for over in connection.execute(loading.cut_off()).scalars():
                log.info("campaign_cut_off", campaign_id=over)
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            campaign = session.execute(loading.claim(owner=self._owner, model=self._model.name)).scalar_one_or_none()
        if campaign is None:
            return False
        lease = Lease(campaign.id, campaign.fence)
        began = time.monotonic()
        try:
            with Renewal(lambda: self._renew(lease)) as renewal:
                is_done = self._load(campaign, lease, renewal)
        except FileUnreadable as error:
            self._fail(lease, [loading.file_error(error)])
        except LeaseLost:
            # it may be that of a campaign that somebody cancelled
            self._release(lease)
            log.info("campaign_left", campaign_id=campaign.id)
        except StorageError as error:
            log.warning("campaign_file_unavailable", campaign_id=campaign.id, error=str(error).splitlines()[0])
            self._note_store_failure(lease)
        except Exception as error:
            if _is_outage(error):
                self._release(lease, after_seconds=STORE_RETRY_SECONDS)
                raise
            # the other campaigns do not wait for this one
            log.exception("campaign_load_failed", campaign_id=campaign.id)
            self._note_failure(lease)
        except BaseException:
            self._release(lease)
            raise
        else:
            self._release(lease)
            seconds = round(time.monotonic() - began, 3)
            log.info("campaign_loaded" if is_done else "campaign_paused", campaign_id=campaign.id, seconds=seconds)
        return True

    def _load(self, campaign: Campaign, lease: Lease, renewal: Renewal) -> bool:
        """Whether all of it is loaded.

        Raises:
            FileUnreadable, LeaseLost, StorageError
        """

        def go_on() -> None:
            if not renewal.goes_on():
                raise LeaseLost

        file, priorities, last_id = self._look_up(campaign)
        content = content_of(file, self._store, self._settings, on_range=go_on)
        terms = Terms(
            model=self._model,
            defaults=campaign.defaults,
            priorities=priorities,
            buckets=self._settings.output_buckets,
        )
        try:
            if campaign.state == "validating":
                found = survey(content, max_lines=self._settings.campaign_max_lines)
                if not campaign.dry_run:
                    self._take_room(campaign, lease, found.num_lines)
            kind = campaign.input_format or format_of(content.head(), file.filename)

            def reader(start: Position) -> Reader:
                return Reader(content, kind=kind, start=start, max_line_bytes=self._settings.campaign_max_line_bytes)

            if campaign.dry_run or (campaign.strict and campaign.state == "validating"):
                examination = Examination(campaign, self._settings, self._engine, go_on=go_on)
                report = examination.run(chunks(reader(BEGINNING), terms, video_ids()))
                if not report["valid"] and not report["invalid"]:
                    raise no_requests()
                if campaign.dry_run:
                    self._report(lease, report)
                    return True
                if report["invalid"]:
                    self._fail(lease, report["errors"], report)
                    return True
            start = Position(campaign.loaded_bytes, campaign.loaded_lines)
            return self._write_all(campaign, lease, chunks(reader(start), terms, video_ids(last_id)))
        except ObjectMissing as error:
            raise FileUnreadable("the content of the file is no longer there", code="file_content_missing") from error

    def _look_up(self, campaign: Campaign) -> tuple[File, list[str] | None, str | None]:
        with Session(self._engine, expire_on_commit=False) as session:
            found = session.execute(files.get(campaign.input_file_id, project=campaign.project)).scalar_one_or_none()
            if found is None or found.deleted_at is not None:
                raise FileUnreadable(f"{campaign.input_file_id} was deleted", code="file_deleted")
            key = campaign.api_key
            priorities = None if key is None else session.execute(loading.priorities_of(key)).scalar_one_or_none()
            return found, priorities, session.execute(loading.last_id(campaign.id)).scalar_one_or_none()

    def _take_room(self, campaign: Campaign, lease: Lease, num_lines: int) -> None:
        limit = self._settings.campaign_max_queued
        with self._engine.begin() as connection:
            # another campaign of the project may be at the same place
            connection.execute(files.lock_project(campaign.project))
            num_queued = int(connection.execute(loading.num_queued(campaign.project, but=campaign.id)).scalar_one())
            if num_queued + num_lines > limit:
                raise FileUnreadable(
                    f"the campaigns of a project may have {limit} jobs waiting together; {num_queued} wait or are "
                    f"being loaded, and the file has {num_lines} lines",
                    code="queue_full",
                )
            if connection.execute(loading.note_lines(lease, num_lines)).one_or_none() is None:
                raise LeaseLost

    def _write_all(self, campaign: Campaign, lease: Lease, read: Iterator[Chunk]) -> bool:
        """While one chunk is written the next is read."""
        until = time.monotonic() + SLICE_SECONDS
        is_empty = campaign.state == "validating"
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:
            writing: Future[None] | None = None
            for chunk in read:
                if writing is not None:
                    writing.result()
                is_empty = is_empty and not chunk.has_items
                if chunk.is_last and is_empty:
                    raise no_requests()
                writing = writer.submit(self._write, campaign, lease, chunk)
                if chunk.is_last:
                    writing.result()
                    return True
                if self._stopping or (time.monotonic() > until and self._others_wait(campaign)):
                    writing.result()
                    return False
        raise AssertionError("the last chunk ends the file")

    def _write(self, campaign: Campaign, lease: Lease, chunk: Chunk) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql(loading.STATEMENT_LIMIT)
            terms = connection.execute(loading.terms(lease)).one_or_none()
            if terms is None:
                raise LeaseLost
            refused = list(chunk.refused)
            if chunk.loaded:
                connection.exec_driver_sql(loading.CREATE_CHUNK)
                copy_rows(connection, loading.COPY_CHUNK, map(loading.copied, chunk.loaded))
                insert = loading.insert_chunk(
                    campaign,
                    priority=terms.priority,
                    max_attempts=terms.max_attempts or self._settings.max_attempts,
                )
                if connection.execute(insert).rowcount < len(chunk.loaded):
                    refused += [
                        loading.duplicate(row.custom_id, line=row.line, first=row.first)
                        for row in connection.execute(loading.duplicates(campaign.id))
                    ]
            if refused:
                connection.execute(loading.refuse(campaign.id, refused))
            advance = loading.advance(
                lease, begin=chunk.begin, end=chunk.end, has_items=chunk.has_items, is_last=chunk.is_last
            )
            if connection.execute(advance).one_or_none() is None:
                raise LeaseLost

    def _others_wait(self, campaign: Campaign) -> bool:
        with self._engine.connect() as connection:
            statement = loading.is_any_to_load(model=self._model.name, but=campaign.id)
            return connection.execute(statement).scalar_one()

    def _report(self, lease: Lease, report: dict[str, Any]) -> None:
        with self._engine.begin() as connection:
            if connection.execute(loading.report(lease, report)).one_or_none() is None:
                raise LeaseLost
            connection.execute(events.tell(lease.campaign_id, "batch.completed"))
            connection.execute(statements.delete_input(lease.campaign_id))

    def _fail(self, lease: Lease, errors: list[dict[str, Any]], report: dict[str, Any] | None = None) -> None:
        with self._engine.begin() as connection:
            failed = connection.execute(loading.fail(lease, errors, report)).one_or_none()
            if failed is not None:
                connection.execute(events.tell(lease.campaign_id, "batch.failed"))
                if failed.dry_run:
                    connection.execute(statements.delete_input(lease.campaign_id))
            elif connection.execute(loading.break_off(lease, errors)).one_or_none() is not None:
                # lines that were readable have become jobs, some of which may have run
                for statement in closing.request_stop(lease.campaign_id):
                    connection.execute(statement)
            else:
                return
        log.info("campaign_failed", campaign_id=lease.campaign_id, code=errors[0]["code"])

    def _note_failure(self, lease: Lease) -> None:
        """Leave the campaign alone for a while, or give it up."""
        with self._engine.begin() as connection:
            failed = connection.execute(loading.note_failure(lease)).one_or_none()
        if failed is None:
            self._release(lease)
        elif failed.load_failures < MAX_FAILURES:
            self._release(lease, after_seconds=STORE_RETRY_SECONDS * _LONGER ** (failed.load_failures - 1))
        else:
            message = (
                f"The lines after line {failed.loaded_lines} could not be loaded in {failed.load_failures} attempts, "
                "by a fault of this service: its log has more."
            )
            error = {"code": RushesError.code, "message": message, "param": None, "line": failed.loaded_lines + 1}
            self._fail(lease, [error])

    def _note_store_failure(self, lease: Lease) -> None:
        """Leave the campaign alone for a while, or give it up."""
        with self._engine.begin() as connection:
            lasts = connection.execute(loading.note_store_failure(lease)).scalar_one_or_none()
        if lasts is not None and lasts > STORE_PATIENCE:
            self._fail(lease, [_unavailable()])
        else:
            self._release(lease, after_seconds=STORE_RETRY_SECONDS)

    def _renew(self, lease: Lease) -> bool:
        with self._engine.begin() as connection:
            return connection.execute(loading.renew(lease)).one_or_none() is not None

    def _release(self, lease: Lease, *, after_seconds: float = 0) -> None:
        with self._engine.begin() as connection:
            connection.execute(loading.release(lease, after_seconds=after_seconds))


def _unavailable() -> dict[str, Any]:
    hours = STORE_PATIENCE.total_seconds() / 3_600
    message = f"The object store has not given the file for {hours:g} hours."
    return {"code": StorageError.code, "message": message, "param": None, "line": None}


def _is_outage(error: Exception) -> bool:
    """Whether the database or the system did not do what was asked for, which it may do later."""
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        cause: BaseException | None = error.orig
    else:
        cause = error
    if isinstance(cause, psycopg.errors.ProgramLimitExceeded):
        return False
    return isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, OSError))
