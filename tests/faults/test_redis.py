"""Redis that answers and takes nothing: what it costs a worker that listens for hints."""

import time
from pathlib import Path

from redis import Redis
from support.faults.cluster import Cluster
from support.faults.servers import Servers
from support.waiting import wait_until


def test_worker_keeps_no_connection_to_a_read_only_redis(servers: Servers, tmp_path: Path) -> None:
    with Cluster(servers, tmp_path, seed=1) as cluster, Redis.from_url(servers.env["RUSHES_REDIS_URL"]) as redis:
        worker = cluster.start_worker()
        cluster.wait_ready()
        wait_until(lambda: len(redis.client_list()) > 1)
        redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            redis.client_kill_filter(_type="normal", skipme=True)
            wait_until(lambda: "read only replica" in worker.log.read_text())
            time.sleep(2)
            connections = len(redis.client_list())
        finally:
            redis.execute_command("REPLICAOF", "NO", "ONE")
        assert connections <= 6
