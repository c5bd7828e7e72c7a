"""Webhooks in tests: endpoints and jobs as rows, and senders that deliver what happens to them."""

import asyncio
import os
import signal
import subprocess
import threading
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.models import Job, OutboxEvent
from rushes_core.settings import Settings
from rushes_core.webhooks import deliveries, endpoints
from rushes_core.webhooks.guard import Guard, Lookup, look_up
from rushes_core.webhooks.signing import SigningSecret, Vault
from rushes_core.webhooks.tables import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookSecret
from rushes_worker.child import settings_environment
from rushes_worker.webhooks.sender import Sender
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session
from support.commands import RUSHES
from support.job_rows import ERROR, RESULT, JobRows
from support.waiting import wait_until

WEBHOOK_KEY = urlsafe_b64encode(b"k" * 32).decode()
ED25519_KEY = b64encode(b"e" * 32).decode()
LOCAL: dict[str, Any] = {"webhook_key": WEBHOOK_KEY, "webhook_loopback": True}
"""Settings with which receivers of tests may be told."""
TABLES = (
    "jobs, job_attempts, job_events, outbox, project_shares, "
    "webhook_attempts, webhook_deliveries, webhook_endpoints, webhook_secrets, "
    "campaigns, campaign_counts, campaign_line_errors, campaign_forecasts"
)


class Hooks:
    """Endpoints, jobs and deliveries of a database, one short transaction a call."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = create_sync_engine(settings, pool_size=2)
        self.jobs = JobRows(self.engine)
        self.vault = Vault(settings)
        self.guard = Guard(settings)

    def close(self) -> None:
        self.engine.dispose()

    def clear(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {TABLES}"))

    def register(
        self, url: str, *event_types: str, project: str = "default", secret: SigningSecret | None = None
    ) -> tuple[str, SigningSecret]:
        """A new endpoint, for the ends of jobs unless others are named: its id and its secret."""
        secret = secret or SigningSecret.new()
        types = list(event_types) or ["video.completed", "video.failed", "video.cancelled", "video.expired"]
        wanted = endpoints.NewEndpoint(name="test", url=url, event_types=types)
        values = endpoints.endpoint_values(wanted, self.guard.check_url(url), secret, self.vault)
        return self.jobs.run(endpoints.create(project=project, **values)).id, secret

    def project_secret(self, project: str = "default") -> SigningSecret:
        secret = SigningSecret.new()
        self.jobs.run(endpoints.rotate_secret(project, secret, vault=self.vault, keeps=False))
        return secret

    def add(self, url: str | None = None, *events: str, project: str = "default", **metadata: str) -> Job:
        """A queued job, with a `webhook_url` if one is given."""
        request: dict[str, Any] = {"seconds": "4", "size_requested": None, "metadata": metadata}
        if url is not None:
            types = list(events) or ["video.completed", "video.failed", "video.cancelled", "video.expired"]
            request["webhook"] = endpoints.job_webhook(self.guard.check_url(url), types, project=project)
        summary = None if url is None else deliveries.NOT_TOLD_YET
        return self.jobs.add(request=request, project=project, webhook=summary)

    def run(self) -> Job:
        """Start the one queued job."""
        return self.jobs.running_again()

    def complete(self, job: Job) -> Job:
        """Complete a running job."""
        assert job.fence is not None
        return self.jobs.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={}))

    def fail(self, job: Job, error: dict[str, Any] = ERROR) -> Job:
        assert job.fence is not None
        return self.jobs.run(jobs.fail(job.id, fence=job.fence, error=error))

    def report(self, job: Job, progress: int) -> None:
        assert job.fence is not None
        self.jobs.run(jobs.report(job.id, fence=job.fence, phase="denoising", completed_steps=1, progress=progress))

    def completed(self, url: str | None = None, **metadata: str) -> Job:
        """A job from its beginning to its end. Nothing else may be queued."""
        self.add(url, **metadata)
        return self.complete(self.run())

    def events(self) -> Sequence[OutboxEvent]:
        return self._all(select(OutboxEvent).order_by(OutboxEvent.id))

    def deliveries(self, **where: Any) -> Sequence[WebhookDelivery]:
        """In the order in which they were made."""
        return self._all(select(WebhookDelivery).filter_by(**where).order_by(WebhookDelivery.id))

    def delivery(self, **where: Any) -> WebhookDelivery:
        """The only one."""
        (found,) = self.deliveries(**where)
        return found

    def attempts(self, delivery_id: str) -> Sequence[WebhookAttempt]:
        return self._all(select(WebhookAttempt).filter_by(delivery_id=delivery_id).order_by(WebhookAttempt.number))

    def endpoint(self, endpoint_id: str) -> WebhookEndpoint:
        (found,) = self._all(select(WebhookEndpoint).filter_by(id=endpoint_id))
        return found

    def standing(self) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(deliveries.standing()).one()

    def endpoint_states(self) -> dict[str, int]:
        with self.engine.connect() as connection:
            return dict(connection.execute(endpoints.states()).all())

    def secrets(self) -> Sequence[WebhookSecret]:
        return self._all(select(WebhookSecret))

    def set_endpoint(self, endpoint_id: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id).values(**values))

    def make_due(self) -> None:
        """Have the time come of everything that is to be tried again, and pauses end."""
        with self.engine.begin() as connection:
            connection.execute(
                update(WebhookDelivery).where(WebhookDelivery.state == "pending").values(next_at=func.now())
            )
            connection.execute(
                update(WebhookEndpoint)
                .where(WebhookEndpoint.open_until.is_not(None))
                .values(open_until=func.now(), held_until=None)
            )

    def end_leases(self) -> None:
        """Have the leases of all senders run out."""
        with self.engine.begin() as connection:
            connection.execute(
                update(WebhookDelivery)
                .where(WebhookDelivery.state == "delivering")
                .values(lease_until=func.now() - text("interval '1 second'"))
            )

    def seconds_until_next(self, delivery_id: str) -> float:
        with self.engine.connect() as connection:
            seconds: float = connection.execute(
                text(
                    "SELECT extract(epoch FROM d.next_at - a.at)::float FROM webhook_deliveries AS d, LATERAL ("
                    "SELECT max(at) AS at FROM webhook_attempts WHERE delivery_id = d.id) AS a WHERE d.id = :id"
                ),
                {"id": delivery_id},
            ).scalar_one()
        return seconds

    def wait_for(self, state: str, **where: Any) -> WebhookDelivery:
        """The only delivery, once it is in this state."""
        wait_until(lambda: self.delivery(**where).state == state)
        return self.delivery(**where)

    def wait_attempts(self, count: int, **where: Any) -> WebhookDelivery:
        """The only delivery, once it was tried so often and waits or has ended."""

        def tried() -> bool:
            delivery = self.delivery(**where)
            return delivery.attempts >= count and delivery.state != "delivering"

        wait_until(tried)
        return self.delivery(**where)

    def _all(self, statement: Any) -> Sequence[Any]:
        with Session(self.engine, expire_on_commit=False) as session:
            return session.scalars(statement).all()


class SenderThread:
    """A sender in this process, for what a test has to change in it."""

    def __init__(self, settings: Settings, *, lookup: Lookup = look_up, **limits: int) -> None:
        self._settings = settings
        self._lookup = lookup
        self._limits = limits
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(self._settings, lookup=self._lookup, **self._limits)
        self._ready.set()
        await self._sender.run()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._sender.wake)

    def stop(self) -> None:
        """Ask it to end, and go on."""
        self._loop.call_soon_threadsafe(self._sender.stop)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # it may have ended
        with suppress(RuntimeError):
            self.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


class SenderProcess:
    """A running `rushes deliver`."""

    def __init__(self, settings: Settings, log: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*RUSHES, "deliver"],
                env=settings_environment(settings) | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.log.read_text())
        self.kill()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Ask it to stop, as an operator would; its exit status."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        return self._process.wait(30)

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGESIZE")
