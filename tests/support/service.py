"""A running Rushes for tests: API, dispatcher and worker as processes of their own, on the session's servers."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rushes_core.models import Job, Replica
from rushes_core.object_keys import job_prefix
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from rushes_worker.child import settings_environment
from support.api import AUTHORIZED, ApiProcess, JobDriver
from support.forked import Forked, preload
from support.stack import s3_client, settings_env
from support.worker import Jobs, Worker, eventually

REQUEST: dict[str, Any] = {
    "prompt": "Waves roll against a lighthouse at dusk while a gull calls",
    "seconds": "4",
    "size": "480x480",
    "seed": 7,
}
NUM_FRAMES = 107

preload("rushes_cli.main", "rushes_core.dispatcher", "rushes_worker.campaigns.process")

CALM = {"dispatch_seconds": 1.0}
"""Settings of a service that runs beside tests of other things: a dispatcher that looks four times a second takes a
tenth of a slow core."""

SMALL_CANVAS = "support.faults.canvas"
"""What an API imports that is to take 64x64; tests leave it to that: it changes the process that imports it."""

RENDER_SECONDS = 150.0
"""More than any job takes, on a machine that has other things to do, with an attempt that is lost."""

_FINAL_STATUS = {state.public_status for state in FINAL_STATES}


@dataclass(frozen=True, slots=True)
class Sample:
    """What a client saw of a job, between two looks at its row, and the replicas after that."""

    before: Job
    video: dict[str, Any]
    after: Job
    replicas: list[Replica]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A job from its first answer to its last one, and its clip."""

    posted: dict[str, Any] = field(repr=False)
    video: dict[str, Any] = field(repr=False)
    data: bytes = field(repr=False)
    samples: list[Sample] = field(default_factory=list, repr=False)
    """What was seen of it meanwhile, if it was watched."""

    @property
    def id(self) -> str:
        video_id: str = self.posted["id"]
        return video_id


class CommandProcess:
    """A running `rushes COMMAND`."""

    def __init__(self, settings: Settings, log: Path, command: str) -> None:
        self._process = Forked("rushes_cli.main", [command], env=settings_environment(settings), log=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Service:
    """Everything of Rushes between `with` and its end. Each part can be killed and started again."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        layout: str = "r1s1",
        worker_env: dict[str, str] | None = None,
        api_modules: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.jobs = Jobs(settings)
        self._driver = JobDriver(settings)
        self._folder = folder
        self._layout = layout
        self._worker_env = worker_env
        self._api_modules = api_modules
        self._running = ExitStack()
        self._bucket = s3_client(settings_env(settings))

    def __enter__(self) -> Self:
        self._running.callback(self.jobs.close)
        self._running.callback(self._driver.close)
        try:
            self.start_api()
            self.start_dispatcher()
            self.worker = self._running.enter_context(
                Worker(self.settings, self._folder / "worker.log", layout=self._layout, env=self._worker_env)
            )
            self.wait_ready()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    def start_api(self) -> None:
        """Start an API process, which takes the place of the one before."""
        self.api = self._running.enter_context(
            ApiProcess(self.settings, self._folder / "api.log", modules=self._api_modules)
        )
        self.http = self._running.enter_context(
            httpx.Client(base_url=self.api.url, headers=AUTHORIZED, timeout=60, trust_env=False)
        )

    def start_dispatcher(self) -> None:
        self.dispatcher = self._start("dispatcher")

    def loader(self) -> CommandProcess:
        """A process that loads campaigns and ends them, for a `with`."""
        return CommandProcess(self.settings, self._folder / "loader.log", "loader")

    def _start(self, command: str) -> CommandProcess:
        return self._running.enter_context(CommandProcess(self.settings, self._folder / f"{command}.log", command))

    def wait_ready(self) -> None:
        """Return when a job could be rendered, and none is."""
        num_replicas = int(self._layout[1 : self._layout.index("s")])
        eventually(lambda: self.http.get("/readyz").status_code == 200)
        self.jobs.wait_ready(num_replicas)

    def post(self, **changes: Any) -> dict[str, Any]:
        """The answer to `REQUEST` with `changes`; None leaves a field out."""
        body = {name: value for name, value in (REQUEST | changes).items() if value is not None}
        return _json(self.http.post("/v1/videos", json=body))

    def get(self, video_id: str) -> dict[str, Any]:
        return _json(self.http.get(f"/v1/videos/{video_id}"))

    def content(self, video_id: str) -> bytes:
        return self.http.get(f"/v1/videos/{video_id}/content").raise_for_status().content

    def watch(self, video_id: str) -> list[Sample]:
        """The job seen again and again until it is completed."""
        samples: list[Sample] = []

        def is_final() -> bool:
            before, video, after = self.jobs.get(video_id), self.get(video_id), self.jobs.get(video_id)
            samples.append(Sample(before, video, after, self.jobs.replicas()))
            return video["status"] in _FINAL_STATUS

        eventually(is_final, seconds=RENDER_SECONDS)
        assert samples[-1].video["status"] == "completed", samples[-1].video
        return samples

    def wait_completed(self, video_id: str) -> Job:
        """The row of the job once it is completed."""
        job = self.jobs.wait_for(video_id, *FINAL_STATES, seconds=RENDER_SECONDS)
        assert job.state is JobState.COMPLETED, job.error
        return job

    def render(self, *, watched: bool = False, **changes: Any) -> Rendered:
        """Post `REQUEST` with `changes`, wait for the clip and fetch it.

        Args:
            watched: the job is looked at all the time, which takes as long as a rank takes for a small clip.
        """
        posted = self.post(**changes)
        video_id = posted["id"]
        samples = self.watch(video_id) if watched else []
        self.wait_completed(video_id)
        video = samples[-1].video if samples else self.get(video_id)
        return Rendered(posted, video, self.content(video_id), samples)

    def num_rows(self) -> int:
        """Jobs that were ever accepted."""
        return self._driver.num_rows()

    def stored(self, video_id: str) -> dict[str, bytes]:
        """What lies in the bucket of a job, by key."""
        job = self.jobs.get(video_id)
        bucket = self.settings.s3_bucket
        listed = self._bucket.list_objects_v2(Bucket=bucket, Prefix=job_prefix(job.project, job.id))
        stored: dict[str, bytes] = {}
        for item in listed.get("Contents", ()):
            # what is being removed may be gone by now
            with suppress(self._bucket.exceptions.NoSuchKey):
                stored[item["Key"]] = self._bucket.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        return stored


def _json(response: httpx.Response) -> dict[str, Any]:
    assert response.is_success, response.text
    body: dict[str, Any] = response.json()
    return body
