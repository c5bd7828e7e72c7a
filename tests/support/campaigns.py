"""Campaigns in tests: files in the store, rows, and the processes that load and end them, called turn by turn."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rushes_core import claims, jobs
from rushes_core.campaigns import closing
from rushes_core.campaigns.foresight import Foresight
from rushes_core.campaigns.tables import Campaign, CampaignCount, CampaignLineError
from rushes_core.database import create_sync_engine
from rushes_core.ids import new_campaign_id, new_file_id
from rushes_core.models import File, Job
from rushes_core.object_keys import file_key
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_core.states import LEASED_STATES, JobState
from rushes_core.storage import ObjectStore
from rushes_worker.campaigns.ender import Ender
from rushes_worker.campaigns.loader import Loader
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import ERROR, RESULT, JobRows

TABLES = (
    "jobs, job_attempts, job_events, outbox, project_shares, files, campaigns, campaign_counts, campaign_line_errors, "
    "campaign_forecasts"
)


COST = 107 * 480 * 480 // 10_000
"""Of a line of `openai_line`."""


def jsonl(*lines: Any) -> bytes:
    """A file of these lines: bytes as they are, anything else as JSON."""
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def openai_line(number: int, **body: Any) -> dict[str, Any]:
    """A line of an OpenAI batch file."""
    return {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/videos",
        "body": {"prompt": f"gull number {number}", "seconds": "4", "size": "480x480", "seed": number, **body},
    }


class Campaigns:
    """One database and bucket."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = create_sync_engine(settings)
        self.store = ObjectStore(settings)
        self.model = ServedModel.load(settings)
        self.jobs = JobRows(self.engine)

    def close(self) -> None:
        self.engine.dispose()

    def clear(self) -> None:
        self.execute(f"TRUNCATE {TABLES}")

    def execute(self, statement: Any, **parameters: Any) -> Any:
        with self.engine.begin() as connection:
            result = connection.execute(text(statement) if isinstance(statement, str) else statement, parameters)
            return result.all() if result.returns_rows else None

    def upload(self, data: bytes, *, filename: str = "lines.jsonl", project: str = "default") -> File:
        """A file as `POST /v1/files` leaves it."""
        file_id = new_file_id()
        upload = self.store.begin(file_key(project, file_id), max_bytes=len(data))
        upload.write(data)
        upload.complete()
        upload.close()
        file = File(
            id=file_id,
            project=project,
            purpose="batch",
            filename=filename,
            bytes=upload.num_bytes,
            sha256=upload.sha256,
        )
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            session.add(file)
        return file

    def submit(self, data: bytes, *, filename: str = "lines.jsonl", **values: Any) -> str:
        """A new campaign of this file; its id."""
        project = values.pop("project", "default")
        file = self.upload(data, filename=filename, project=project)
        campaign_id = new_campaign_id()
        with Session(self.engine) as session, session.begin():
            session.add(
                Campaign(id=campaign_id, project=project, model=self.model.name, input_file_id=file.id, **values)
            )
        return campaign_id

    def loader(self, **changes: Any) -> Loader:
        settings = self.settings.model_copy(update=changes)
        return Loader(settings, self.model, self.engine, owner="test")

    def load(self, **changes: Any) -> None:
        """Load everything that there is to be loaded."""
        loader = self.loader(**changes)
        while loader.turn():
            pass

    def load_chunk(self) -> None:
        """Load what is loaded before it is looked whether to stop."""
        loader = self.loader()
        loader.stop()
        assert loader.turn()

    def end(self) -> None:
        """Close, retry, delete and finish whatever can be."""
        ender = Ender(self.settings, self.model, self.engine, owner="test")
        while ender.turn():
            pass

    def loaded(self, data: bytes, **values: Any) -> str:
        campaign_id = self.submit(data, **values)
        self.load()
        return campaign_id

    def foresee(self) -> None:
        """What a dispatcher does every few seconds."""
        Foresight(self.engine, seen_within_seconds=60).look()

    def read(self, campaign_id: str) -> Campaign:
        with Session(self.engine, expire_on_commit=False) as session:
            return session.get_one(Campaign, campaign_id)

    def items(self, campaign_id: str) -> list[Job]:
        with Session(self.engine, expire_on_commit=False) as session:
            return list(session.scalars(select(Job).where(Job.campaign_id == campaign_id).order_by(Job.line)))

    def bad_lines(self, campaign_id: str) -> dict[int, CampaignLineError]:
        with Session(self.engine, expire_on_commit=False) as session:
            rows = session.scalars(select(CampaignLineError).where(CampaignLineError.campaign_id == campaign_id))
            return {row.line: row for row in rows}

    def counts(self, campaign_id: str) -> dict[str, int]:
        """Its counters; those that are zero are left out. They are those that counting its rows gives."""
        names = ("queued", "in_progress", "completed", "failed", "cancelled", "expired", "invalid", "remaining_cost")
        sums = [func.coalesce(func.sum(getattr(CampaignCount, name)), 0) for name in names]
        with self.engine.connect() as connection:
            row = connection.execute(select(*sums).where(CampaignCount.campaign_id == campaign_id)).one()
        kept = {name: int(value) for name, value in zip(names, row, strict=True) if value}
        assert kept == self._counted(campaign_id)
        return kept

    def _counted(self, campaign_id: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for job in self.items(campaign_id):
            name = "in_progress" if job.state in LEASED_STATES else job.state.value
            found[name] = found.get(name, 0) + 1
            if not job.state.is_final:
                cost = job.num_frames * job.width * job.height // 10_000
                found["remaining_cost"] = found.get("remaining_cost", 0) + cost
        bad = len(self.bad_lines(campaign_id))
        return found | ({"invalid": bad} if bad else {})

    def open(self, campaign_id: str, *lines: int) -> None:
        """Let these lines be claimed, as the feeder does."""
        with Session(self.engine) as session, session.begin():
            session.execute(
                update(Job).where(Job.campaign_id == campaign_id, Job.line.in_(lines)).values(hold=None, priority=0)
            )

    def run(self, campaign_id: str, line: int, *, code: str | None = None) -> None:
        """Run one line to its end: completed, or failed with this code."""
        self.open(campaign_id, line)
        job = self.start(line)
        assert job.fence is not None
        if code is None:
            self.jobs.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={}))
        else:
            self.jobs.run(jobs.fail(job.id, fence=job.fence, error={**ERROR, "code": code}))

    def start(self, line: int) -> Job:
        """The one open job, which is of this line, running."""
        job = self.jobs.run(claims.claim(model=self.model.name, owner="worker", lease_seconds=60))
        assert job is not None
        assert job.line == line
        return self.jobs.run(jobs.start(job.id, fence=job.fence, lease_seconds=60))

    def stop(self, campaign_id: str) -> None:
        """What cancelling it does in the request's transaction."""
        with Session(self.engine) as session, session.begin():
            for statement in closing.request_stop(campaign_id):
                session.execute(statement)

    def content(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file of results."""
        assert file_id is not None
        with Session(self.engine) as session:
            file = session.get_one(File, file_id)
            key, num_bytes = file_key(file.project, file.id), file.bytes
        data = b"".join(self.store.read(key, 0, num_bytes - 1))
        return [json.loads(line) for line in data.splitlines()]

    def events(self, campaign_id: str) -> list[str]:
        """Types of the events of a campaign, in their order."""
        rows = self.execute("SELECT type FROM outbox WHERE job_id = :id ORDER BY id", id=campaign_id)
        return [row.type for row in rows]

    def states(self, campaign_id: str) -> Mapping[JobState, Iterable[int]]:
        """Lines by the state of their job."""
        found: dict[JobState, list[int]] = {}
        for job in self.items(campaign_id):
            found.setdefault(job.state, []).append(job.line or 0)
        return found
