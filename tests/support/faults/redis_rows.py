"""Rows 17 to 23: Redis."""

import threading
import time

from redis import Redis
from support.faults.cluster import FINAL, Cluster
from support.faults.rows import row


@row(17, "Redis kill -9 and restart, append-only file on and off")
def restart_redis(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    load = cluster.load(16)
    for appendonly in ("yes", "no"):
        with cluster.servers.redis() as redis:
            redis.config_set("appendonly", appendonly)
        time.sleep(cluster.random.uniform(0.3, 1.0))
        cluster.servers.restart("valkey")
        cluster.lifted()
        cluster.client.create(tries=10)
        time.sleep(1.0)
    load.join()


@row(18, "Redis FLUSHALL every 5 s")
def flush_redis(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    rates = []
    for flush in (False, True):
        stop = threading.Event()
        flusher = threading.Thread(target=_flush, args=(cluster, stop), daemon=True)
        if flush:
            flusher.start()
        began, jobs = time.monotonic(), [cluster.client.create("[step 0.05]", tries=5) for _ in range(40)]
        cluster.until(lambda jobs=jobs: all(job and cluster.job(job)["state"] in FINAL for job in jobs), seconds=100)
        rates.append(len(jobs) / (time.monotonic() - began))
        stop.set()
        if flush:
            flusher.join()
    share = rates[1] / rates[0]
    cluster.meta(throughput_share=share)
    cluster.expect("at least 90 % of the throughput", share >= 0.9, f"{share:.0%} of {rates[0]:.2f} jobs/s")
    cluster.lifted()
    cluster.client.create(tries=5)


def _flush(cluster: Cluster, stop: threading.Event) -> None:
    with cluster.servers.redis() as redis:
        while not stop.is_set():
            redis.flushall()
            stop.wait(5)


@row(19, "Redis down")
def redis_down(cluster: Cluster) -> None:
    """20 s, of 5 minutes: nothing waits for anything longer."""
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    cluster.servers.stop("valkey")
    struck = time.time()
    load = cluster.load(25, gap_seconds=0.5)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
    cluster.expect("jobs proceed by polling", True)
    _submit_p99(cluster)
    time.sleep(max(0.0, struck + 20 - time.time()))
    cluster.servers.launch("valkey")
    cluster.lifted()
    cluster.load(4).join()


def _submit_p99(cluster: Cluster, limit: float = 0.5) -> None:
    from support.faults.history import load

    took = sorted(
        r["data"]["seconds"] for r in load(cluster.history.path) if r["op"] == "create" and r["phase"] == "ok"
    )
    cluster.expect(f"submit p99 below {limit:g} s", took and took[int(0.99 * (len(took) - 1))] < limit, took[-3:])


@row(20, "Redis frozen")
def redis_frozen(cluster: Cluster) -> None:
    """20 s, of 75 s: longer than every time-out on the way."""
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    with cluster.servers.frozen("valkey"):
        load = cluster.load(20, gap_seconds=0.7)
        load.join()
        _submit_p99(cluster)
        time.sleep(5)
    cluster.lifted()
    cluster.load(4).join()
    cluster.until(lambda: _dispatcher_recovered(cluster), seconds=30)


def _dispatcher_recovered(cluster: Cluster) -> bool:
    """A hint arrives in Redis again: some command of the dispatcher is on a living connection."""
    with Redis.from_url(cluster.env["RUSHES_REDIS_URL"], socket_timeout=3) as redis:
        return bool(redis.client_list())


@row(21, "Redis CLIENT KILL of all connections every 2 s")
def kill_redis_clients(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    load = cluster.load(30, gap_seconds=0.3)
    with cluster.servers.redis() as redis:
        for _ in range(6):
            redis.client_kill_filter(_type="normal", skipme=True)
            time.sleep(2)
    cluster.lifted()
    load.join()


@row(22, "Redis memory full, no eviction")
def redis_full(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    with cluster.servers.redis() as redis:
        redis.config_set("maxmemory", "1")
        try:
            load = cluster.load(20, gap_seconds=0.3)
            load.join()
            cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
            cluster.expect("jobs proceed", True)
        finally:
            redis.config_set("maxmemory", "0")
    cluster.lifted()
    cluster.client.create(tries=5)
    logs = "".join(part.log.read_text(errors="replace") for part in cluster.parts)
    cluster.expect("the dispatcher says that hints fail", "hint_failed" in logs)


@row(23, "Redis read-only: demoted to a replica")
def redis_read_only(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(redis_broke=True)
    with cluster.servers.redis() as redis:
        redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            load = cluster.load(15, gap_seconds=0.4)
            load.join()
            time.sleep(4)
        finally:
            redis.execute_command("REPLICAOF", "NO", "ONE")
    cluster.lifted()
    cluster.load(6).join()
