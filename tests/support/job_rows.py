"""Jobs as rows, moved by the statements of the job domain."""

from typing import Any

from rushes_core import claims, jobs, shares
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from support.new_jobs import insert_job
from support.waiting import wait_until

MODEL = "tiny"
RESULT: dict[str, Any] = {"bucket": "b", "key": "k", "bytes": 1, "sha256": "0" * 64}
ERROR: dict[str, Any] = {"code": "generation_failed", "message": "no"}


def wait_past_restart(engine: Engine) -> None:
    """Return when leases that ran out a moment ago are no longer put down to a restart of the server."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        up = text("SELECT now() > pg_postmaster_start_time() + interval '7 s'")
        wait_until(lambda: connection.execute(up).scalar_one())


class JobRows:
    """One short transaction a call, as the API and the workers make them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, statement: Any) -> Any:
        """Execute and commit; the one row that came back, or None."""
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            return session.execute(statement).scalar_one_or_none()

    def settle_shares(self) -> None:
        """What the dispatcher does every second."""
        for statement in (shares.forgive_lag(), shares.bound_lag(seen_within_seconds=60)):
            with self.engine.begin() as connection:
                connection.execute(statement)

    def add(self, **values: Any) -> Job:
        defaults: dict[str, Any] = {
            "id": new_video_id(),
            "project": "default",
            "model": MODEL,
            "prompt": "waves",
            "seed": 1,
            "width": 480,
            "height": 480,
            "num_frames": 107,
            "request": {"seconds": "4", "size_requested": None, "metadata": {}},
            "max_attempts": 3,
        }
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            return insert_job(session, **(defaults | values))

    def claim(self, owner: str = "worker", lease_seconds: float = 30) -> Job | None:
        return self.run(claims.claim(model=MODEL, owner=owner, lease_seconds=lease_seconds))

    def claimed(self, **values: Any) -> Job:
        """A new job, claimed. Nothing else may be queued."""
        added = self.add(**values)
        job = self.claim()
        assert job is not None
        assert job.id == added.id
        return job

    def running(self, lease_seconds: float = 30, **values: Any) -> Job:
        job = self.claimed(**values)
        started = self.run(jobs.start(job.id, fence=job.fence, lease_seconds=lease_seconds))
        assert started is not None
        return started

    def running_again(self) -> Job:
        """The one queued job, running."""
        job = self.claim()
        assert job is not None
        started = self.run(jobs.start(job.id, fence=job.fence, lease_seconds=30))
        assert started is not None
        return started

    def read(self, job_id: str) -> Job:
        with Session(self.engine, expire_on_commit=False) as session:
            return session.get_one(Job, job_id)
