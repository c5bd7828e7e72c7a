"""The files that a campaign ends with: OpenAI's output and error files, streamed into the store."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rushes_core import files
from rushes_core.campaigns import output, statements
from rushes_core.campaigns.output import Item
from rushes_core.campaigns.tables import Campaign
from rushes_core.errors import StorageError
from rushes_core.ids import new_file_id
from rushes_core.log import get_logger
from rushes_core.models import Job
from rushes_core.object_keys import file_key
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import Upload
from rushes_core.video import Video, video_of
from sqlalchemy import Engine
from sqlalchemy.orm import Session

log = get_logger(__name__)

ITEMS_AT_ONCE = 1_000
_MAX_BYTES = 50 * 2**30
"""The most that a file can have: a million items of 50 KiB."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the two."""

    column: str
    name: str
    """Of the part in `statements.PARTS`, and what its filename ends with."""


PARTS = (Part("output_file_id", "output"), Part("error_file_id", "errors"))


class Manifest:
    """Both files of one campaign. What `write` stored is to be published or discarded."""

    def __init__(
        self, campaign: Campaign, settings: Settings, model: ServedModel, engine: Engine, store: ObjectStore
    ) -> None:
        self.columns: dict[str, str | None] = {part.column: None for part in PARTS}
        """Of the campaign: ids of the files that were written."""
        self.has_expired = False
        """Whether one of its jobs has."""
        self._campaign = campaign
        self._settings = settings
        self._model = model
        self._engine = engine
        self._store = store
        self._uploads: dict[Part, Upload] = {}
        self._may_be_known = False
        self._old = [getattr(campaign, part.column) for part in PARTS]

    def write(self, *, goes_on: Callable[[], bool]) -> bool:
        """Store both files, each unless it would be empty. False: `goes_on` broke that off.

        Args:
            goes_on: called before every `ITEMS_AT_ONCE` lines, whether to go on.

        Raises:
            StorageError
        """
        for part in PARTS:
            for items in self._items(part):
                if not goes_on():
                    return False
                upload = self._uploads.get(part)
                if upload is None:
                    upload = self._begin(part)
                upload.write(b"".join(output.lines(items, self._shown)))
            if part in self._uploads:
                self._uploads[part].complete()
        return True

    def publish(self, session: Session) -> None:
        """Make the files known, in place of those of an earlier end. The last statement before the commit."""
        campaign = self._campaign
        for part, upload in self._uploads.items():
            session.execute(
                files.create(
                    id=self.columns[part.column],
                    project=campaign.project,
                    purpose=files.OUTPUT,
                    filename=f"{campaign.id}_{part.name}.jsonl",
                    bytes=upload.num_bytes,
                    sha256=upload.sha256,
                    expires_after_seconds=campaign.output_seconds,
                )
            )
            upload.close()
        for old in filter(None, self._old):
            session.execute(files.delete_file(old, project=campaign.project))
        # the commit may take effect and its reply be lost
        self._may_be_known = True

    def discard(self) -> None:
        """Leave nothing in the store, unless it may be known; what stays and has no row is an orphan."""
        for upload in self._uploads.values():
            try:
                if not self._may_be_known:
                    upload.discard()
            except StorageError as error:
                log.warning("upload_stays", key=upload.key, error=str(error).splitlines()[0])
            upload.close()

    def _begin(self, part: Part) -> Upload:
        file_id = new_file_id()
        upload = self._store.begin(file_key(self._campaign.project, file_id), max_bytes=_MAX_BYTES)
        self.columns[part.column] = file_id
        self._uploads[part] = upload
        return upload

    def _items(self, part: Part) -> Iterator[list[Item]]:
        """In the order of lines, some at once."""
        states = statements.PARTS[part.name]
        has_bad_lines = part.name == "errors"
        after = 0
        while True:
            with Session(self._engine, expire_on_commit=False) as session:
                found: list[Item] = list(
                    session.scalars(
                        statements.jobs_from(self._campaign.id, after=after, limit=ITEMS_AT_ONCE, states=states)
                    )
                )
                bad: list[Item] = []
                if has_bad_lines:
                    bad = list(
                        session.scalars(statements.bad_lines_from(self._campaign.id, after=after, limit=ITEMS_AT_ONCE))
                    )
            # behind the last line of a full page there may be others of the same kind
            ends = [output.line_of(page[-1]) for page in (found, bad) if len(page) == ITEMS_AT_ONCE]
            until = min(ends, default=None)
            items = sorted(
                (item for item in (*found, *bad) if until is None or output.line_of(item) <= until), key=output.line_of
            )
            self.has_expired = self.has_expired or any(
                isinstance(item, Job) and item.state is JobState.EXPIRED for item in items
            )
            if items:
                yield items
            if until is None:
                return
            after = until

    def _shown(self, job: Job) -> Video:
        return video_of(job, self._model, retention_days=self._settings.retention_days)
