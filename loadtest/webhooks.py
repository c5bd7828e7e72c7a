"""Webhooks: deliveries a second, and how long live endpoints wait beside dead and hostile ones.

    python loadtest/webhooks.py --deliveries 8000 --endpoints 20 --senders 1

Senders, receiver, servers and this run on the same cores. Senders are `rushes deliver`, the receiver is a process that
answers 200 at once, deliveries are signed and go over new connections. Cases:

throughput  how fast `--deliveries` that are due are delivered, all of them there when the senders start
dead        the same beside 10,000 that are due at an endpoint that refuses connections
hostile     delay of deliveries to live endpoints, from the event to the recorded success, while `--hostile` endpoints
            hang until the deadline and as many refuse
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench
from command_line import amount, at_least, run
from rushes_core.settings import Settings
from rushes_core.webhooks import endpoints
from rushes_core.webhooks.guard import Guard
from rushes_core.webhooks.signing import SigningSecret, Vault
from rushes_worker.child import settings_environment
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

TABLES = "outbox, webhook_attempts, webhook_deliveries, webhook_endpoints"
DATA = '{"status": "completed", "attempt": 1, "progress": 100, "error": null, "sequence": 4100}'
NUM_DEAD = 10_000


def clear(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {TABLES}"))


def register(engine: Engine, settings: Settings, url: str, *, project: str) -> str:
    wanted = endpoints.NewEndpoint(name="load", url=url, event_types=["video.completed"])
    target = Guard(settings).check_url(url)
    values = endpoints.endpoint_values(wanted, target, SigningSecret.new(), Vault(settings))
    with Session(engine) as session, session.begin():
        return session.execute(endpoints.create(project=project, **values)).scalar_one().id


def happen(engine: Engine, count: int, *, project: str, first: int = 0) -> None:
    """Write down `count` events; the database makes a delivery for each endpoint of the project."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(
            text(
                "INSERT INTO outbox (event_id, job_id, project, generation, type) "
                "SELECT 'evt_' || :project || '_' || i, 'video_' || :project || '_' || i, :project, 1, "
                "'video.completed' FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS i"
            ),
            {"project": project, "first": first, "last": first + count - 1},
        )
        # there is no job to describe
        connection.execute(
            text("UPDATE outbox SET data = CAST(:data AS jsonb) WHERE project = :project AND data IS NULL"),
            {"data": DATA, "project": project},
        )


def num_delivered(engine: Engine, project: str) -> int:
    with engine.connect() as connection:
        return connection.execute(
            text("SELECT count(*) FROM webhook_deliveries WHERE project = :project AND state = 'delivered'"),
            {"project": project},
        ).scalar_one()


def delays(engine: Engine, project: str) -> list[float]:
    """Seconds from each event to its recorded success."""
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT extract(epoch FROM finished_at - created_at)::float FROM webhook_deliveries "
                "WHERE project = :project AND state = 'delivered'"
            ),
            {"project": project},
        )
        return list(rows.scalars())


class Sender:
    """A running `rushes deliver`."""

    def __init__(self, settings: Settings) -> None:
        command = [sys.executable, "-P", "-m", "rushes_cli", "deliver"]
        self._process = subprocess.Popen(
            command, env=settings_environment(settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def receiver() -> Iterator[int]:
    """A receiver's port."""
    script = str(Path(__file__).with_name("webhook_receiver.py"))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def wait_delivered(engine: Engine, project: str, count: int) -> None:
    while num_delivered(engine, project) < count:
        time.sleep(0.05)


def throughput(engine: Engine, settings: Settings, options: argparse.Namespace, *, with_dead: bool) -> None:
    clear(engine)
    with receiver() as port, ExitStack() as running:
        for number in range(options.endpoints):
            register(engine, settings, f"http://127.0.0.1:{port}/{number}", project="live")
        if with_dead:
            register(engine, settings, "http://127.0.0.1:9/", project="dead")
            happen(engine, NUM_DEAD, project="dead")
        senders = [running.enter_context(Sender(settings)) for _ in range(options.senders)]
        # one of each, so that what is measured are senders that are up
        happen(engine, 1, project="live")
        wait_delivered(engine, "live", options.endpoints)
        events = options.deliveries // options.endpoints
        happen(engine, events, project="live", first=1)
        num_before = num_delivered(engine, "live")
        cpu, server_cpu = sum(one.cpu_seconds() for one in senders), bench.postgres_cpu_seconds(engine)
        began = time.monotonic()
        count = (events + 1) * options.endpoints
        wait_delivered(engine, "live", count)
        seconds = time.monotonic() - began
        sent = count - num_before
        figures: dict[str, Any] = {
            "per_second": sent / seconds,
            "deliveries": sent,
            "sender_cpu_ms_each": (sum(one.cpu_seconds() for one in senders) - cpu) / sent * 1_000,
        }
        after = bench.postgres_cpu_seconds(engine)
        if server_cpu is not None and after is not None:
            figures["postgres_cpu_ms_each"] = (after - server_cpu) / sent * 1_000
        bench.report("dead" if with_dead else "throughput", **figures, load_average=os.getloadavg()[0])


def hostile(engine: Engine, settings: Settings, options: argparse.Namespace) -> None:
    clear(engine)
    with receiver() as port, ExitStack() as running:
        # its backlog takes connections that nobody accepts
        silent = running.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4_096))
        silent_port = silent.getsockname()[1]
        for number in range(options.hostile):
            register(engine, settings, f"http://127.0.0.1:{silent_port}/{number}", project="bad")
            register(engine, settings, f"http://127.0.0.1:9/{number}", project="bad")
        for number in range(options.endpoints):
            register(engine, settings, f"http://127.0.0.1:{port}/{number}", project="live")
        for _ in range(options.senders):
            running.enter_context(Sender(settings))
        happen(engine, 1, project="live")
        wait_delivered(engine, "live", options.endpoints)
        until = time.monotonic() + options.seconds
        count = 1
        while time.monotonic() < until:
            happen(engine, 1, project="live", first=count)
            happen(engine, 1, project="bad", first=count)
            count += 1
            time.sleep(0.1)
        wait_delivered(engine, "live", count * options.endpoints)
        seen = delays(engine, "live")[options.endpoints :]
        bench.report(
            "hostile",
            deliveries=len(seen),
            bad_endpoints=2 * options.hostile,
            p50=bench.percentile(seen, 50),
            p95=bench.percentile(seen, 95),
            longest=max(seen),
            load_average=os.getloadavg()[0],
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--deliveries", type=at_least(1), default=8_000)
    parser.add_argument("--endpoints", type=at_least(1), default=20)
    parser.add_argument("--senders", type=at_least(1), default=1)
    parser.add_argument("--hostile", type=at_least(0), default=20)
    parser.add_argument("--seconds", type=amount, default=20)
    cases = ("throughput", "dead", "hostile")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    options = parser.parse_args()
    if options.deliveries < options.endpoints:
        parser.error(f"--deliveries must be at least --endpoints, {options.endpoints}, got {options.deliveries}")
    with bench.servers() as found:
        key = urlsafe_b64encode(os.urandom(32)).decode()
        settings = Settings(**(found.model_dump() | {"webhook_key": key, "webhook_loopback": True}))
        engine = bench.patient_engine(settings)
        if "throughput" in options.cases:
            throughput(engine, settings, options, with_dead=False)
        if "dead" in options.cases:
            throughput(engine, settings, options, with_dead=True)
        if "hostile" in options.cases:
            hostile(engine, settings, options)
        engine.dispose()


if __name__ == "__main__":
    run(main)
