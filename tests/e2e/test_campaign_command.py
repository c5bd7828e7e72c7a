"""`rushes campaign` as an operator uses it: from a table of prompts to checked clips on a disk, whatever restarts."""

import csv
import gzip
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rushes_core.settings import Settings
from rushes_worker.child import settings_environment
from support.api import API_KEY, AUTHORIZED
from support.commands import RUSHES, clean_environment
from support.ports import kept_port
from support.service import CALM
from support.stack import SharedStack
from support.waiting import wait_until
from support.worker import SCRIPTED, Worker

TABLE = '''\
custom_id;prompt;seconds;size
shot-1;"Waves; a lighthouse";4;480x480
shot/2;"A gull says ""hello""";4;480x480
shot-3;This one cannot be [value error];4;480x480
shot-4;Far too long;400;480x480
'''


class Operator:
    """The service in processes of its own, and the command."""

    def __init__(self, settings: Settings, folder: Path, port: int) -> None:
        self._env = settings_environment(settings)
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.port = port
        self.url = f"http://127.0.0.1:{self.port}"
        # one for all: to make one reads every certificate of this machine
        self.http = httpx.Client(base_url=self.url, headers=AUTHORIZED, trust_env=False, timeout=60)

    def start(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*RUSHES, name, *words], env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def start_api(self) -> None:
        self.start("api", "--port", str(self.port))

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)
        self.http.close()

    def is_up(self) -> bool:
        try:
            return self.http.get("/healthz").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        return self.http.get(path).raise_for_status().json()

    def command(self, *words: str | Path) -> subprocess.Popen[str]:
        """`rushes campaign`, begun."""
        env = clean_environment() | {"RUSHES_URL": self.url, "RUSHES_KEY": API_KEY}
        return subprocess.Popen(
            [*RUSHES, "campaign", *map(str, words)],
            env=env,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, status: int = 0) -> str:
        """`rushes campaign` to its end: what it prints."""
        process = self.command(*words)
        out, err = process.communicate(timeout=240)
        assert process.returncode == status, f"{process.returncode}: {out}{err}"
        return out if status in (0, 3, 4, 5, 6) else out + err

    def submit(self, path: Path, *words: str) -> str:
        """Id of a new campaign of a file."""
        campaign_id: str = json.loads(self.run("submit", path, "--json", *words))["id"]
        return campaign_id

    def watch(self, campaign_id: str, *, status: int) -> dict[str, Any]:
        """The campaign at its end."""
        return json.loads(self.run("watch", campaign_id, "--json", status=status))

    def download(self, campaign_id: str, folder: Path, *, status: int = 0) -> dict[str, Any]:
        return json.loads(self.run("download", campaign_id, folder, "--json", status=status))


@pytest.fixture(scope="module")
def operator(stack: SharedStack, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("operator")
    settings = stack.settings(
        checkpoint=checkpoint, api_key=API_KEY, scratch=folder / "scratch", pipeline=SCRIPTED, poll_seconds=0.5, **CALM
    )
    with (
        kept_port() as port,
        closing(Operator(settings, folder, port)) as operator,
        Worker(settings, folder / "worker.log"),
    ):
        operator.start_api()
        operator.start("dispatcher")
        operator.start("loader")
        wait_until(operator.is_up)
        yield operator


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "night.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode()))
    return path


@pytest.fixture(scope="module")
def ended(operator: Operator, table: Path) -> str:
    """A campaign of `TABLE` that has been watched to its end."""
    campaign_id = operator.submit(table, "--name", "Night", "--max-parallel", "2")
    assert operator.watch(campaign_id, status=3)["status"] == "completed"
    return campaign_id


def paused(operator: Operator, tmp_path: Path, count: int = 3) -> str:
    """A campaign that does not start by itself."""
    path = tmp_path / "paused.jsonl"
    lines = [{"custom_id": f"p-{n}", "prompt": f"Fog {n} [step 0.05]", "size": "480x480"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return operator.submit(path, "--start-paused")


def test_a_table_becomes_clips_and_a_list_of_what_failed(operator: Operator, ended: str) -> None:
    campaign = operator.get(f"/v1/campaigns/{ended}")
    counts = campaign["request_counts"]
    assert (campaign["name"], counts["total"], counts["completed"], counts["failed"]) == ("Night", 4, 2, 2)
    said = operator.run("status", ended)
    assert "2 completed, 2 failed of 4" in said
    listed = [json.loads(line) for line in operator.run("items", ended, "--json").splitlines()]
    assert [(one["custom_id"], one["status"]) for one in listed] == [
        ("shot-1", "completed"),
        ("shot/2", "completed"),
        ("shot-3", "failed"),
        ("shot-4", "failed"),
    ]
    failed = operator.run("items", ended, "--status", "failed")
    assert failed.count("\n") == 2
    assert "seconds" in failed
    assert ended in operator.run("list")


def test_clips_are_named_checked_and_fetched_once(operator: Operator, ended: str, tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    first = operator.download(ended, folder)
    assert (first["clips"], first["here"], first["failed"], first["missing"]) == (2, 2, 2, {})
    with (folder / "manifest.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = {row["custom_id"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["shot-1", "shot/2", "shot-3", "shot-4"]
    for name in ("shot-1", "shot/2"):
        clip = folder / rows[name]["file"]
        assert clip.parent == folder
        assert hashlib.sha256(clip.read_bytes()).hexdigest() == rows[name]["sha256"]
    assert (rows["shot-3"]["file"], rows["shot-4"]["file"]) == ("", "")
    assert sorted(one.suffix for one in folder.iterdir()) == [".csv", ".jsonl", ".mp4", ".mp4"]
    assert operator.download(ended, folder)["fetched_bytes"] == 0


def test_a_download_that_was_broken_off_goes_on(operator: Operator, ended: str, tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    operator.download(ended, folder)
    clip = folder / "shot-1.mp4"
    whole = clip.read_bytes()
    (folder / "shot-1.mp4.part").write_bytes(whole[: len(whole) // 2])
    clip.unlink()
    again = operator.download(ended, folder)
    assert again["fetched_bytes"] == len(whole) - len(whole) // 2
    assert clip.read_bytes() == whole


def test_a_clip_that_is_gone_is_told_of(operator: Operator, ended: str, table: Path, tmp_path: Path) -> None:
    campaign_id = operator.submit(table)
    operator.watch(campaign_id, status=3)
    folder = tmp_path / "clips"
    items = operator.get(f"/v1/campaigns/{campaign_id}/items")["data"]
    operator.download(campaign_id, folder)
    manifest = (folder / "manifest.jsonl").read_text()
    video_id = items[0]["video_id"]
    assert video_id in manifest
    # of one whose clip goes between the manifest and its turn
    with slow_api(operator, video_id) as url:
        env = clean_environment() | {"RUSHES_URL": url, "RUSHES_KEY": API_KEY}
        command = [*RUSHES, "campaign", "download", campaign_id, str(tmp_path / "other"), "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert list(said["missing"]) == ["shot-1.mp4"]
    assert said["here"] == 1


@contextmanager
def slow_api(operator: Operator, video_id: str) -> Iterator[str]:
    """The API, whose clip of this video is deleted as soon as the manifest was read."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = httpx.get(f"{operator.url}{self.path}", headers=headers, trust_env=False, timeout=60)
            if "format=jsonl" in self.path:
                operator.http.delete(f"/v1/videos/{video_id}").raise_for_status()
            self.send_response(answer.status_code)
            for name in ("content-type", "etag", "content-range"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_watch_outlives_the_api(operator: Operator, tmp_path: Path) -> None:
    campaign_id = paused(operator, tmp_path, 2)
    watching = operator.command("watch", campaign_id)
    wait_until(lambda: operator.get(f"/v1/campaigns/{campaign_id}")["hold_reason"] == "paused")
    operator.kill("api")
    assert watching.stdout is not None
    said = [watching.stdout.readline()]
    while "waiting for the API" not in said[-1]:
        said.append(watching.stdout.readline())
        assert said[-1], said
    operator.start_api()
    wait_until(operator.is_up)
    operator.run("resume", campaign_id)
    out, err = watching.communicate(timeout=240)
    assert watching.returncode == 0, out + err
    assert f"{campaign_id} completed: 2 completed of 2" in out


def test_ctrl_c_ends_a_watch_at_once_and_not_the_campaign(operator: Operator, tmp_path: Path) -> None:
    campaign_id = paused(operator, tmp_path)
    watching = operator.command("watch", campaign_id)
    assert watching.stdout is not None
    assert watching.stdout.readline()
    os.kill(watching.pid, signal.SIGINT)
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 130, out + err
    assert err.splitlines() == ["rushes campaign: interrupted"]
    assert operator.get(f"/v1/campaigns/{campaign_id}")["status"] in ("validating", "in_progress")
    operator.run("cancel", campaign_id)


def test_one_is_paused_resumed_and_cancelled(operator: Operator, tmp_path: Path) -> None:
    campaign_id = paused(operator, tmp_path)
    wait_until(lambda: operator.get(f"/v1/campaigns/{campaign_id}")["request_counts"]["queued"] == 3)
    assert "paused" in operator.run("status", campaign_id)
    assert "paused" not in operator.run("resume", campaign_id)
    assert "paused" in operator.run("pause", campaign_id, "--stop")
    operator.run("cancel", campaign_id)
    ended = operator.watch(campaign_id, status=5)
    assert ended["status"] == "cancelled"
    assert ended["request_counts"]["cancelled"] + ended["request_counts"]["completed"] == 3


def test_limits_are_changed_and_taken_away_while_it_waits(operator: Operator, tmp_path: Path) -> None:
    campaign_id = paused(operator, tmp_path)
    change = ("change", campaign_id, "--json")
    changed = json.loads(
        operator.run(*change, "--budget", "2h,cancel", "--window", "22:00-06:00 mo-fr Europe/Berlin", "--name", "Later")
    )
    assert (changed["budget"]["gpu_seconds"], changed["budget"]["on_limit"]) == (7_200, "cancel")
    assert (changed["window"]["start"], changed["window"]["timezone"]) == ("22:00", "Europe/Berlin")
    assert (changed["name"], changed["priority"]) == ("Later", "bulk")
    changed = json.loads(operator.run(*change, "--budget", "none", "--window", "none", "--priority", "normal"))
    assert (changed["budget"]["gpu_seconds"], changed["window"]) == (None, None)
    assert (changed["name"], changed["priority"]) == ("Later", "normal")
    assert "name something to change" in operator.run("change", campaign_id, status=2)
    operator.run("cancel", campaign_id)


def test_failed_items_are_run_again_by_their_code(operator: Operator, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    prompts = ["A quiet harbour", "Broken [value error]", "Broken too [generation error]"]
    path.write_text("".join(json.dumps({"prompt": one, "size": "480x480", "seed": 1}) + "\n" for one in prompts))
    campaign_id = operator.submit(path, "--max-attempts", "1")
    operator.watch(campaign_id, status=3)
    before = operator.get(f"/v1/campaigns/{campaign_id}/items?status=failed")["data"]
    code = before[0]["error"]["code"]
    same = [one for one in before if one["error"]["code"] == code]
    operator.run("retry-failed", campaign_id, "--code", code, "--new-seeds")
    operator.watch(campaign_id, status=3)
    after = {one["line"]: one for one in operator.get(f"/v1/campaigns/{campaign_id}/items?status=failed")["data"]}
    for one in before:
        is_new = after[one["line"]]["seed"] != one["seed"]
        assert is_new == (one in same)


def test_a_dry_run_tells_what_is_wrong_and_makes_nothing(operator: Operator, table: Path, tmp_path: Path) -> None:
    said = operator.run("submit", table, "--dry-run", status=3)
    assert "4 requests: 3 good, 1 bad" in said
    assert "321 frames" in said
    assert "line 5" in said
    assert "seconds" in said
    campaign_id = json.loads(operator.run("list", "--dry-runs", "--json", "--limit", "1"))["id"]
    assert operator.get(f"/v1/campaigns/{campaign_id}")["request_counts"]["total"] == 0
    assert "dry run, completed" in operator.run("list", "--dry-runs", "--limit", "1")
    assert campaign_id not in operator.run("list")
    none_good = tmp_path / "none.csv"
    none_good.write_text("prompt,seconds\na dog,400\n")
    operator.run("submit", none_good, "--dry-run", status=4)
    assert json.loads(operator.run("submit", none_good, "--dry-run", "--json", status=4))["report"]["valid"] == 0


def test_what_the_api_refuses_is_one_line(operator: Operator, table: Path, tmp_path: Path) -> None:
    said = operator.run("submit", table, "--completion-window", "1m", status=2)
    assert said.count("\n") <= 2
    assert "completion_window" in said
    operator.run("download", "batch_01K0Z8W5T3N9F6Q2RJ4XCB7MEH", tmp_path / "clips", status=1)
    assert not (tmp_path / "clips").exists()
    said = operator.run("status", "batch_01K0Z8W5T3N9F6Q2RJ4XCB7MEH", status=1)
    assert "batch_01K0Z8W5T3N9F6Q2RJ4XCB7MEH" in said
    assert "Traceback" not in said
