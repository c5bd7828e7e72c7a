"""Rows 39 and on: the dispatcher, webhooks, storms of requests, and what operators do to the queue."""

import os
import signal
import time

from support.faults.cluster import FINAL, Cluster
from support.faults.rows import at_once, not_run, reran, row, slow_job


@row(39, "dispatcher killed, and three at once")
def dispatchers(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.parts[1].kill()
    load = cluster.load(10, gap_seconds=0.2)
    load.join()
    cluster.until(lambda: sum(cluster.job(job)["state"] in FINAL for job in load.accepted) >= 5, seconds=60)
    cluster.expect("jobs proceed by polling", True)
    job_id = slow_job(cluster)
    struck = time.time()
    os.kill(cluster.supervisor_of(job_id), signal.SIGKILL)
    for _ in range(3):
        cluster.start_dispatcher()
    reran(cluster, job_id, since=struck)
    cluster.load(8).join()


not_run(40, "broken webhook receivers", "played by tests/integration/test_webhook_hostile.py")
not_run(41, "webhook sender killed before its commit", "played by tests/integration/test_webhook_delivery.py")


@row(42, "storm: 50 equal keys at once, submits, cancels, a new API in between")
def storm(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(interactive_p95_seconds=6.0)
    # more than one of them wins only if the key and the job are not one commit
    at_once([lambda: cluster.client.create(key="the-same", priority="bulk", tries=20)] * 50)
    jobs: list[str | None] = []
    at_once([lambda: jobs.append(cluster.client.create(priority="bulk", tries=20))] * 60)
    urgent = cluster.load(8, cancels=0.0, deletes=0.0, gap_seconds=0.5, priorities=("interactive",))
    cancels = [lambda job=job: cluster.client.cancel(job) for job in jobs if job][:45]
    cluster.parts[0].send(signal.SIGTERM)
    cluster.start_api()
    at_once(cancels)
    urgent.join()
    cluster.lifted()
    cluster.client.create(tries=10)
