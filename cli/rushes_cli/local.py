"""All of Rushes on one machine: the embedded stack, an API, a dispatcher, a worker, a sender of webhooks and a loader
of campaigns.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import ValidationError
from rushes_core.contract import CONTRACT_FILE, load_contract
from rushes_core.prompt import PromptTokenizer
from rushes_core.setting_rules import problems
from rushes_core.settings import Settings
from rushes_worker.devices import find_devices
from rushes_worker.launcher import check_pipeline
from rushes_worker.layout import Layout
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.pipeline.options import check_devices_serve, check_options

from rushes_cli.main import UsageError, warn_of_unknown_variables
from rushes_cli.stack import EmbeddedStack, StackError
from rushes_cli.stack.ports import is_free
from rushes_cli.stack.process import Child

HOST = "127.0.0.1"
MAX_FAILURES_AT_START = 2
"""Ends of a worker's ranks or supervisors before it was ready, after which it is taken to be broken."""
_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class Parts:
    """What to run beside the servers.

    `checkpoint` None means the tiny one with random weights, which is written into the state directory once.
    """

    port: int
    layout: str = "r1s1"
    device: str = "auto"
    checkpoint: Path | None = None

    def check(self) -> None:
        """Look at settings, layout, devices and checkpoint, before anything is started for them.

        Raises:
            UsageError: a setting is wrong, or there is no such layout, or not on these devices.
            CheckpointError: the checkpoint cannot be served.
        """
        warn_of_unknown_variables()
        try:
            settings = _settings_but_for_servers()
            check_pipeline(settings.pipeline)
            options = check_options(settings)
            layout = Layout.parse(self.layout)
            EncoderSettings.of(settings, replicas=layout.replicas)
            check_devices_serve(options, find_devices(layout, self.device))
        except ValidationError as error:
            raise UsageError(f"settings: {problems(error, Settings)}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.checkpoint is not None:
            load_contract(self.checkpoint)
            PromptTokenizer(self.checkpoint / "tokenizer" / "tokenizer.json")


class LocalRushes:
    """Runs between `start` and `stop`; also a context manager."""

    def __init__(self, state_dir: Path, parts: Parts) -> None:
        self.stack = EmbeddedStack(state_dir)
        self._parts = parts
        self._env: dict[str, str] = {}
        self._worker: Child | None = None
        self._started_at = 0
        self._checked_at = 0.0

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self._parts.port}"

    @property
    def api_key(self) -> str:
        return self.stack.secrets.api_key

    @property
    def database_url(self) -> str:
        """What `RUSHES_DATABASE_URL` is for those parts, password and all."""
        return self._env["RUSHES_DATABASE_URL"]

    @property
    def bucket(self) -> str:
        return self._env["RUSHES_S3_BUCKET"]

    @property
    def checkpoint(self) -> Path:
        return (self._parts.checkpoint or self.stack.state_dir / "checkpoint").absolute()

    def start(self, say: Callable[[str], None]) -> None:
        """Start everything and return without waiting for the worker; `say` is told of each stage.

        Raises:
            StackError: a part could not be started; nothing is left running.
        """
        began = time.monotonic()
        self.stack.start()
        say(f"Postgres, Valkey and SeaweedFS run on {self.stack.state_dir} ({time.monotonic() - began:.1f} s)")
        try:
            if self._parts.checkpoint is None and not (self.checkpoint / CONTRACT_FILE).exists():
                self._run("checkpoint", "tiny", str(self.checkpoint), "--force")
                say(f"tiny checkpoint with random weights written to {self.checkpoint}")
            self._env = self._environment()
            self._run("migrate")
            self._start("api", "--host", HOST, "--port", str(self._parts.port))
            self._start("dispatcher")
            self._start("deliver")
            self._start("loader")
            self._started_at = int(time.time())
            self._worker = self._start("worker", "--layout", self._parts.layout, "--device", self._parts.device)
        except BaseException:
            self.stack.stop()
            raise

    def wait_until_ready(self, say: Callable[[str], None], *, timeout_seconds: float) -> None:
        """Return when a job sent now would be rendered; `say` is told every 10 seconds what is missing.

        Raises:
            StackError: a part ended, the worker ends again and again, or time is up.
        """
        deadline = time.monotonic() + timeout_seconds
        next_word = time.monotonic() + 10
        with httpx.Client(base_url=self.base_url, trust_env=False, timeout=10) as client:
            while (reason := _not_ready(client)) is not None:
                self.check_running(max_failures=MAX_FAILURES_AT_START)
                if time.monotonic() > deadline:
                    raise StackError(f"not ready after {timeout_seconds:g} s: {reason}; {self.last_words()}")
                if time.monotonic() > next_word:
                    say(f"waiting: {reason}")
                    next_word += 10
                time.sleep(0.1)

    def check_running(self, *, max_failures: int) -> None:
        """Look whether everything runs, and whether the worker renders or only starts its ranks again and again.

        Raises:
            StackError: a part ended, or so many rank groups or supervisors of the worker ended one after another; with
                the last lines of its log.
        """
        self.stack.check_running()
        if self._worker is None or time.monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        # what it says of a supervisor is an error, which every level of the log has
        ended = self._worker.output().count("supervisor_died")
        if ended >= max_failures:
            raise self._worker.failure(f"does not run: {ended} of its supervisors ended one after another")
        failures = self._failures_in_a_row()
        if failures >= max_failures:
            raise self._worker.failure(f"renders nothing: its ranks ended {failures} times one after another")

    def last_words(self) -> str:
        """The end of the worker's log."""
        return "no worker was started" if self._worker is None else self._worker.last_words()

    def stop(self) -> None:
        self.stack.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _failures_in_a_row(self) -> int:
        """Rank groups of a replica of this run that ended without a completed job between them, as far as one can be
        asked."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        try:
            with httpx.Client(base_url=self.base_url, headers=headers, trust_env=False, timeout=10) as client:
                answer = client.get("/v1/workers", params={"limit": 100}).raise_for_status()
        except httpx.HTTPError:
            return 0
        # a run before this one may have left some behind
        own = [worker for worker in answer.json()["data"] if worker["started_at"] >= self._started_at]
        return max((worker["failures_in_a_row"] for worker in own), default=0)

    def _environment(self) -> dict[str, str]:
        """This process's environment, pointed at the stack. What an operator set for a worker's tuning stays."""
        no_proxy = [HOST, "localhost", *filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy")])]
        defaults = {"RUSHES_SHUTDOWN_GRACE_SECONDS": "5", "RUSHES_WEBHOOK_KEY": self.stack.secrets.webhook_key}
        proxies = {name: ",".join(no_proxy) for name in ("NO_PROXY", "no_proxy")}
        places = {
            "RUSHES_S3_PUBLIC_ENDPOINT_URL": "",
            "RUSHES_S3_ADDRESSING_STYLE": "path",
            "RUSHES_API_ORIGIN": self.base_url,
            "RUSHES_API_KEY": self.api_key,
            "RUSHES_CHECKPOINT": str(self.checkpoint),
        }
        return defaults | dict(os.environ) | proxies | places | self.stack.settings_env

    def _start(self, command: str, *arguments: str) -> Child:
        return self.stack.spawn(command, _rushes(command, *arguments), env=self._env, cwd=self.stack.state_dir)

    def _run(self, command: str, *arguments: str) -> None:
        """Run a command of this program to its end."""
        self.stack.run(
            command, _rushes(command, *arguments), env=self._env or dict(os.environ), cwd=self.stack.state_dir
        )


def _settings_but_for_servers() -> Settings:
    """Those of the environment, with servers that do not exist in place of those that are to be started.

    Raises:
        ValidationError: one is wrong.
    """
    places: dict[str, Any] = {
        "database_url": f"postgresql+psycopg://{HOST}/rushes",
        "redis_url": f"redis://{HOST}/0",
        "s3_bucket": "rushes",
        "s3_endpoint_url": f"http://{HOST}",
        "s3_public_endpoint_url": "",
        "s3_addressing_style": "path",
        "api_origin": f"http://{HOST}",
        "checkpoint": Path("checkpoint"),
    }
    return Settings(**places)


def check_port_is_free(port: int) -> None:
    """Raises StackError when somebody listens there."""
    if not is_free(port):
        raise StackError(f"port {port} of {HOST} is taken; give another with --port")


def _rushes(*arguments: str) -> list[str]:
    # -P: the working directory is not a place to import from
    return [sys.executable, "-P", "-m", "rushes_cli", *arguments]


def _not_ready(client: httpx.Client) -> str | None:
    try:
        answer = client.get("/readyz")
    except httpx.TransportError:
        return "the API does not answer yet"
    if answer.status_code == 200:
        return None
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the API answers {answer.status_code}"
