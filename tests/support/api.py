"""The API in tests: settings without servers, multipart bodies, and a stand-in for the worker."""

import hashlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import uvicorn
from rushes_api.app import create_app
from rushes_core import claims, jobs, replicas
from rushes_core.database import create_sync_engine
from rushes_core.models import Job
from rushes_core.object_keys import Destination, result_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.variants import VARIANTS, VIDEO, Variant
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from support.forked import Forked, preload
from support.stack import settings_env
from support.waiting import wait_until

API_KEY = "test-key-0123456789"
preload("uvicorn", "rushes_api.server")

AUTHORIZED = {"Authorization": f"Bearer {API_KEY}"}


def offline_settings(checkpoint: Path, **values: Any) -> Settings:
    """Settings whose servers do not exist: nothing listens on port 1."""
    return Settings(
        **{
            "database_url": "postgresql+psycopg://nobody:nothing@127.0.0.1:1/none",
            "redis_url": "redis://127.0.0.1:1/0",
            "s3_bucket": "none",
            "s3_endpoint_url": "http://127.0.0.1:1",
            "s3_access_key_id": "nobody",
            "s3_secret_access_key": "nothing",
            "checkpoint": checkpoint,
            "api_key": API_KEY,
            **values,
        }
    )


def multipart(
    *parts: tuple[str, str | bytes], boundary: str = "frontier", headers: dict[str, str] | None = None
) -> tuple[bytes, dict[str, str]]:
    """A multipart body of text fields, and its header. `headers` are put on every part."""
    extra = "".join(f"\r\n{name}: {value}" for name, value in (headers or {}).items()).encode()
    body = b""
    for name, value in parts:
        data = value.encode() if isinstance(value, str) else value
        body += b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (
            boundary.encode(),
            name.encode(),
            extra,
            data,
        )
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


@contextmanager
def served(app: Any, protocol: type[Any], *, certificate: Path | None = None, port: int = 0) -> Iterator[int]:
    """The port of 127.0.0.1 at which a thread of this process serves `app`, by TLS with a certificate."""
    config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, access_log=False, ssl_certfile=certificate)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class JobDriver:
    """Moves jobs as a worker would, through the same statements, without one."""

    OWNER = "test:1"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = create_sync_engine(settings, pool_size=2)
        self.store = ObjectStore(settings)

    def close(self) -> None:
        self.engine.dispose()

    def row(self, job_id: str) -> Job | None:
        """The row as another connection sees it: only what is committed."""
        with Session(self.engine, expire_on_commit=False) as session:
            return session.get(Job, job_id)

    def num_rows(self) -> int:
        with Session(self.engine) as session:
            return session.execute(select(func.count()).select_from(Job)).scalar_one()

    def claim(self, job_id: str) -> Job:
        """Claim this job, whatever else is queued."""
        with self._transaction() as session:
            first = datetime.now(UTC) - timedelta(days=1)
            job = session.execute(update(Job).where(Job.id == job_id).values(run_at=first, priority=0).returning(Job))
            claim = claims.claim(model=job.scalar_one().model, owner=self.OWNER, lease_seconds=60)
            claimed = session.execute(claim).scalar_one()
        assert claimed.id == job_id
        return claimed

    def start(self, job_id: str) -> Job:
        fence = self._fence(self.claim(job_id))
        with self._transaction() as session:
            return session.execute(jobs.start(job_id, fence=fence, lease_seconds=60)).scalar_one()

    def report(self, job: Job, *, phase: str, completed_steps: int, progress: int) -> None:
        with self._transaction() as session:
            session.execute(
                jobs.report(
                    job.id,
                    fence=self._fence(job),
                    phase=phase,
                    completed_steps=completed_steps,
                    progress=progress,
                )
            )

    def complete(
        self, job_id: str, data: bytes, tmp: Path, *, is_stored: bool = True, variants: dict[str, bytes] | None = None
    ) -> Job:
        """Run the job to its end with `data` for a clip; `is_stored` False: the object is lost afterwards.

        Args:
            variants: what lies beside the clip, by name; None: the result is one of the release before there were any.
        """
        return self.finish(self.start(job_id), data, tmp, is_stored=is_stored, variants=variants)

    def finish(
        self, job: Job, data: bytes, tmp: Path, *, is_stored: bool = True, variants: dict[str, bytes] | None = None
    ) -> Job:
        """Complete a running job as `complete` does."""
        bucket = Destination.of(job.request).bucket or self.store.bucket
        result: dict[str, Any] = {"bucket": bucket, **self._store(job, VIDEO, data, tmp, is_stored)}
        if variants is not None:
            result["variants"] = {
                name: self._store(job, VARIANTS[name], content, tmp, is_stored) for name, content in variants.items()
            }
        with self._transaction() as session:
            statement = jobs.complete(job.id, fence=self._fence(job), result=result, timings={"denoising": 1.5})
            return session.execute(statement).scalar_one()

    def _store(self, job: Job, variant: Variant, data: bytes, tmp: Path, is_stored: bool) -> dict[str, Any]:
        destination = Destination.of(job.request)
        attempt, fence = job.attempt, self._fence(job)
        key = result_key(job.project, job.id, attempt, fence, variant.filename, key_prefix=destination.key_prefix)
        sha256 = hashlib.sha256(data).hexdigest()
        if is_stored:
            path = tmp / f"{job.id}{variant.extension}"
            path.write_bytes(data)
            store = self.store.in_bucket(destination.bucket)
            store.put_file(key, path, content_type=variant.content_type, sha256=sha256)
        return {"key": key, "bytes": len(data), "sha256": sha256, "content_type": variant.content_type}

    def fail(self, job_id: str, *, code: str, message: str) -> Job:
        job = self.start(job_id)
        self.report(job, phase="decoding", completed_steps=0, progress=0)
        with self._transaction() as session:
            error = {"code": code, "message": message, "stage": "decoding"}
            return session.execute(jobs.fail(job_id, fence=self._fence(job), error=error)).scalar_one()

    def release(self, job: Job) -> Job:
        """Give the running job back, as a worker that stops does."""
        with self._transaction() as session:
            return session.execute(jobs.release(job.id, fence=self._fence(job))).scalar_one()

    def lose(self, job_id: str) -> Job:
        """Lose the worker under the running job, so that it waits again."""
        job = self.start(job_id)
        with self._transaction() as session:
            statement = jobs.retry_or_fail(job_id, fence=self._fence(job), error=jobs.LEASE_LOST, crashed=True)
            return session.execute(statement).scalar_one()

    def report_replica(self, *, model: str, state: str) -> None:
        with self._transaction() as session:
            values = {"pool": "default", "layout": "r1s1", "device": "cpu", "epoch": 1}
            session.execute(replicas.upsert_replica(self.OWNER, model=model, state=state, **values))

    @staticmethod
    def _fence(job: Job) -> int:
        assert job.fence is not None
        return job.fence

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session


class ApiProcess:
    """The API as it is run in production: a uvicorn process of its own, on a socket that listens before it starts.

    Args:
        modules: what it imports before.
    """

    def __init__(self, settings: Settings, log: Path, *, modules: Sequence[str] = ()) -> None:
        self.log = log
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        log.unlink(missing_ok=True)
        env = os.environ | settings_env(settings)
        self._process = Forked("support.api_process", modules, env=env, log=log, listener=self._listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._listener.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask it to stop, as an operator would, and wait until it has."""
        self._process.terminate()
        self._process.wait(timeout=20)


class ThreadedApi:
    """The API on a socket of this process, for what a test has to change in it."""

    def __init__(self, settings: Settings) -> None:
        import uvicorn

        self.app = create_app(settings)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    @property
    def state(self) -> dict[str, Any]:
        """What its requests see."""
        return self._server.lifespan.state

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
