"""Rows 39 and on: the dispatcher, webhooks, storms of requests, and what operators do to the queue."""

import os
import signal
import time

from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster
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


@row(43, "workers killed while a key's jobs wait for its limit")
def limit_under_kills(cluster: Cluster) -> None:
    """Two of three replicas may run the key's jobs; supervisors and a dispatcher die, jobs are cancelled, retried."""
    cluster.meta(may_quarantine=True)
    cluster.start(workers=3)
    cluster.start_dispatcher()
    limited = cluster.limited_client(max_running=2)
    load = cluster.load(24, client=limited, cancels=0.2, step_seconds=(0.05, 0.2))
    other = cluster.load(10, gap_seconds=0.5)
    for number in range(4):
        time.sleep(cluster.random.uniform(1.0, 2.0))
        worker = cluster.workers[number % 3]
        supervisors = worker.supervisors
        if supervisors:
            os.kill(supervisors[0], signal.SIGKILL)
        if number == 1:
            cluster.parts[1].kill()
    cluster.lifted(limit=LEASE_SECONDS + 10)
    load.join()
    other.join()
    cluster.until(
        lambda: not cluster.query("SELECT 1 FROM jobs WHERE state IN ('queued', 'claimed', 'running')"), seconds=100
    )
    held = cluster.query("SELECT id FROM jobs WHERE hold IS NOT NULL")
    cluster.expect("nothing is held at the end", not held, held)


@row(44, "queue paused while a job runs, its worker killed, Postgres restarted")
def paused(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = slow_job(cluster)
    cluster.client.ask("POST", "/v1/queue/pause")
    cluster.mark("paused", project="default")
    load = cluster.load(6, cancels=0.0, deletes=0.0)
    os.kill(cluster.supervisor_of(job_id), signal.SIGKILL)
    load.join()
    cluster.servers.restart("postgres", signal.SIGQUIT)
    # the lost attempt is reaped, and waits like the others
    cluster.wait_state(job_id, "queued")
    time.sleep(2)
    states = {cluster.job(job)["state"] for job in [job_id, *load.accepted]}
    cluster.expect("everything waits", states == {"queued"}, states)
    cluster.mark("resumed", project="default")
    cluster.client.ask("POST", "/v1/queue/resume")
    cluster.lifted()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("completed after the pause", job["state"] == "completed", job["state"], job=job_id)


@row(45, "a replica drained and resumed under load, Postgres restarted meanwhile")
def drained(cluster: Cluster) -> None:
    cluster.start(workers=2)
    load = cluster.load(30, gap_seconds=0.3)
    (replica, *_) = cluster.ready()
    path = f"/v1/workers/{replica.replace('#', '~')}"
    cluster.client.ask("POST", f"{path}/drain")

    def is_drained() -> bool:
        (found,) = cluster.query("SELECT state FROM replicas WHERE id = %s", replica)
        return found["state"] == "drained"

    def last_fence() -> int:
        query = "SELECT coalesce(max(fence), 0) AS fence FROM job_attempts WHERE lease_owner = %s"
        (found,) = cluster.query(query, replica)
        return int(found["fence"])

    cluster.until(is_drained, seconds=30)
    before = last_fence()
    cluster.servers.restart("postgres", signal.SIGQUIT)
    cluster.until(lambda: len(cluster.ready()) == 1, seconds=30)
    time.sleep(2)
    cluster.expect("it is still drained", is_drained())
    cluster.expect("it claims nothing meanwhile", last_fence() == before, last_fence())
    cluster.client.ask("POST", f"{path}/resume")
    cluster.lifted(limit=10)
    more = cluster.load(10, gap_seconds=0.1)
    load.join()
    more.join()
    cluster.until(lambda: last_fence() > before, seconds=30)
    crashes = sum(found["crash_count"] for found in cluster.query("SELECT crash_count FROM jobs"))
    cluster.expect("no crash was counted", crashes == 0, crashes)
