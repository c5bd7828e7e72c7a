"""A small Rushes under fault: real processes, a client that writes everything down, and what is left at the end."""

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import psycopg
from psycopg.rows import dict_row
from redis import Redis
from rushes_core.settings import Settings
from rushes_worker.child import settings_environment
from sqlalchemy import make_url
from support.api import API_KEY
from support.checkpoints import tiny_checkpoint
from support.faults.client import Client, Load
from support.faults.history import History, load
from support.faults.processes import Api, Process, Worker
from support.faults.proxy import S3Proxy, TcpProxy
from support.faults.servers import Servers
from support.processes import descendants, is_alive
from support.stack import libpq_url, s3_client, settings_of

LEASE_SECONDS = 4
QUIESCE_SECONDS = 120.0
CAMPAIGN_TABLES = ("files", "campaigns", "campaign_counts", "campaign_line_errors")
TABLES = ("jobs", "job_attempts", "job_events", "outbox", "replicas", *CAMPAIGN_TABLES)
FINAL = ("completed", "failed", "cancelled", "expired")


class Cluster:
    """One fault run: fresh databases on running servers, and the processes that a scenario starts.

    Args:
        folder: keeps logs and `history.jsonl`.
        mutant: what is taken away from every process.
        patience: how many times as long as on a machine that has nothing else to do everything may take.
    """

    def __init__(self, servers: Servers, folder: Path, *, seed: int, mutant: str = "", patience: float = 1.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.servers = servers
        self.folder = folder
        self.random = random.Random(seed)
        self.seed = seed
        self.patience = patience
        self.env = servers.fresh_env()
        self.history = History(folder / "history.jsonl")
        self.recovery_seconds: float | None = None
        self.workers: list[Worker] = []
        self.parts: list[Process] = []
        self.dispatchers: list[Process] = []
        self.fault_env = {"FAULT_MUTANT": mutant} if mutant else {}
        self._checkpoint = tiny_checkpoint(folder)
        self._settings = self._settings_of(self.env)
        self._running = ExitStack()
        self._api_socket: Any = None
        self._processes: set[int] = set()

    def _settings_of(self, env: dict[str, str]) -> Settings:
        return settings_of(
            env,
            checkpoint=self._checkpoint,
            api_key=API_KEY,
            pipeline="support.faults.pipeline:FaultPipeline",
            scratch=self.folder / "scratch",
            poll_seconds=0.5,
            lease_seconds=LEASE_SECONDS,
            heartbeat_seconds=0.5,
            stage_timeout_seconds=6,
            start_timeout_seconds=60,
        )

    def move(self, folder: Path) -> None:
        """Use servers of this run alone, below `folder`, before anything is started."""
        self.servers = self._running.enter_context(Servers(folder))
        self.env = self.servers.fresh_env()
        self._settings = self._settings_of(self.env)

    def keep(self, context: AbstractContextManager[Any]) -> Any:
        """Enter `context` until the run is over."""
        return self._running.enter_context(context)

    def __enter__(self) -> Self:
        self._running.callback(self.history.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.resume()
        for process in [*self.workers, *self.parts]:
            if process.is_running:
                process.kill()
        with suppress(psycopg.Error):
            self.servers.drop(self.env)
        self._running.close()

    def settings(self, **changes: Any) -> Settings:
        """The settings of this run's processes, with `changes` of fields that exist."""
        known = {name: value for name, value in changes.items() if name in Settings.model_fields}
        return self._settings.model_copy(update=known)

    def proxy_postgres(self) -> TcpProxy:
        """A proxy before Postgres; give a part `database_url=through(proxy)`."""
        return self._running.enter_context(TcpProxy(*self.servers.address("postgres"), seed=self.seed))

    def proxy_redis(self) -> TcpProxy:
        return self._running.enter_context(TcpProxy(*self.servers.address("valkey"), seed=self.seed))

    def proxy_s3(self) -> S3Proxy:
        parts = urlsplit(self.env["RUSHES_S3_ENDPOINT_URL"])
        assert parts.port is not None
        return self._running.enter_context(S3Proxy("127.0.0.1", parts.port, seed=self.seed))

    def database_url(self, proxy: TcpProxy) -> str:
        url = make_url(self.env["RUSHES_DATABASE_URL"]).set(port=proxy.port)
        return url.render_as_string(hide_password=False)

    def redis_url(self, proxy: TcpProxy) -> str:
        url = self.env["RUSHES_REDIS_URL"]
        return url.replace(f":{self.servers.address('valkey')[1]}/", f":{proxy.port}/")

    def start_api(self, env: dict[str, str] | None = None, **changes: Any) -> Api:
        """Start an API process on the run's address."""
        import socket

        if self._api_socket is None:
            self._api_socket = self._running.enter_context(socket.create_server(("127.0.0.1", 0)))
        settings = self.settings(**changes)
        api = Api(settings, self.folder / "api.log", self.fault_env | (env or {}), self._api_socket.fileno())
        self.parts.append(api)
        return api

    def start_dispatcher(self, env: dict[str, str] | None = None, **changes: Any) -> Process:
        environment = settings_environment(self.settings(**changes)) | self.fault_env | (env or {})
        number = len(self.parts)
        process = Process(["support.faults.dispatcher"], environment, self.folder / f"dispatcher-{number}.log")
        self.parts.append(process)
        self.dispatchers.append(process)
        return process

    def start_loader(self, env: dict[str, str] | None = None) -> Process:
        """Start a loader; `FAULT_CHUNK_SECONDS` in `env` is how long each chunk takes it."""
        environment = settings_environment(self.settings()) | self.fault_env | (env or {})
        process = Process(["support.faults.loader"], environment, self.folder / f"loader-{len(self.parts)}.log")
        self.parts.append(process)
        return process

    def start_worker(self, env: dict[str, str] | None = None, *, layout: str = "r1s1", **changes: Any) -> Worker:
        """Start a worker; `changes` are settings."""
        name = f"w{len(self.workers)}"
        environment = {
            "FAULT_RENDERS": str(self.folder / "renders.jsonl"),
            "FAULT_ONCE": str(self.folder / "once"),
            **self.fault_env,
            **(env or {}),
        }
        settings = self.settings(**({"worker_name": name} | changes))
        worker = Worker(name, settings, self.folder / f"{name}.log", environment, layout=layout)
        self.workers.append(worker)
        return worker

    def start(self, *, workers: int = 2, layout: str = "r1s1", **changes: Any) -> None:
        """API, dispatcher and workers, ready."""
        self.start_api(**changes)
        self.start_dispatcher(**changes)
        for _ in range(workers):
            self.start_worker(layout=layout, **changes)
        self.wait_ready()

    def wait_ready(self, replicas: int | None = None) -> None:
        """Return when the API answers and every replica of every worker is ready, or as many as asked for."""
        wanted = replicas
        if wanted is None:
            wanted = sum(int(worker.layout[1]) for worker in self.workers if worker.is_running)
        if self.parts and self._api_socket is not None:
            _ = self.client
            self.until(self._api_answers, seconds=60)
        self.until(lambda: len(self.ready()) >= wanted, seconds=90)
        self._remember_processes()

    def ready(self) -> list[str]:
        """Replicas that say that they are ready."""
        query = "SELECT id FROM replicas WHERE state IN ('ready', 'busy') AND last_seen > now() - interval '3 seconds'"
        return [row["id"] for row in self.query(query)]

    def _api_answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.api_url}/healthz", timeout=2, trust_env=False).status_code == 200
        return False

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self._api_socket.getsockname()[1]}"

    @property
    def client(self) -> Client:
        if not hasattr(self, "_client"):
            self._client = Client(self.api_url, self.history)
            self._running.callback(self._client.close)
        return self._client

    def load(self, count: int, *, client: Client | None = None, **changes: Any) -> Load:
        """A load that has begun."""
        return Load(client or self.client, random.Random(self.random.random()), count, **changes).start()

    def limited_client(self, *, max_running: int) -> Client:
        """A client whose key of its own may have so many jobs running at once."""
        name = f"limited-{max_running}"
        key = self.client.ask("POST", "/v1/api_keys", project="default", name=name, max_running=max_running)
        self.meta(max_running={key["id"]: max_running})
        client = Client(self.api_url, self.history, secret=key["secret"], name=name)
        self._running.callback(client.close)
        return client

    # what a scenario looks at

    def query(self, sql: str, *arguments: Any) -> list[dict[str, Any]]:
        """Rows of the run's database, past every proxy. None while it is away."""
        with psycopg.connect(
            libpq_url(self.env), autocommit=True, row_factory=dict_row, connect_timeout=5
        ) as connection:
            return connection.execute(sql, arguments).fetchall()  # type: ignore[arg-type]

    def job(self, job_id: str) -> dict[str, Any]:
        (row,) = self.query("SELECT * FROM jobs WHERE id = %s", job_id)
        return row

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        return self.query("SELECT * FROM job_attempts WHERE job_id = %s ORDER BY fence", job_id)

    def wait_state(self, job_id: str, *states: str, seconds: float = 60) -> dict[str, Any]:
        self.until(lambda: self.job(job_id)["state"] in states, seconds=seconds)
        return self.job(job_id)

    def until(self, condition: Callable[[], Any], *, seconds: float = 60) -> Any:
        """The first true answer to `condition`, which has `patience` times as long.

        Raises:
            TimeoutError: there was none in time.
        """
        deadline = time.monotonic() + seconds * self.patience
        while True:
            try:
                if answer := condition():
                    return answer
            except psycopg.OperationalError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s: {condition}")
            time.sleep(0.05)

    def supervisor_of(self, job_id: str) -> int:
        """Process number of the supervisor that holds a job, from its replica's row."""
        (row,) = self.query(
            "SELECT r.detail FROM replicas r JOIN jobs j ON j.lease_owner = r.id WHERE j.id = %s", job_id
        )
        return int(row["detail"]["pid"])

    def worker_of(self, pid: int) -> Worker:
        return next(worker for worker in self.workers if pid in worker.supervisors)

    # what a scenario writes down

    def mark(self, name: str, **data: Any) -> None:
        self.history.add("mark", name=name, **data)

    def lifted(self, *, limit: float = 5.0) -> None:
        """The fault is over: ready work must be claimed within `limit` seconds, times `patience`, from here."""
        self.mark("lifted", limit=limit * self.patience)
        self._lifted = time.time()

    def expect(self, what: str, holds: object, detail: object = "", *, job: str | None = None) -> None:
        """Demand something that the invariants do not."""
        self.history.add("expect", "ok" if holds else "fail", job=job, what=what, holds=bool(holds), detail=str(detail))

    def meta(self, **values: Any) -> None:
        self.history.add("meta", row=values)

    # the end

    def quiesce(self) -> None:
        """Wait until every job and campaign has ended and deleted jobs are purged, as long as that may take."""
        with suppress(TimeoutError):
            self.until(self._is_at_rest, seconds=QUIESCE_SECONDS)

    def _is_at_rest(self) -> bool:
        (row,) = self.query(
            "SELECT count(*) FILTER (WHERE state NOT IN ('completed', 'failed', 'cancelled', 'expired')) AS open, "
            "count(*) FILTER (WHERE deleted_at IS NOT NULL AND purged_at IS NULL) AS unpurged, "
            "(SELECT count(*) FROM campaigns WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling')) "
            "AS active FROM jobs"
        )
        return not any(row.values())

    def finish(self) -> None:
        """Quiesce, stop everything, and write down what there is."""
        self.quiesce()
        with suppress(TimeoutError):
            self.until(lambda: self._redis()["unacked"] == 0 and self._redis()["hints"] == 0, seconds=8)
        self._remember_processes()
        self.history.add("dump.redis", **self._redis())
        descriptors = self._descriptors()
        for worker in self.workers:
            worker.resume()
            if worker.is_running:
                worker.send(signal.SIGTERM)
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(30)
        for part in self.parts:
            if part.is_running:
                part.send(signal.SIGTERM)
        for part in self.parts:
            try:
                part.wait(15)
            except subprocess.TimeoutExpired:
                part.kill()
        with suppress(TimeoutError):
            self.until(lambda: not any(map(is_alive, self._processes)), seconds=3)
        self.history.add(
            "dump.left",
            processes=sorted(filter(is_alive, self._processes)),
            files=sorted(str(path.name) for path in (self.folder / "scratch").glob("*/attempt-*")),
            uploads=self._uploads(),
            descriptors=descriptors,
        )
        self._dump_database()
        self._dump_objects()
        self._dump_logs()
        self._measure_recovery()

    def _remember_processes(self) -> None:
        for worker in self.workers:
            if worker.is_running:
                self._processes.update(descendants(worker.pid))

    def _descriptors(self) -> list[str]:
        """Supervisors that hold more files than any would in peace."""
        crowded = []
        for worker in self.workers:
            for pid in worker.supervisors if worker.is_running else []:
                with suppress(OSError):
                    number = len(os.listdir(f"/proc/{pid}/fd"))
                    if number > 120:
                        crowded.append(f"{worker.name}: {number}")
        return crowded

    def _redis(self) -> dict[str, int]:
        with Redis.from_url(self.env["RUSHES_REDIS_URL"], socket_timeout=5) as redis:
            return {"hints": redis.llen(self._settings.gpu_queue), "unacked": redis.hlen("unacked")}  # type: ignore[dict-item]

    def _uploads(self) -> list[str]:
        answer = s3_client(self.env).list_multipart_uploads(Bucket=self.env["RUSHES_S3_BUCKET"])
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    def _dump_database(self) -> None:
        present = {row["relname"] for row in self.query("SELECT relname FROM pg_class WHERE relkind = 'r'")}
        for table in TABLES:
            if table in present:
                if table == "outbox":
                    self.history.add("dump.has_outbox")
                for row in self.query(f"SELECT * FROM {table}"):
                    self.history.add(f"dump.{table}", row=row)
        (row,) = self.query("SELECT count(*) AS n FROM jobs")
        self.meta(num_rows=row["n"], seed=self.seed)

    def _dump_objects(self) -> None:
        client, bucket = s3_client(self.env), self.env["RUSHES_S3_BUCKET"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", ()):
                data = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
                digest = hashlib.sha256(data).hexdigest()
                self.history.add("dump.object", key=item["Key"], bytes=len(data), sha256=digest)

    def _dump_logs(self) -> None:
        from datetime import datetime

        for worker in self.workers:
            for record in worker.records():
                at = record.get("timestamp")
                t_wall = datetime.fromisoformat(at).timestamp() if at else None
                data = {name: value for name, value in record.items() if name not in ("timestamp", "trace")}
                self.history.add("log", proc=worker.name, job=record.get("job_id"), t_wall=t_wall, row=data)
        renders = self.folder / "renders.jsonl"
        if renders.exists():
            with self.history.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in load(renders))

    def _measure_recovery(self) -> None:
        """From the end of the fault to the first claim, unless the scenario measured something else."""
        lifted = getattr(self, "_lifted", None)
        if self.recovery_seconds is not None or lifted is None:
            return
        query = "SELECT min(at) AS at FROM job_events WHERE new_state = 'claimed' AND at > to_timestamp(%s)"
        (row,) = self.query(query, lifted)
        if row["at"] is not None:
            self.recovery_seconds = row["at"].timestamp() - lifted
