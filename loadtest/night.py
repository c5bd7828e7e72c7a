"""A night of campaigns on a scaled clock: who is served, what survives, and whether the books balance in the morning.

    python loadtest/night.py --jobs 10000 --replicas 8
    python loadtest/night.py --jobs 600 --replicas 4 --seconds-per-clip 0.1

Embedded servers, the API, dispatcher, loader and sender as operators start them, and replicas that claim, start, renew
and settle as real ones do but sleep where those render. Three projects of weights 1, 1 and 2 send campaigns, and
interactive jobs come all along; a replica is killed, a campaign is paused and resumed, and the window of another closes
for a minute. Ends with status 1 when a job was lost or done twice, a count is wrong, or somebody was told too often.
"""

import argparse
import csv
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bench
import httpx
from command_line import amount, at_least, run
from rankless import RanklessReplica
from rushes_cli.stack import EmbeddedStack
from rushes_cli.stack.ports import free_port
from rushes_core.log import configure_logging
from rushes_core.settings import Settings
from sqlalchemy import Engine, text
from throughput import RESULT

KEY = "night-key"
WEIGHTS = {"acme": 1, "brio": 1, "cine": 2}
FAILS = "[fails]"
EVERY_NTH_FAILS = 50
EVERY_NTH_IS_BAD = 100
ENDED = ("completed", "failed", "cancelled", "expired")
LEASE_SECONDS = 6
TIME_LIMIT = 900.0


def replica(settings: Settings, owner: str, seconds: float) -> None:
    """A replica without ranks, until it is ended. A clip of the smallest shape takes `seconds`."""
    configure_logging(settings.log_level, json=settings.log_json)
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(0))
    running = RanklessReplica(settings, owner)
    ledger = running.ledger
    while True:
        claim = running.take(wait_seconds=0.2)
        if claim is None:
            continue
        lease = claim.lease
        if ledger.start(lease):
            took = seconds * claim.job.num_frames / 107
            time.sleep(took)
            if FAILS in claim.job.prompt:
                ledger.fail(lease, {"code": "generation_failed", "message": "the prompt asks for it"})
            elif not ledger.complete(lease, result=RESULT, timings={"denoising": took, "total": took}):
                ledger.confirm_cancel(lease)
        running.heartbeat.drop(lease)


class Replicas:
    """Processes of `replica`."""

    def __init__(self, settings: Settings, *, count: int, seconds: float) -> None:
        context = get_context("spawn")
        arguments = [(settings, f"night~{number}-{number}", seconds) for number in range(count)]
        self._processes = [context.Process(target=replica, args=one, daemon=True) for one in arguments]

    def __enter__(self) -> "Replicas":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def kill_one(self) -> None:
        """With whatever it holds, as a machine that loses power."""
        self._processes.pop().kill()


class Receiver:
    """Takes every webhook and counts how often it was told what."""

    def __init__(self) -> None:
        received: Counter[tuple[str, str]] = Counter()
        seen: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["webhook-id"] not in seen:
                    seen.add(self.headers["webhook-id"])
                    received[event["type"], event["data"]["id"]] += 1
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(slots=True)
class Sent:
    """A campaign as it was sent."""

    project: str
    name: str
    id: str
    good: int
    failing: int
    bad: int
    custom_ids: list[str] = field(repr=False)


class Night:
    """The service, and clients of three projects."""

    def __init__(self, url: str, engine: Engine, receiver: Receiver) -> None:
        self.engine = engine
        self._url = url
        self._clients = {"default": self._client(KEY)}
        for project, weight in WEIGHTS.items():
            self._json(self._clients["default"].post("/v1/projects", json={"name": project}))
            self._json(self._clients["default"].patch(f"/v1/projects/{project}", json={"weight": weight}))
            asked = {
                "name": "night",
                "project": project,
                "scopes": ["videos:write", "videos:read", "batches", "webhooks"],
            }
            made = self._json(self._clients["default"].post("/v1/api_keys", json=asked))
            self._clients[project] = self._client(made["secret"])
            endpoint = {"name": "night", "url": receiver.url, "event_types": ["batch.completed", "batch.failed"]}
            self._json(self._clients[project].post("/v1/webhook_endpoints", json=endpoint))

    def _client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self._url, headers=headers, trust_env=False, timeout=60)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def send(self, project: str, name: str, count: int, **options: Any) -> Sent:
        """Submit a campaign of `count` lines: some have prompts that fail, and some cannot become jobs."""
        lines, custom_ids, failing, bad = [], [], 0, 0
        for number in range(count):
            custom_ids.append(f"{name}-{number}")
            line: dict[str, Any] = {
                "custom_id": custom_ids[-1],
                "prompt": f"Waves roll against a lighthouse, take {number}",
            }
            if number % EVERY_NTH_IS_BAD == 7:
                line["seconds"], bad = "forever", bad + 1
            elif number % EVERY_NTH_FAILS == 3:
                line["prompt"], failing = f"{line['prompt']} {FAILS}", failing + 1
            lines.append(json.dumps(line))
        client = self._clients[project]
        content = "\n".join(lines).encode()
        stored = self._json(
            client.post("/v1/files", data={"purpose": "batch"}, files={"file": (f"{name}.jsonl", content)})
        )
        body = {"input_file_id": stored["id"], "name": name, "defaults": {"seconds": "4", "size": "832x480"}} | options
        made = self._json(client.post("/v1/campaigns", json=body))
        return Sent(project, name, made["id"], count - failing - bad, failing, bad, custom_ids)

    def get(self, sent: Sent) -> dict[str, Any]:
        return self._json(self._clients[sent.project].get(f"/v1/campaigns/{sent.id}"))

    def ask(self, sent: Sent, action: str) -> dict[str, Any]:
        return self._json(self._clients[sent.project].post(f"/v1/campaigns/{sent.id}/{action}", json={}))

    def post_interactive(self) -> None:
        body = {"prompt": "Now, please", "seconds": "4", "size": "832x480", "priority": "interactive"}
        self._json(self._clients["default"].post("/v1/videos", json=body))

    def manifest(self, sent: Sent) -> list[dict[str, str]]:
        """The table of a campaign."""
        client = self._clients[sent.project]
        with client.stream("GET", f"/v1/campaigns/{sent.id}/manifest", params={"format": "csv"}) as answer:
            assert answer.is_success, answer.read()
            table = "\n".join(answer.iter_lines())
            return list(csv.DictReader(table.removeprefix("\ufeff").splitlines()))

    def files(self, sent: Sent) -> dict[str, int]:
        """Lines of the output and error files that OpenAI's clients read."""
        campaign = self.get(sent)
        counts: dict[str, int] = {}
        for name in ("output_file_id", "error_file_id"):
            if campaign[name] is not None:
                content = self._clients[sent.project].get(f"/v1/files/{campaign[name]}/content")
                assert content.is_success, content.text
                counts[name] = len(content.content.splitlines())
        return counts

    def ask_database(self, question: str, **values: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(question), values).all())

    @staticmethod
    def _json(answer: httpx.Response) -> dict[str, Any]:
        assert answer.is_success, f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}"
        body: dict[str, Any] = answer.json()
        return body


@contextmanager
def service(receiver: Receiver) -> Iterator[tuple[Night, Settings]]:
    with tempfile.TemporaryDirectory(prefix="rushes-night-") as directory, EmbeddedStack(directory) as stack:
        checkpoint = Path(directory) / "checkpoint"
        port = free_port()
        mine = {
            "api_key": KEY,
            "checkpoint": str(checkpoint),
            "model_name": bench.MODEL,
            "webhook_key": "bmlnaHRuaWdodG5pZ2h0bmlnaHRuaWdodG5pZ2h0bmk=",
            "webhook_loopback": "true",
            "lease_seconds": str(LEASE_SECONDS),
            "heartbeat_seconds": "1.5",
            "poll_seconds": "0.2",
            "log_level": "WARNING",
        }
        env = os.environ | stack.settings_env | {f"RUSHES_{name.upper()}": value for name, value in mine.items()}
        for command in (["checkpoint", "tiny", str(checkpoint)], ["migrate"]):
            stack.run(command[0], _rushes(*command), env=env, cwd=Path(directory))
        for command in (["api", "--port", str(port)], ["dispatcher"], ["loader"], ["deliver"]):
            stack.spawn(command[0], _rushes(*command), env=env, cwd=Path(directory))
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: _answers(url), what="the API")
        fields = {name.removeprefix("RUSHES_").lower(): value for name, value in stack.settings_env.items()}
        settings = Settings(**(fields | mine))  # pyright: ignore[reportArgumentType]
        engine = bench.patient_engine(settings, pool_size=3)
        night = Night(url, engine, receiver)
        yield night, settings
        stack.check_running()
        night.close()
        engine.dispose()


def _rushes(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rushes_cli", *arguments]


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).is_success
    except httpx.TransportError:
        return False


def _wait(is_so: Callable[[], bool], *, what: str, seconds: float = TIME_LIMIT) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)
    return time.monotonic() - began


def closing_minute(now: datetime) -> dict[str, str]:
    """A window that is open now and shut for one minute, which begins a while from `now`."""
    shut = now.replace(second=0, microsecond=0) + timedelta(minutes=1 if now.second < 40 else 2)
    return {"timezone": "UTC", "start": f"{shut + timedelta(minutes=1):%H:%M}", "end": f"{shut:%H:%M}"}


class Sprinkler(threading.Thread):
    """Posts interactive jobs, one every `pause` seconds, until it is stopped."""

    def __init__(self, night: Night, pause: float) -> None:
        super().__init__(daemon=True)
        self._night, self._pause = night, pause
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(self._pause):
            self._night.post_interactive()

    def stop(self) -> None:
        self._is_over.set()
        self.join()


_ENDED = "SELECT count(*) FROM jobs WHERE campaign_id IS NOT NULL AND state IN ('completed', 'failed')"
_STARTED = (
    "SELECT count(*) FROM job_events JOIN jobs ON jobs.id = job_id WHERE campaign_id = :id AND new_state = 'running'"
)
# counted anew, where the counters were changed by every move
_RECOUNT = """
SELECT
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state = 'completed') AS completed,
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state = 'failed')
        + (SELECT count(*) FROM campaign_line_errors WHERE campaign_id = :id) AS failed,
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state = 'queued') AS queued,
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state IN ('claimed', 'running')) AS in_progress,
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state = 'cancelled') AS cancelled,
    (SELECT count(*) FROM jobs WHERE campaign_id = :id AND state = 'expired') AS expired
"""
_TWICE = """
SELECT count(*) FROM (
    SELECT job_id FROM job_events WHERE new_state = 'completed' GROUP BY job_id HAVING count(*) > 1
) AS twice
"""
# while the campaign of each project that nothing holds had work; what a dead replica held is nobody's share
_SHARES = """
WITH work AS (
    SELECT j.project, c.name = j.project AS is_never_held, a.started_at, a.finished_at
    FROM job_attempts AS a JOIN jobs AS j ON j.id = a.job_id JOIN campaigns AS c ON c.id = j.campaign_id
    WHERE a.started_at IS NOT NULL AND a.outcome IN ('completed', 'failed')
), shared AS (
    SELECT max(first) AS since, min(last) AS until FROM (
        SELECT min(started_at) AS first, max(started_at) AS last FROM work WHERE is_never_held GROUP BY project
    ) AS spans
)
SELECT project, count(*) AS jobs, sum(extract(epoch FROM finished_at - started_at))::float AS seconds
FROM work, shared WHERE started_at BETWEEN since AND until GROUP BY project ORDER BY project
"""
_WAITS = """
SELECT extract(epoch FROM min(a.started_at) - j.created_at)::float
FROM jobs AS j JOIN job_attempts AS a ON a.job_id = j.id
WHERE j.campaign_id IS NULL AND a.started_at IS NOT NULL GROUP BY j.id
"""
_LOST = """
SELECT count(*) FROM job_events AS e JOIN jobs AS j ON j.id = e.job_id
WHERE e.new_state = 'queued' AND e.old_state IN ('claimed', 'running') AND j.error ->> 'code' IS NULL
"""


def play(night: Night, replicas: Replicas, sprinkler: Sprinkler, *, jobs: int) -> tuple[list[Sent], dict[str, float]]:
    """The events of the night, in their order: the campaigns, and how long what took."""
    figures: dict[str, float] = {}
    began = time.monotonic()
    windowed = night.send("acme", "acme-window", jobs // 8, window=closing_minute(datetime.now(UTC)))
    paused = night.send("brio", "brio-paused", jobs // 8)
    sent = [windowed, paused, night.send("acme", "acme", jobs // 8), night.send("brio", "brio", jobs // 8)]
    sent += [night.send("cine", "cine-proof", jobs // 4, proof={"count": 4, "auto_continue_after": "10s"})]
    sent += [night.send("cine", "cine", jobs - 4 * (jobs // 8) - jobs // 4)]
    figures["accepted_s"] = time.monotonic() - began
    figures["first_clip_s"] = _wait(lambda: night.ask_database(_ENDED)[0][0] > 0, what="the first clip")
    sprinkler.start()

    reasons: set[str] = set()

    def note_reasons() -> list[dict[str, Any]]:
        campaigns = [night.get(one) for one in sent]
        reasons.update(f"{one['name']}:{one['hold_reason']}" for one in campaigns if one["hold_reason"])
        return campaigns

    def wait_share(share: float) -> None:
        def are_done() -> bool:
            note_reasons()
            return night.ask_database(_ENDED)[0][0] >= share * jobs

        _wait(are_done, what=f"{share:.0%} of the clips")

    wait_share(0.15)
    replicas.kill_one()
    wait_share(0.3)
    night.ask(paused, "pause")
    # what runs and what a replica holds ahead may still begin: one job of each
    time.sleep(1)
    before = night.ask_database(_STARTED, id=paused.id)[0][0]
    time.sleep(3)
    figures["starts_while_paused"] = night.ask_database(_STARTED, id=paused.id)[0][0] - before
    assert night.get(paused)["hold_reason"] == "paused"
    night.ask(paused, "resume")

    def are_over() -> bool:
        return all(one["status"] in ENDED for one in note_reasons())

    _wait(are_over, what="the end of all campaigns")
    figures["night_s"] = time.monotonic() - began
    figures["window_was_shut"] = float("acme-window:window" in reasons)
    return sent, figures


def audit(night: Night, sent: list[Sent], receiver: Receiver) -> list[str]:
    """Print the books of the morning; what in them is wrong."""
    wrong: list[str] = []
    _wait(lambda: sum(receiver.received.values()) >= len(sent), what="webhooks", seconds=60)
    for one in sent:
        campaign = night.get(one)
        counts: dict[str, int] = campaign["request_counts"]
        recounted = night.ask_database(_RECOUNT, id=one.id)[0]._asdict()
        rows = night.manifest(one)
        statuses = Counter(row["status"] for row in rows)
        expected = {"completed": one.good, "failed": one.failing + one.bad}
        told = {type: n for (type, id), n in receiver.received.items() if id == one.id}
        files = night.files(one)
        for name, is_wrong in (
            ("status", campaign["status"] != "completed"),
            ("counts differ from the rows", any(counts[name] != number for name, number in recounted.items())),
            ("manifest", dict(statuses) != {name: n for name, n in expected.items() if n}),
            ("custom ids of the manifest", sorted(row["custom_id"] for row in rows) != sorted(one.custom_ids)),
            ("output and error files", sum(files.values()) != len(one.custom_ids)),
            ("webhooks", told != {"batch.completed": 1}),
        ):
            if is_wrong:
                wrong.append(
                    f"{one.name}: {name}: {campaign['status']} {counts} {recounted} {dict(statuses)} {files} {told}"
                )
        bench.report(
            "campaign",
            project=one.project,
            name=one.name,
            lines=len(one.custom_ids),
            manifest=dict(statuses),
            gpu_seconds=campaign["budget"]["used_gpu_seconds"],
            webhooks=told,
        )
    if twice := night.ask_database(_TWICE)[0][0]:
        wrong.append(f"{twice} jobs completed twice")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=at_least(8), default=10_000, help="lines of all campaigns together")
    parser.add_argument("--replicas", type=at_least(2), default=8)
    parser.add_argument("--seconds-per-clip", type=amount, default=0.08, help="of the smallest shape, in truth 34 s")
    parser.add_argument("--interactive-every", type=amount, default=1.0, metavar="SECONDS")
    arguments = parser.parse_args()
    receiver = Receiver()
    with service(receiver) as (night, settings):
        with Replicas(settings, count=arguments.replicas, seconds=arguments.seconds_per_clip) as replicas:
            sprinkler = Sprinkler(night, arguments.interactive_every)
            sent, figures = play(night, replicas, sprinkler, jobs=arguments.jobs)
            sprinkler.stop()
        wrong = audit(night, sent, receiver)
        waits = [row[0] for row in night.ask_database(_WAITS)]
        work = {row.project: row for row in night.ask_database(_SHARES)}
        spent = sum(row.seconds for row in work.values())
        bench.report(
            "night",
            jobs=arguments.jobs,
            replicas=arguments.replicas,
            **figures,
            interactive=len(waits),
            interactive_wait_p50_s=bench.percentile(waits, 50),
            interactive_wait_p95_s=bench.percentile(waits, 95),
            clip_s=arguments.seconds_per_clip,
            shares={project: round(row.seconds / spent, 3) for project, row in work.items()},
            shared_jobs=sum(row.jobs for row in work.values()),
            duplicates=night.ask_database(_TWICE)[0][0],
            attempts_given_back=night.ask_database(_LOST)[0][0],
            load_average=Path("/proc/loadavg").read_text().split()[0],
        )
    receiver.close()
    if figures["starts_while_paused"]:
        wrong.append(f"{figures['starts_while_paused']:g} jobs of a paused campaign started")
    for problem in wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
