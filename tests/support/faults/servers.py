"""The embedded servers of a fault run: killed, frozen and started again on the ports and the data that they had."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from redis import Redis
from rushes_cli.stack import EmbeddedStack
from rushes_cli.stack.server import Server
from rushes_core.database import migrate
from sqlalchemy import make_url
from support.processes import descendants
from support.stack import libpq_url, s3_client, settings_of


class Servers:
    """Postgres, Valkey and SeaweedFS of one fault run. Main thread only."""

    def __init__(self, folder: Path) -> None:
        self._embedded = EmbeddedStack(folder)
        self._numbers = count(1)

    def __enter__(self) -> Self:
        self._embedded.start()
        migrate(settings_of(self._embedded.settings_env))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in ("postgres", "valkey", "seaweedfs"):
            with suppress(ProcessLookupError):
                self.send(name, signal.SIGCONT)
        self._embedded.stop()

    @property
    def env(self) -> dict[str, str]:
        return self._embedded.settings_env

    def fresh_env(self) -> dict[str, str]:
        """`RUSHES_*` variables of a migrated empty database, an empty Redis database and an empty bucket."""
        number = next(self._numbers)
        env = dict(self.env)
        url = make_url(env["RUSHES_DATABASE_URL"])
        with psycopg.connect(libpq_url(env, database="postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE fault_{number} TEMPLATE "{url.database}"')
        env["RUSHES_DATABASE_URL"] = url.set(database=f"fault_{number}").render_as_string(hide_password=False)
        env["RUSHES_REDIS_URL"] = env["RUSHES_REDIS_URL"].removesuffix("/0") + f"/{1 + number % 120}"
        with Redis.from_url(env["RUSHES_REDIS_URL"]) as redis:
            redis.flushdb()
        env["RUSHES_S3_BUCKET"] = f"fault-{number}"
        s3_client(env).create_bucket(Bucket=env["RUSHES_S3_BUCKET"])
        return env

    def drop(self, env: dict[str, str]) -> None:
        """Remove a database of `fresh_env`: a server that was killed reads every file that it has before it answers."""
        name = make_url(env["RUSHES_DATABASE_URL"]).database
        with psycopg.connect(libpq_url(env, database="postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def address(self, name: str) -> tuple[str, int]:
        """Host and port of a server."""
        return "127.0.0.1", self._server(name).port  # type: ignore[attr-defined]

    def send(self, name: str, number: signal.Signals) -> None:
        """Signal every process of a server."""
        child = self._server(name).child
        assert child is not None
        os.killpg(child.popen.pid, number)

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a server: SIGKILL, or SIGQUIT, which is an immediate shutdown of Postgres without its last writes."""
        child = self._server(name).child
        assert child is not None
        if number is signal.SIGKILL:
            os.killpg(child.popen.pid, number)
        else:
            child.popen.send_signal(number)
        child.popen.wait(30)

    def launch(self, name: str) -> None:
        """Start a stopped server on its port and data, and return when it answers."""
        server = self._server(name)
        server.child = None
        server._deadline = None
        server.launch()
        while not server.is_ready():
            time.sleep(0.02)

    def revive(self, name: str) -> None:
        """Start a server if it has ended, and return when it answers."""
        server = self._server(name)
        assert server.child is not None
        deadline = time.monotonic() + 10
        while server.child.poll() is None and not server.probe() and time.monotonic() < deadline:
            time.sleep(0.1)
        if server.child.poll() is not None:
            self.launch(name)

    def pids(self, name: str) -> list[int]:
        """Every process of a server."""
        child = self._server(name).child
        assert child is not None
        return [child.popen.pid, *descendants(child.popen.pid)]

    def restart(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.stop(name, number)
        self.launch(name)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Every process of a server is stopped; its connections stay open."""
        self.send(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(name, signal.SIGCONT)

    def redis(self) -> "Redis[Any]":
        """A client that may do everything."""
        return Redis.from_url(self.env["RUSHES_REDIS_URL"], socket_timeout=5)

    def connect(self, env: dict[str, str] | None = None) -> "psycopg.Connection[Any]":
        """An autocommit connection to the database of `env`."""
        return psycopg.connect(libpq_url(env or self.env), autocommit=True)

    def _server(self, name: str) -> Server:
        return next(server for server in self._embedded._servers if server.name == name)
