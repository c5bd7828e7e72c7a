"""Rows 46 to 50: campaigns, while what loads, opens, counts and runs them dies."""

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

from support.faults.canvas import SIZE
from support.faults.cluster import LEASE_SECONDS, Cluster
from support.faults.processes import Process
from support.faults.rows import row

NUM_LINES = 36
_ENDED = ("completed", "failed", "cancelled", "expired")


def send(cluster: Cluster, *, lines: int = NUM_LINES, step: float = 0.02) -> str:
    """A campaign of this many lines: every ninth cannot become a job, every tenth fails as it runs."""
    bad = [number for number in range(1, lines + 1) if number % 9 == 0]
    return cluster.client.send_campaign(_file(lines, step=step), key="campaign", bad=bad)


def _file(lines: int, *, step: float) -> bytes:
    written = []
    for number in range(1, lines + 1):
        fate = "[generation error]" if number % 10 == 0 else f"[step {step:g}]"
        line: dict[str, Any] = {"custom_id": f"id-{number}", "prompt": f"a wave {fate}", "seconds": "4", "size": SIZE}
        if number % 9 == 0:
            line |= ({"prompt": ""}, {"custom_id": "id-1"}, {"size": "1x1"})[number // 9 % 3]
        written.append(b"{" if number == 27 else json.dumps(line).encode())
    return b"".join(line + b"\n" for line in written)


def start(cluster: Cluster, *, workers: int = 2, chunk_seconds: float = 0.0, **changes: Any) -> Process:
    """API, dispatcher, loader and workers; the loader."""
    loader = cluster.start_loader({"FAULT_CHUNK_SECONDS": str(chunk_seconds)})
    cluster.start(workers=workers, **changes)
    return loader


def standing(cluster: Cluster, batch_id: str) -> dict[str, Any]:
    """The row of a campaign, with its counters."""
    (found,) = cluster.query(
        "SELECT c.*, n.* FROM campaigns c, LATERAL (SELECT sum(queued) AS queued, sum(in_progress) AS running, "
        "sum(completed) AS completed, sum(failed) AS failed, sum(cancelled) AS cancelled, sum(invalid) AS invalid "
        "FROM campaign_counts WHERE campaign_id = c.id) AS n WHERE c.id = %s",
        batch_id,
    )
    return found


def ends(cluster: Cluster, batch_id: str, state: str = "completed") -> dict[str, Any]:
    """Wait for the end of a campaign and demand that it is this one."""
    cluster.until(lambda: standing(cluster, batch_id)["state"] in _ENDED, seconds=120)
    found = standing(cluster, batch_id)
    cluster.expect(f"the campaign is {state}", found["state"] == state, found["state"], job=batch_id)
    return found


def under_way(cluster: Cluster, batch_id: str, *, at_least: int) -> None:
    """Return when so many of its jobs are completed."""
    cluster.until(lambda: standing(cluster, batch_id)["completed"] >= at_least, seconds=60)


def kill_a_supervisor(cluster: Cluster, batch_id: str) -> None:
    """Kill the supervisor of a running job of the campaign."""
    query = (
        "SELECT r.detail FROM jobs j JOIN replicas r ON r.id = j.lease_owner "
        "WHERE j.campaign_id = %s AND j.state = 'running' ORDER BY j.line"
    )

    def strike() -> bool:
        for found in cluster.query(query, batch_id):
            # that of a job whose lease has not run out yet may be dead
            with suppress(ProcessLookupError):
                os.kill(int(found["detail"]["pid"]), signal.SIGKILL)
                return True
        return False

    cluster.until(strike, seconds=30)


@row(46, "loader killed while it loads a campaign, three times")
def kill_loader(cluster: Cluster) -> None:
    """Chunks of four lines, slow to commit: most kills hit a transaction, some the moment between two."""
    loader = start(cluster, chunk_seconds=0.4)
    batch_id = send(cluster)
    for _ in range(3):
        before = standing(cluster, batch_id)["loaded_lines"]
        cluster.until(lambda before=before: standing(cluster, batch_id)["loaded_lines"] > before, seconds=60)
        time.sleep(cluster.random.uniform(0.0, 0.6))
        loader.kill()
        loaded = standing(cluster, batch_id)
        cluster.expect("it was killed while it loaded", loaded["loaded_at"] is None, loaded["loaded_lines"])
        loader = cluster.start_loader({"FAULT_CHUNK_SECONDS": "0.4"})
    struck = time.time()
    found = ends(cluster, batch_id)
    cluster.recovery_seconds = found["loaded_at"].timestamp() - struck


@row(47, "kill -9 supervisors while a campaign runs")
def kill_supervisors(cluster: Cluster) -> None:
    start(cluster)
    batch_id = send(cluster, step=0.05)
    for number in (2, 8):
        under_way(cluster, batch_id, at_least=number)
        kill_a_supervisor(cluster, batch_id)
    cluster.lifted(limit=LEASE_SECONDS + 10)
    ends(cluster, batch_id)


@row(48, "Postgres immediate restart while a campaign is loaded and run, three times")
def restart_postgres(cluster: Cluster) -> None:
    start(cluster, chunk_seconds=0.3, lease_seconds=20)
    batch_id = send(cluster)
    cluster.until(lambda: standing(cluster, batch_id)["loaded_lines"] > 0)
    for number in (0, 3, 8):
        under_way(cluster, batch_id, at_least=number)
        time.sleep(cluster.random.uniform(0.0, 0.5))
        cluster.servers.restart("postgres", signal.SIGQUIT)
        cluster.lifted(limit=10)
    ends(cluster, batch_id)
    crashes = sum(found["crash_count"] for found in cluster.query("SELECT crash_count FROM jobs"))
    cluster.expect("no crash was counted", crashes == 0, crashes)


@row(49, "dispatcher killed, Redis flushed and two dispatchers started while a campaign runs")
def dispatchers(cluster: Cluster) -> None:
    start(cluster)
    cluster.meta(redis_broke=True)
    batch_id = send(cluster)
    under_way(cluster, batch_id, at_least=2)
    cluster.dispatchers[0].kill()
    with cluster.servers.redis() as redis:
        redis.flushall()
    time.sleep(cluster.random.uniform(0.5, 2.0))
    for _ in range(2):
        cluster.start_dispatcher()
    cluster.lifted(limit=15)
    ends(cluster, batch_id)


@row(50, "a campaign paused, cancelled and retried while supervisors are killed")
def changed(cluster: Cluster) -> None:
    start(cluster)
    batch_id = send(cluster, step=0.08)
    under_way(cluster, batch_id, at_least=2)
    kill_a_supervisor(cluster, batch_id)
    cluster.client.change_campaign(batch_id, "pause")
    cluster.until(lambda: standing(cluster, batch_id)["running"] == 0, seconds=30)
    before = standing(cluster, batch_id)
    time.sleep(2)
    after = standing(cluster, batch_id)
    cluster.expect("nothing runs while it is paused", after["completed"] == before["completed"], after["completed"])
    opened = cluster.query("SELECT id FROM jobs WHERE state = 'queued' AND hold IS NULL")
    cluster.expect("nothing is open while it is paused", not opened, opened)
    cluster.client.change_campaign(batch_id, "resume")
    kill_a_supervisor(cluster, batch_id)
    cluster.client.change_campaign(batch_id, "cancel")
    cancelled = ends(cluster, batch_id, "cancelled")
    cluster.expect("some of it was cancelled", cancelled["cancelled"] > 0, cancelled["cancelled"], job=batch_id)
    cluster.client.change_campaign(batch_id, "retry_failed", include_cancelled=True)
    kill_a_supervisor(cluster, batch_id)
    cluster.lifted(limit=LEASE_SECONDS + 10)
    cluster.until(lambda: standing(cluster, batch_id)["retry"] is None, seconds=30)
    found = ends(cluster, batch_id)
    cluster.expect("nothing is left cancelled", found["cancelled"] == 0, found["cancelled"], job=batch_id)
