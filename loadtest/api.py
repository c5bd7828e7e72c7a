"""The HTTP API under load: requests a second, latencies, and what a request costs in processor time.

    python loadtest/api.py --workers 2 --seconds 15
    python loadtest/api.py --only post get

Embedded servers, `rushes api` as users start it, and the client share the machine's cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import http_load
from command_line import amount, at_least, run
from rushes_cli.stack import EmbeddedStack
from rushes_cli.stack.ports import free_port
from rushes_core.settings import Settings
from sqlalchemy import Engine, text

KEY = "load-test-key"
CONNECTIONS = 32
POLLERS = 500
WATCHERS = 1_000
PROMPT = "Waves roll against a lighthouse at dusk while a gull calls, take "

_FILL = """
INSERT INTO jobs (id, project, model, priority, prompt, seed, width, height, num_frames, request, max_attempts, run_at)
SELECT 'video_' || lpad(i::text, 26, '0'), 'default', :model, 1,
    repeat('waves roll against a lighthouse ', 4), i, 1344, 768, 107,
    jsonb_build_object('seconds', '4', 'size_requested', NULL,
        'metadata', CASE WHEN i % 1000 = 0 THEN jsonb_build_object('take', (i / 1000)::text) ELSE '{}'::jsonb END),
    3, now() - interval '1 hour'
FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS i
"""
# as workers would, in two moves: the guard allows no shorter way
_FINISH = (
    "UPDATE jobs SET state = 'cancelled', finished_at = now(), error = '{\"code\": \"cancelled_by_user\"}' "
    "WHERE seed BETWEEN :first AND :last AND seed % 10 <> 0",
)


@dataclass(frozen=True, slots=True)
class Server:
    """The API's processes on a stack of their own, and what they use."""

    port: int
    pid: int
    engine: Engine
    start_seconds: float
    workers: int

    def pids(self) -> list[int]:
        """The processes that answer requests."""
        if self.workers == 1:
            return [self.pid]
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> list[float]:
        """Resident memory of each process."""
        return [_status_kb(pid, "VmRSS") / 1_024 for pid in self.pids()]

    def peak_memory_mb(self) -> list[float]:
        return [_status_kb(pid, "VmHWM") / 1_024 for pid in self.pids()]

    def loads_torch(self) -> bool:
        return any("torch" in Path(f"/proc/{pid}/maps").read_text() for pid in self.pids())


def _status_kb(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def running_api(workers: int) -> Iterator[Server]:
    """The API on an embedded stack in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="rushes-load-") as directory, EmbeddedStack(directory) as stack:
        checkpoint = Path(directory) / "checkpoint"
        env = os.environ | stack.settings_env | {"RUSHES_API_KEY": KEY, "RUSHES_CHECKPOINT": str(checkpoint)}
        # however the kernel shares the connections of one key out
        env["RUSHES_API_MAX_WAITING_PER_KEY"] = str(WATCHERS)
        for command in (["checkpoint", "tiny", str(checkpoint)], ["migrate"]):
            stack.run(command[0], _rushes(*command), env=env, cwd=Path(directory))
        port = free_port()
        began = time.monotonic()
        words = _rushes("api", "--port", str(port), "--workers", str(workers))
        child = stack.spawn("api", words, env=env, cwd=Path(directory))
        _wait_until_up(port, stack)
        took = time.monotonic() - began
        fields: dict[str, Any] = {name.removeprefix("RUSHES_").lower(): v for name, v in stack.settings_env.items()}
        engine = bench.patient_engine(Settings(checkpoint=checkpoint, **fields))
        yield Server(port, child.popen.pid, engine, took, workers)
        stack.check_running()
        engine.dispose()


def _rushes(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rushes_cli", *arguments]


def _wait_until_up(port: int, stack: EmbeddedStack) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            _ask(port, "/healthz")
            return
        except OSError:
            stack.check_running()
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _ask(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return json.load(answer)


def measure(
    case: str,
    server: Server,
    loads: Sequence[http_load.Load],
    *,
    seconds: float,
    targets: Sequence[dict[str, Any]],
    names: Sequence[str] = ("",),
    **about: Any,
) -> None:
    """Run `loads` twice, the first time to warm up, and report each with its target."""
    http_load.run(server.port, loads, seconds=min(2.0, seconds))
    api, postgres = server.cpu_seconds(), bench.postgres_cpu_seconds(server.engine) or 0.0
    run = http_load.run(server.port, loads, seconds=seconds)
    api, postgres = server.cpu_seconds() - api, (bench.postgres_cpu_seconds(server.engine) or 0.0) - postgres
    total = sum(len(outcome.latencies) for outcome in run.outcomes)
    for name, load, outcome, target in zip(names, loads, run.outcomes, targets, strict=True):
        milliseconds = [1_000 * value for value in outcome.latencies]
        bench.report(
            f"{case}{name}",
            workers=server.workers,
            connections=load.connections,
            requests=len(milliseconds),
            statuses={str(status): count for status, count in outcome.statuses.items()},
            per_second=len(milliseconds) / run.seconds,
            p50_ms=bench.percentile(milliseconds, 50),
            p99_ms=bench.percentile(milliseconds, 99),
            max_ms=max(milliseconds),
            bytes_per_answer=outcome.num_bytes // max(1, len(milliseconds)),
            api_cpu_ms=1_000 * api / total,
            postgres_cpu_ms=1_000 * postgres / total,
            client_cpu_ms=1_000 * run.cpu_seconds / total,
            target=target,
            load_average=_load_average(),
            **about,
        )


def _load_average() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def _post() -> bytes:
    return http_load.post("/v1/videos", KEY, {"prompt": PROMPT + http_load.NONCE.decode(), "seconds": "5"})


def start_and_memory(server: Server, seconds: float) -> None:
    bench.report(
        "start",
        workers=server.workers,
        start_s=server.start_seconds,
        memory_mb=[round(value, 1) for value in server.memory_mb()],
        torch_loaded=server.loads_torch(),
        target={"start_s": "< 3", "memory_mb": "< 200", "torch_loaded": False},
        load_average=_load_average(),
    )


def post_load(server: Server, seconds: float) -> None:
    load = http_load.Load([_post()], CONNECTIONS)
    measure("post", server, [load], seconds=seconds, targets=[{"per_second": ">= 600", "p99_ms": "< 100"}])


def post_with_key_load(server: Server, seconds: float) -> None:
    request = _post().replace(
        b"\r\nContent-Type", b"\r\nIdempotency-Key: take-{nonce}-%d\r\nContent-Type" % time.time()
    )
    load = http_load.Load([request], CONNECTIONS)
    measure("post_idempotent", server, [load], seconds=seconds, targets=[{"p99_ms": "< 100"}])


def get_load(server: Server, seconds: float) -> None:
    ids = [_ask(server.port, "/v1/videos", {"prompt": PROMPT})["id"] for _ in range(200)]
    load = http_load.Load([http_load.get(f"/v1/videos/{one}", KEY) for one in ids], CONNECTIONS)
    measure("get", server, [load], seconds=seconds, targets=[{"per_second": ">= 2000"}])


def pollers_load(server: Server, seconds: float) -> None:
    ids = [_ask(server.port, "/v1/videos", {"prompt": PROMPT})["id"] for _ in range(POLLERS)]
    polls = http_load.Load([http_load.get(f"/v1/videos/{one}", KEY) for one in ids], POLLERS, interval_seconds=1.0)
    posts = http_load.Load([_post()], CONNECTIONS)
    measure(
        "pollers",
        server,
        [posts, polls],
        seconds=seconds,
        names=("_post", "_get"),
        targets=[{"p99_ms": "< 150"}, {}],
    )


def list_load(server: Server, seconds: float, *, jobs: int) -> None:
    _fill(server, jobs)
    middle = f"video_{jobs // 2:026d}"
    cases = {
        "first": "/v1/videos?limit=20",
        "middle": f"/v1/videos?limit=20&after={middle}",
        "oldest": "/v1/videos?limit=20&order=asc",
        "queued": "/v1/videos?limit=20&status=queued",
        "in_progress": "/v1/videos?limit=20&status=in_progress",
        "metadata": "/v1/videos?limit=20&metadata%5Btake%5D=77",
    }
    for name, path in cases.items():
        for connections in (1, 4):
            load = http_load.Load([http_load.get(path, KEY)], connections)
            measure(
                f"list_{name}",
                server,
                [load],
                seconds=seconds / 3,
                targets=[{"p99_ms": "< 30"}],
                jobs=jobs,
            )


def _fill(server: Server, jobs: int, *, chunk: int = 50_000) -> None:
    model = _ask(server.port, "/v1/models")["data"][0]["id"]
    for first in range(1, jobs + 1, chunk):
        values = {"first": first, "last": min(jobs, first + chunk - 1)}
        with server.engine.begin() as connection:
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL synchronous_commit = off"))
            connection.execute(text(_FILL), values | {"model": model})
            for statement in _FINISH:
                connection.execute(text(statement + " AND id BETWEEN :low AND :high"), values | _ids(values))
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))


def _ids(values: dict[str, int]) -> dict[str, str]:
    return {"low": f"video_{values['first']:026d}", "high": f"video_{values['last']:026d}"}


def watchers(server: Server, seconds: float) -> None:
    """Memory that an open event stream takes, once each has had its first event."""
    ids = [_ask(server.port, "/v1/videos", {"prompt": PROMPT})["id"] for _ in range(50)]
    asyncio.run(_watch(server, ids[:20], 20))
    before = sum(server.memory_mb())
    after = asyncio.run(_watch(server, ids, WATCHERS))
    bench.report(
        "sse_watchers",
        workers=server.workers,
        watchers=WATCHERS,
        kb_per_watcher=1_024 * (after - before) / WATCHERS,
        target={"kb_per_watcher": "< 100"},
        load_average=_load_average(),
    )


async def _watch(server: Server, ids: Sequence[str], watchers: int) -> float:
    """Memory of the API while `watchers` streams are open."""

    async def watch(video_id: str) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(http_load.get(f"/v1/videos/{video_id}/events", KEY))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        assert b"text/event-stream" in head.lower(), head
        await reader.readuntil(b"data:")
        return writer

    writers = [await watch(ids[number % len(ids)]) for number in range(watchers)]
    await asyncio.sleep(2)
    memory = sum(server.memory_mb())
    for writer in writers:
        writer.close()
    return memory


def memory_at_the_end(server: Server) -> None:
    bench.report(
        "memory_after",
        workers=server.workers,
        peak_memory_mb=[round(value, 1) for value in server.peak_memory_mb()],
        torch_loaded=server.loads_torch(),
        target={"peak_memory_mb": "< 200", "torch_loaded": False},
        load_average=_load_average(),
    )


def main() -> None:
    cases: dict[str, Callable[[Server, float], None]] = {
        "start": start_and_memory,
        "post": post_load,
        "post_idempotent": post_with_key_load,
        "get": get_load,
        "watchers": watchers,
        "pollers": pollers_load,
    }
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=at_least(1), default=2, help="processes of the API (default 2)")
    parser.add_argument("--seconds", type=amount, default=15.0, help="of each case (default 15)")
    parser.add_argument("--jobs", type=at_least(1), default=1_000_000, help="rows behind the list (default 1,000,000)")
    parser.add_argument("--only", nargs="+", choices=[*cases, "list"], default=[*cases, "list"])
    arguments = parser.parse_args()
    with running_api(arguments.workers) as server:
        for name in arguments.only:
            if name == "list":
                list_load(server, arguments.seconds, jobs=arguments.jobs)
            else:
                cases[name](server, arguments.seconds)
        memory_at_the_end(server)


if __name__ == "__main__":
    run(main)
