"""Manifests and archives of large campaigns: in bounded memory, beside other requests, and no longer than somebody
reads them."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from rushes_core.errors import StorageError
from rushes_core.ids import new_campaign_id
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from sqlalchemy import text
from support.api import API_KEY, AUTHORIZED, ApiProcess, ThreadedApi
from support.campaigns import Campaigns
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack
from support.waiting import wait_until

MEGABYTE = 1_048_576
CLIP = bytes(range(256)) * 8_192
_ADD = """
INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, campaign_id, line, custom_id,
    max_attempts, state, progress, attempt, started_at, finished_at, result)
SELECT 'video_01ARYZ6S41' || lpad(n::text, 16, '0'), 'default', :model, repeat('waves and gulls ', 20), n, 480, 480,
    107, '{"seconds": "4", "metadata": {"of": "a night"}}', :campaign, n, 'shot-' || n, 3, 'completed', 100, 1, now(),
    now(), CAST(:result AS jsonb)
FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS n
"""


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("streams"))
    return stack.settings(checkpoint=checkpoint, api_key=API_KEY)


@pytest.fixture(scope="module")
def campaigns(api_settings: Settings) -> Iterator[Campaigns]:
    campaigns = Campaigns(api_settings)
    yield campaigns
    campaigns.close()


@pytest.fixture(scope="module")
def api(api_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with ApiProcess(api_settings, tmp_path_factory.mktemp("process") / "api.log") as api:
        yield api


class Night:
    """A campaign that has ended, of jobs that have all the same clip."""

    def __init__(self, campaigns: Campaigns, count: int, folder: Path) -> None:
        self.id = new_campaign_id()
        self._campaigns = campaigns
        path = folder / "clip.mp4"
        path.write_bytes(CLIP)
        sha256 = hashlib.sha256(CLIP).hexdigest()
        self.key = f"results/default/{self.id}/clip.mp4"
        campaigns.store.put_file(self.key, path, content_type="video/mp4", sha256=sha256)
        result = {"bucket": campaigns.store.bucket, "key": self.key, "bytes": len(CLIP), "sha256": sha256}
        values = {"id": self.id, "model": campaigns.model.name}
        with campaigns.engine.begin() as connection:
            # jobs that nobody has run are no moves of the state machine
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            connection.exec_driver_sql(
                "INSERT INTO campaigns (id, project, model, input_file_id, state, loaded_at, completed_at) "
                "VALUES (%(id)s, 'default', %(model)s, 'file_x', 'completed', now(), now())",
                values,
            )
            number = connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar_one()
            wanted = {"campaign": self.id, "model": campaigns.model.name, "result": json.dumps(result)}
            connection.execute(text(_ADD), wanted | {"first": number + 1, "last": number + count})

    def url(self, api: ApiProcess | ThreadedApi, what: str) -> str:
        return f"{api.url}/v1/campaigns/{self.id}/{what}"


def resident(api: ApiProcess) -> int:
    return psutil.Process(api._process.pid).memory_info().rss  # pyright: ignore[reportPrivateUsage]


class Peak:
    """How much a process has grown at most, looked at with every piece that is read."""

    def __init__(self, api: ApiProcess) -> None:
        self._api = api
        self._before = resident(api)
        self.bytes = 0

    def look(self) -> None:
        self.bytes = max(self.bytes, resident(self._api) - self._before)


def warm_up(client: httpx.Client, api: ApiProcess, campaigns: Campaigns, folder: Path) -> None:
    small = Night(campaigns, 3, folder)
    for what in ("manifest", "manifest?format=csv", "archive"):
        client.get(small.url(api, what)).raise_for_status()


def test_a_manifest_takes_as_much_memory_as_a_page(api: ApiProcess, campaigns: Campaigns, tmp_path: Path) -> None:
    count = 20_000
    night = Night(campaigns, count, tmp_path)
    with httpx.Client(headers=AUTHORIZED, timeout=120) as client:
        warm_up(client, api, campaigns, tmp_path)
        peak = Peak(api)
        num_bytes, num_lines = 0, 0
        with client.stream("GET", night.url(api, "manifest")) as response:
            for piece in response.iter_bytes(MEGABYTE):
                peak.look()
                num_bytes += len(piece)
                num_lines += piece.count(b"\n")
    assert num_lines == count
    assert num_bytes > 20 * MEGABYTE
    assert peak.bytes < 16 * MEGABYTE


def test_an_archive_takes_as_much_memory_as_a_piece_of_a_clip(
    api: ApiProcess, campaigns: Campaigns, tmp_path: Path
) -> None:
    count = 60
    night = Night(campaigns, count, tmp_path)
    received = io.BytesIO()
    with httpx.Client(headers=AUTHORIZED, timeout=120) as client:
        warm_up(client, api, campaigns, tmp_path)
        peak = Peak(api)
        with client.stream("GET", night.url(api, "archive")) as response:
            for piece in response.iter_bytes(MEGABYTE):
                peak.look()
                received.write(piece)
    assert received.tell() > count * len(CLIP)
    assert peak.bytes < 32 * MEGABYTE
    with zipfile.ZipFile(received) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == count + 1


def test_what_nobody_reads_any_more_is_not_made(api_settings: Settings, campaigns: Campaigns, tmp_path: Path) -> None:
    night = Night(campaigns, 500, tmp_path)
    opened: list[str] = []

    class Counting(ObjectStore):
        def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
            opened.append(key)
            return super().read(key, start, end)

    with ThreadedApi(api_settings) as api, httpx.Client(headers=AUTHORIZED, timeout=60) as client:
        api.state["store"] = Counting(api_settings)
        with client.stream("GET", night.url(api, "archive")) as response:
            next(response.iter_bytes())
        wait_until(lambda: api.state["store_limiter"].borrowed_tokens == 0)
        num_opened = len(opened)
        # other requests go through the same threads and connections
        for _ in range(20):
            client.get(f"{api.url}/v1/campaigns/{night.id}").raise_for_status()
            assert client.get(f"{api.url}/v1/files?limit=1").status_code == 200
        assert len(opened) == num_opened
        assert 0 < num_opened < 100


def test_a_store_that_fails_in_the_middle_cuts_the_archive_short(
    api_settings: Settings, campaigns: Campaigns, tmp_path: Path
) -> None:
    night = Night(campaigns, 4, tmp_path)

    class Failing(ObjectStore):
        count = 0

        def read(self, key: str, start: int, end: int) -> Iterator[bytes]:
            Failing.count += 1
            if Failing.count == 3:
                raise StorageError("the store went away")
            return super().read(key, start, end)

    with ThreadedApi(api_settings) as api, httpx.Client(headers=AUTHORIZED, timeout=60) as client:
        api.state["store"] = Failing(api_settings)
        with client.stream("GET", night.url(api, "archive")) as response:
            assert response.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                response.read()


def test_readers_who_take_long_hold_nobody_up(api: ApiProcess, campaigns: Campaigns, tmp_path: Path) -> None:
    """Between two pages no connection to the database is held, and of the threads for the store none while it waits."""
    night = Night(campaigns, 300, tmp_path)
    with httpx.Client(headers=AUTHORIZED, timeout=60, limits=httpx.Limits(max_connections=80)) as client:
        with ExitStack() as streams:
            archives = [streams.enter_context(client.stream("GET", night.url(api, "archive"))) for _ in range(8)]
            assert [one.status_code for one in archives] == 4 * [200] + 4 * [503]
            assert archives[-1].headers["retry-after"]
            for _ in range(40):
                streams.enter_context(client.stream("GET", night.url(api, "manifest")))
            # one that is held up is refused after a while
            assert client.get(f"{api.url}/v1/campaigns/{night.id}").json()["status"] == "completed"
            assert client.get(night.url(api, "items?limit=1")).status_code == 200
        # who hung up has left a place
        wait_until(lambda: client.get(night.url(api, "archive")).status_code == 200)
