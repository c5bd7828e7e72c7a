"""Campaigns as rows, whose jobs are opened by a feeder and moved by the statements of the job domain."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rushes_core import jobs, measured
from rushes_core.campaigns.feeding import Feeder
from rushes_core.campaigns.tables import Campaign
from rushes_core.models import Job
from sqlalchemy import Engine, Update, func, select, text, update
from sqlalchemy.orm import Session
from support.job_rows import ERROR, MODEL, RESULT, JobRows

SMALL = (480, 480, 107)
LARGE = (832, 480, 141)
TABLES = (
    "jobs, job_attempts, job_events, outbox, project_shares, replicas, measured_times, campaigns, campaign_counts, "
    "campaign_line_errors, campaign_forecasts, api_keys, api_key_usage, queue_pauses"
)

_ADD_JOBS = text("""
INSERT INTO jobs (id, project, api_key, hold, priority, model, prompt, seed, width, height, num_frames, request,
    campaign_id, line, max_attempts)
SELECT 'video_' || right(:campaign, 20) || lpad(line::text, 6, '0'), :project, :api_key, 'campaign', :priority, :model,
    'waves', line, width, height, num_frames, '{"seconds": "4", "metadata": {}}', :campaign, line, 3
FROM unnest(CAST(:width AS bigint[]), CAST(:height AS bigint[]), CAST(:num_frames AS bigint[]))
    WITH ORDINALITY AS lines (width, height, num_frames, line)
""")
_COUNTED = """
SELECT coalesce(sum(queued), 0)::int, coalesce(sum(in_progress), 0)::int, coalesce(sum(completed), 0)::int,
    coalesce(sum(failed), 0)::int, coalesce(sum(cancelled), 0)::int, coalesce(sum(expired), 0)::int,
    coalesce(sum(remaining_cost), 0)::int
FROM campaign_counts WHERE campaign_id = :campaign
"""
_REALLY = """
SELECT count(*) FILTER (WHERE state = 'queued'), count(*) FILTER (WHERE state IN ('claimed', 'running')),
    count(*) FILTER (WHERE state = 'completed'), count(*) FILTER (WHERE state = 'failed'),
    count(*) FILTER (WHERE state = 'cancelled'), count(*) FILTER (WHERE state = 'expired'),
    coalesce(sum(width * height * num_frames / 10000) FILTER (WHERE state IN ('queued', 'claimed', 'running')), 0)::int
FROM jobs WHERE campaign_id = :campaign
"""


def _began(job: Job, seconds: float) -> Update:
    return update(Job).where(Job.id == job.id).values(started_at=func.now() - timedelta(seconds=seconds))


class CampaignRows(JobRows):
    """`feeder` does one pass with each `feed`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.feeder = self.another_feeder()
        self._number = 0

    def another_feeder(self) -> Feeder:
        return Feeder(self.engine, seen_within_seconds=60, patience_seconds=600)

    def clear(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {TABLES} CASCADE"))

    def campaign(
        self,
        num_jobs: int = 20,
        *,
        project: str = "default",
        shapes: Sequence[tuple[int, int, int]] = (SMALL,),
        is_loaded: bool = True,
        **values: Any,
    ) -> str:
        """A campaign in progress whose lines take turns at `shapes`; its id."""
        self._number += 1
        campaign_id = f"batch_{self._number:026}"
        loaded = {"loaded_at": text("now()"), "in_progress_at": text("now()")} if is_loaded else {}
        columns = {"id": campaign_id, "project": project, "model": MODEL, "input_file_id": "file_x", **loaded, **values}
        with Session(self.engine) as session, session.begin():
            session.add(Campaign(state="in_progress", **columns))
            session.flush()
            lines = [shapes[number % len(shapes)] for number in range(num_jobs)]
            sizes = {
                name: [line[axis] for line in lines] for axis, name in enumerate(("width", "height", "num_frames"))
            }
            what = {"campaign": campaign_id, "project": project, "model": MODEL, "api_key": values.get("api_key")}
            session.execute(_ADD_JOBS, what | sizes | {"priority": values.get("priority", 2)})
        return campaign_id

    def feed(self) -> None:
        self.feeder.feed()

    def change(self, campaign_id: str, **values: Any) -> None:
        with Session(self.engine) as session, session.begin():
            session.execute(update(Campaign).where(Campaign.id == campaign_id).values(**values))

    def of(self, campaign_id: str) -> Campaign:
        with Session(self.engine, expire_on_commit=False) as session:
            return session.get_one(Campaign, campaign_id)

    def open_lines(self, campaign_id: str) -> list[int]:
        """Lines that may be claimed, in the order in which they would be."""
        found = (
            select(Job.line)
            .where(Job.campaign_id == campaign_id, Job.state == "queued", Job.hold.is_(None))
            .order_by(Job.run_at, Job.id)
        )
        with Session(self.engine) as session:
            return [line for line in session.scalars(found) if line is not None]

    def claimed_of(self, project: str) -> Job:
        """The next job of a project, which is claimed as its turn comes."""
        for _ in range(10):
            job = self.claim()
            if job is not None and job.project == project:
                return job
        raise AssertionError(f"no turn of {project} came")

    def start(self, job: Job) -> Job | None:
        return self.run(jobs.start(job.id, fence=job.fence or 0, lease_seconds=30))

    def claim_and_start(self) -> Job:
        job = self.claim()
        assert job is not None
        started = self.start(job)
        assert started is not None
        return started

    def complete(self, job: Job) -> None:
        assert self.run(jobs.complete(job.id, fence=job.fence or 0, result=RESULT, timings={})) is not None

    def complete_after(self, seconds: float, job: Job) -> None:
        """Complete the running job as one that has run for just so long."""
        with Session(self.engine) as session, session.begin():
            session.execute(_began(job, seconds))
            assert session.execute(jobs.complete(job.id, fence=job.fence or 0, result=RESULT, timings={})).one()

    def fail(self, job: Job) -> None:
        assert self.run(jobs.fail(job.id, fence=job.fence or 0, error=ERROR)) is not None

    def take(self, seconds: float, job: Job) -> Job:
        """The running job, as one that has run for so long."""
        return self.run(_began(job, seconds).returning(Job))

    def measure(self, shape: tuple[int, int, int] = SMALL, *, p50: float, p90: float, num_jobs: int = 50) -> None:
        """Have clips of a shape known to run so long."""
        columns = "model, width, height, num_frames, num_jobs, run_p50, run_p80, run_p90, phases"
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    f"INSERT INTO measured_times ({columns}) VALUES (:m, :w, :h, :n, :jobs, :p50, :p90, :p90, '{{}}')"
                ),
                dict(zip("mwhn", (MODEL, *shape), strict=True)) | {"jobs": num_jobs, "p50": p50, "p90": p90},
            )

    def measure_completed(self) -> None:
        """What the dispatcher does every few seconds."""
        with self.engine.begin() as connection:
            connection.execute(measured.measure())

    def replica(self, name: str = "worker", layout: str = "r1s1") -> None:
        """A replica that is up."""
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO replicas (id, pool, layout, model, device, state, epoch) "
                    "VALUES (:id, 'default', :layout, :model, 'cpu', 'ready', 1)"
                ),
                {"id": name, "layout": layout, "model": MODEL},
            )

    def events(self) -> list[str]:
        """Types of what was told of campaigns, the oldest first."""
        with self.engine.begin() as connection:
            told = text("SELECT type FROM outbox WHERE type LIKE 'batch.%' ORDER BY id")
            return list(connection.execute(told).scalars())

    def check_counts(self, campaign_id: str) -> None:
        """The counters are what is counted in the table of jobs."""
        with self.engine.begin() as connection:
            counted = connection.execute(text(_COUNTED), {"campaign": campaign_id}).one()
            assert tuple(counted) == tuple(connection.execute(text(_REALLY), {"campaign": campaign_id}).one())
