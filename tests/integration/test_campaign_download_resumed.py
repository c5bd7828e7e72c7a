"""`rushes campaign download` that is killed or interrupted in the middle of clips, and begun again: command, API,
database and store are real, and the way between them is slow.
"""

import hashlib
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from rushes_cli.campaigns import manifest
from rushes_cli.campaigns.client import Client
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import update
from sqlalchemy.orm import Session
from support.api import API_KEY, AUTHORIZED, JobDriver, ThreadedApi
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.commands import RUSHES, clean_environment
from support.faults.proxy import Mode, TcpProxy
from support.stack import SharedStack
from support.waiting import wait_until

NUM_BYTES = 1 << 20
BYTES_PER_SECOND = 100_000
CLIPS = {f"id-{number}.mp4": bytes([number]) + bytes(range(255)) * (NUM_BYTES // 255) for number in (1, 2, 3)}
REPLACED = CLIPS["id-2.mp4"][::-1]


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("download")), api_key=API_KEY)


@pytest.fixture(scope="module")
def api(settings: Settings) -> Iterator[ThreadedApi]:
    with ThreadedApi(settings) as api:
        yield api


@pytest.fixture
def campaign(campaigns: Campaigns, settings: Settings, tmp_path: Path) -> str:
    """A campaign that has ended, with `CLIPS` in the store."""
    campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in (1, 2, 3))))
    campaigns.open(campaign_id, 1, 2, 3)
    driver = JobDriver(settings)
    for job, data in zip(campaigns.items(campaign_id), CLIPS.values(), strict=True):
        driver.complete(job.id, data, tmp_path)
    driver.close()
    campaigns.end()
    return campaign_id


def begun(url: str, campaign_id: str, folder: Path) -> "subprocess.Popen[str]":
    command = [*RUSHES, "campaign", "download", campaign_id, str(folder), "--parallel", "2", "--json"]
    env = clean_environment() | {"RUSHES_URL": url, "RUSHES_KEY": API_KEY}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def in_the_middle(api: ThreadedApi, campaign_id: str, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """A download that has a part of two clips, and would take seconds for the rest of each."""
    parts = urlsplit(api.url)
    assert parts.hostname is not None
    assert parts.port is not None
    with TcpProxy(parts.hostname, parts.port) as way:
        way.set(Mode.BANDWIDTH, bytes_per_second=BYTES_PER_SECOND)
        download = begun(f"http://127.0.0.1:{way.port}", campaign_id, folder)
        wait_until(lambda: sorted(part_sizes(folder)) == ["id-1.mp4", "id-2.mp4"])
        yield download


def part_sizes(folder: Path) -> dict[str, int]:
    """What is here of the clips that are not whole, where there is anything."""
    sizes = {part.stem: part.stat().st_size for part in folder.glob("*.part")}
    return {name: size for name, size in sizes.items() if size}


def finished(api: ThreadedApi, campaign_id: str, folder: Path) -> dict[str, Any]:
    """What the same download says when it is begun again."""
    out, err = begun(api.url, campaign_id, folder).communicate(timeout=120)
    assert out, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_a_download_that_was_killed_goes_on_where_it_was(api: ThreadedApi, campaign: str, tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    with in_the_middle(api, campaign, folder) as download:
        download.send_signal(signal.SIGKILL)
        download.communicate()
    here = part_sizes(folder)
    assert not list(folder.glob("*.mp4"))
    for name, size in here.items():
        assert (folder / f"{name}.part").read_bytes() == CLIPS[name][:size]
    result = finished(api, campaign, folder)
    assert (result["clips"], result["here"], result["missing"]) == (3, 3, {})
    assert result["fetched_bytes"] == sum(map(len, CLIPS.values())) - sum(here.values())
    assert {one.name: one.read_bytes() for one in folder.glob("*.mp4*")} == CLIPS


def test_after_ctrl_c_what_was_deleted_or_replaced_or_cut_short_meanwhile_is_not_taken_for_what_it_was(
    api: ThreadedApi, campaigns: Campaigns, campaign: str, tmp_path: Path
) -> None:
    folder = tmp_path / "clips"
    with in_the_middle(api, campaign, folder) as download:
        download.send_signal(signal.SIGINT)
        out, err = download.communicate(timeout=120)
    assert (download.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "rushes campaign: interrupted"
    assert part_sizes(folder)
    assert not list(folder.glob("*.mp4"))

    first, second, _ = campaigns.items(campaign)
    delete(api, first)
    replace(campaigns, second, tmp_path / "replaced.mp4")
    (folder / "id-3.mp4").write_bytes(CLIPS["id-3.mp4"][:-1])
    (folder / "of-somebody-else.mp4.part").touch()
    result = finished(api, campaign, folder)
    assert (result["clips"], result["here"], result["missing"]) == (2, 2, {})
    expected = {"id-2.mp4": REPLACED, "id-3.mp4": CLIPS["id-3.mp4"]}
    assert {one.name: one.read_bytes() for one in folder.glob("*.mp4")} == expected
    assert [one.name for one in folder.glob("*.part")] == ["of-somebody-else.mp4.part"]


def test_ctrl_c_while_a_part_is_removed_leaves_it_to_the_next_download(
    api: ThreadedApi, campaigns: Campaigns, campaign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "clips"
    finished(api, campaign, folder)
    first, second, _ = campaigns.items(campaign)
    for job in (first, second):
        httpx.delete(
            f"{api.url}/v1/videos/{job.id}", headers=AUTHORIZED, trust_env=False, timeout=60
        ).raise_for_status()
    part, directory = folder / "id-1.mp4.part", folder / "id-2.mp4.part"
    part.touch()
    directory.mkdir()
    client = Client(api.url, API_KEY)
    unlink = Path.unlink

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        if path == part:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manifest.renew(client, campaign, folder)
    assert part.exists()
    assert not list(folder.glob(".manifest*"))
    monkeypatch.undo()
    manifest.renew(client, campaign, folder)
    assert not part.exists()
    # it is not of this command
    assert directory.is_dir()
    client.close()


def delete(api: ThreadedApi, job: Job) -> None:
    url = f"{api.url}/v1/videos/{job.id}"
    httpx.delete(url, headers=AUTHORIZED, trust_env=False, timeout=60).raise_for_status()


def replace(campaigns: Campaigns, job: Job, path: Path) -> None:
    """Give a job the clip of another run of it."""
    path.write_bytes(REPLACED)
    assert job.result is not None
    key, sha256 = f"{job.result['key']}-2", hashlib.sha256(REPLACED).hexdigest()
    campaigns.store.put_file(key, path, content_type="video/mp4", sha256=sha256)
    result = job.result | {"key": key, "bytes": len(REPLACED), "sha256": sha256}
    with Session(campaigns.engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == job.id).values(result=result))
