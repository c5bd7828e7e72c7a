"""Ends campaigns: closes the jobs of those that are stopped, queues again what is to be retried, deletes the jobs of
deleted ones, and writes the files of those that are done. Any number may run.
"""

from rushes_core.campaigns import closing, events, statements
from rushes_core.campaigns.loading import STATEMENT_LIMIT, Lease, release, was_cut_off
from rushes_core.errors import StorageError
from rushes_core.log import get_logger
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from rushes_worker.campaigns.manifest import Manifest
from rushes_worker.campaigns.renewal import Renewal

log = get_logger(__name__)

STORE_RETRY_SECONDS = 5.0
"""How long a campaign is left alone whose files the store did not take."""


class Ender:
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
        self._deleted_to: dict[str, int] = {}
        """Lines of deleted campaigns up to which their jobs are deleted."""
        self._stopping = False

    def stop(self) -> None:
        """Return from `turn` after what is being done."""
        self._stopping = True

    def turn(self) -> bool:
        """Do a part of everything that is to be done. False: there was nothing."""
        return any([self._close(), self._retry(), self._finish(), self._delete()])

    def _close(self) -> bool:
        """Close a few thousand jobs of one campaign."""
        with self._engine.begin() as connection:
            connection.execute(closing.ask_leased())
        with self._engine.begin() as connection:
            connection.exec_driver_sql(STATEMENT_LIMIT)
            found = connection.execute(closing.to_close()).one_or_none()
            if found is None:
                return False
            count = connection.execute(closing.close_some(found.id, found.target, found.why)).scalar_one()
        if count:
            log.info("campaign_jobs_closed", campaign_id=found.id, count=count, state=found.target)
        # what another transaction holds is looked at again later
        return count > 0

    def _retry(self) -> bool:
        with self._engine.begin() as connection:
            connection.exec_driver_sql(STATEMENT_LIMIT)
            campaign_id = connection.execute(statements.wanting_retry(limit=1)).scalar_one_or_none()
            if campaign_id is None:
                return False
            count = connection.execute(statements.retry_some(campaign_id)).scalar_one()
            if count < statements.CHANGED_AT_ONCE:
                connection.execute(statements.retry_done(campaign_id))
        log.info("campaign_jobs_retried", campaign_id=campaign_id, count=count)
        return True

    def _delete(self) -> bool:
        with self._engine.begin() as connection:
            connection.exec_driver_sql(STATEMENT_LIMIT)
            campaign_id = connection.execute(statements.unpurged(limit=1)).scalar_one_or_none()
            if campaign_id is None:
                return False
            # not from the first line each time, past all that is deleted; but once more when the last one is reached
            after = self._deleted_to.pop(campaign_id, 0)
            lines = connection.execute(statements.delete_some(campaign_id, after=after)).scalars().all()
            is_done = False
            if lines:
                self._deleted_to[campaign_id] = max(line for line in lines if line is not None)
            elif not after:
                is_done = connection.execute(statements.purged(campaign_id)).rowcount > 0
        log.info("campaign_jobs_deleted", campaign_id=campaign_id, count=len(lines))
        # what another transaction holds is looked at again later
        return bool(lines or after) or is_done

    def _finish(self) -> bool:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            for resumed in session.execute(closing.go_on()).scalars():
                log.info("campaign_resumed", campaign_id=resumed)
            campaign = session.execute(closing.claim_ended(owner=self._owner)).scalar_one_or_none()
        if campaign is None:
            return False
        lease = Lease(campaign.id, campaign.fence)
        manifest = Manifest(campaign, self._settings, self._model, self._engine, self._store)
        try:
            # nobody can read the files of a deleted one
            with Renewal(lambda: self._renew(lease)) as renewal:
                is_whole = campaign.deleted_at is not None or manifest.write(
                    goes_on=lambda: not self._stopping and renewal.goes_on()
                )
            state = self._end(lease, manifest, is_cut_off=was_cut_off(campaign)) if is_whole else None
        except StorageError as error:
            log.warning("campaign_store_unavailable", campaign_id=campaign.id, error=str(error).splitlines()[0])
            manifest.discard()
            self._release(lease)
            return False
        except BaseException:
            manifest.discard()
            self._release(lease)
            raise
        if state is None:
            manifest.discard()
            self._release(lease)
            log.info("campaign_left", campaign_id=campaign.id)
        else:
            log.info("campaign_ended", campaign_id=campaign.id, state=state)
        return True

    def _end(self, lease: Lease, manifest: Manifest, *, is_cut_off: bool) -> str | None:
        """The state in which it ended; None: it goes on, or somebody else ends it."""
        with Session(self._engine) as session, session.begin():
            has_expired = manifest.has_expired or is_cut_off
            statement = closing.end(lease, has_expired=has_expired, files=manifest.columns)
            state = session.execute(statement).scalar_one_or_none()
            if state is not None:
                session.execute(events.tell(lease.campaign_id, f"batch.{state}"))
                manifest.publish(session)
            return state

    def _renew(self, lease: Lease) -> bool:
        """Whether there is still something to be written."""
        with self._engine.begin() as connection:
            return connection.execute(closing.renew_ended(lease)).one_or_none() is not None

    def _release(self, lease: Lease) -> None:
        with self._engine.begin() as connection:
            connection.execute(release(lease, after_seconds=STORE_RETRY_SECONDS))
