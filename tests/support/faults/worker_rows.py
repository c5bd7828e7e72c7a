"""Rows 1 to 16: workers, their ranks and their replicas."""

import os
import signal
import time

from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster
from support.faults.rows import at_point, clips, ends_within, not_run, reran, row, slow_job
from support.processes import children, descendants, is_alive


@row(1, "kill -9 supervisor in the middle of a job")
def kill_supervisor(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = slow_job(cluster)
    load = cluster.load(12)
    time.sleep(cluster.random.uniform(0.2, 1.5))
    supervisor = cluster.supervisor_of(job_id)
    below = descendants(supervisor)
    struck = time.time()
    os.kill(supervisor, signal.SIGKILL)
    ends_within(cluster, below, 2, "ranks and media process")
    cluster.lifted()
    load.join()
    reran(cluster, job_id, since=struck)


@row(2, "kill -9 one rank")
def kill_rank(cluster: Cluster) -> None:
    cluster.start(workers=1, layout="r1s2")
    job_id = slow_job(cluster)
    load = cluster.load(8)
    supervisor = cluster.supervisor_of(job_id)
    (row,) = cluster.query("SELECT detail FROM replicas WHERE job_id = %s", job_id)
    ranks = row["detail"].get("ranks") or children(supervisor)
    struck = time.time()
    os.kill(cluster.random.choice(ranks), signal.SIGKILL)
    ends_within(cluster, ranks, 5, "the whole group")
    load.join()
    reran(cluster, job_id, since=struck)
    cluster.expect("the supervisor lives", is_alive(supervisor))


@row(3, "kill -9 between upload and publish")
def kill_after_upload(cluster: Cluster) -> None:
    job_id, _ = at_point(cluster, "before complete:kill")
    struck = time.time()
    cluster.start_worker()
    load = cluster.load(8)
    load.join()
    reran(cluster, job_id, since=struck)
    keys = clips(cluster, job_id)
    cluster.expect("two objects, one of them published", len(keys) == 2, keys, job=job_id)


@row(4, "kill -9 between claim and start")
def kill_after_claim(cluster: Cluster) -> None:
    job_id, _ = at_point(cluster, "before start:kill")
    struck = time.time()
    cluster.start_worker()
    cluster.load(6).join()
    reran(cluster, job_id, since=struck, crash_count=None)
    first = cluster.attempts(job_id)[0]
    cluster.expect("the first attempt never ran", first["started_at"] is None, first["started_at"], job=job_id)


@row(5, "kill -9 right after the publish commit")
def kill_after_publish(cluster: Cluster) -> None:
    job_id, _ = at_point(cluster, "after complete:kill")
    cluster.lifted(limit=20)
    cluster.load(6).join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("no second run", job["state"] == "completed" and job["attempt"] == 1, job["attempt"], job=job_id)


@row(6, "SIGSTOP worker for 2 leases, then SIGCONT", in_suite=True)
def stop_worker(cluster: Cluster) -> None:
    """It is stopped when its clip is stored and not yet published: nothing but the fence stands between."""
    job_id, stopped = at_point(cluster, "before complete:stop", prompt="a wave [step 0.5 on attempt 2]")
    struck = time.time()
    cluster.start_worker()
    cluster.wait_ready(1)
    load = cluster.load(3)
    cluster.until(lambda: cluster.job(job_id)["attempt"] == 2 and cluster.job(job_id)["state"] == "running")
    time.sleep(max(0.0, struck + 2 * LEASE_SECONDS - time.time()))
    stopped.resume()
    cluster.mark("continued")
    load.join()
    reran(cluster, job_id, since=struck)
    job, attempts = cluster.job(job_id), cluster.attempts(job_id)
    key = (job["result"] or {}).get("key", "")
    cluster.expect("the result is the second attempt's", f"/2-{attempts[-1]['fence']}/" in key, key, job=job_id)


@row(7, "SIGSTOP idle worker, push hint, SIGKILL")
def hint_in_a_dead_hand(cluster: Cluster) -> None:
    cluster.start(workers=2)
    victim = cluster.workers[0]
    for pid in [victim.pid, *descendants(victim.pid)]:
        os.kill(pid, signal.SIGSTOP)
    job_id = cluster.client.create(tries=10)
    assert job_id is not None
    created = time.time()
    time.sleep(0.6)
    victim.kill()
    job = cluster.wait_state(job_id, *FINAL)
    seconds = cluster.attempts(job_id)[0]["claimed_at"].timestamp() - created
    cluster.recovery_seconds = seconds
    limit = 3 * cluster.patience
    cluster.expect(f"claimed by another within {limit:g} s", seconds <= limit, f"{seconds:.1f} s", job=job_id)
    cluster.expect("completed", job["state"] == "completed", job["state"], job=job_id)
    cluster.load(4).join()


@row(8, "crash loop: a job kills every worker")
def poison(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = cluster.client.create("[die at step 2]", poison=True, tries=10)
    load = cluster.load(15)
    assert job_id is not None
    load.join()
    job = cluster.wait_state(job_id, *FINAL, seconds=100)
    cluster.expect(
        "failed as worker_crash", (job["error"] or {}).get("code") == "worker_crash", job["error"], job=job_id
    )
    drained = cluster.query("SELECT id FROM replicas WHERE state = 'drained'")
    cluster.expect("no replica drained", not drained, drained)
    cluster.wait_ready()


@row(9, "sick replica: every job crashes there")
def sick_replica(cluster: Cluster) -> None:
    cluster.start_api()
    cluster.start_dispatcher()
    sick = cluster.start_worker({"FAULT_SICK": "1"})
    cluster.wait_ready()
    load = cluster.load(6, cancels=0.0, deletes=0.0, step_seconds=(0.0, 0.02))
    cluster.until(lambda: any(record.get("event") == "rank_died" for record in sick.records()))
    cluster.start_worker()
    load.join()
    more = cluster.load(6, cancels=0.0, deletes=0.0)
    try:
        cluster.until(lambda: any(record.get("event") == "replica_drained" for record in sick.records()), seconds=60)
        holds = True
    except TimeoutError:
        holds = False
    cluster.expect("the replica drains itself after three jobs", holds)
    more.join()
    time.sleep(1)
    claims = [r for r in sick.records() if r.get("event") == "job_claimed"]
    cluster.expect("it claims no more than a few jobs", len(claims) <= 4, len(claims))


@row(10, "engine hang: a rank sleeps for good")
def hang(cluster: Cluster) -> None:
    cluster.start(workers=2)
    struck = time.time()
    job_id = cluster.client.create("[hang at step 3 on attempt 1]", tries=10)
    assert job_id is not None
    cluster.load(6).join()
    job = cluster.wait_state(job_id, *FINAL, seconds=90)
    attempts = cluster.attempts(job_id)
    cluster.expect("re-run and completed", job["state"] == "completed" and len(attempts) == 2, job["state"], job=job_id)
    if len(attempts) > 1:
        cluster.recovery_seconds = attempts[1]["claimed_at"].timestamp() - struck
    logs = "".join(worker.log.read_text(errors="replace") for worker in cluster.workers)
    cluster.expect("stacks were dumped", "most recent call first" in logs)


@row(11, "CUDA out of memory, simulated")
def out_of_memory(cluster: Cluster) -> None:
    cluster.start(workers=1)
    once = cluster.client.create("[device memory]", tries=10)
    always = cluster.client.create("[device memory always]", tries=10)
    assert once is not None
    assert always is not None
    cluster.load(4).join()
    job = cluster.wait_state(once, *FINAL)
    cluster.expect("completed with the low-memory plan", job["state"] == "completed", job["error"], job=once)
    cluster.expect("no crash was counted", job["crash_count"] == 0, job["crash_count"], job=once)
    job = cluster.wait_state(always, *FINAL)
    cluster.expect(
        "failed as out_of_memory", (job["error"] or {}).get("code") == "out_of_memory", job["error"], job=always
    )
    cluster.expect("one retry, not more", job["attempt"] == 2, job["attempt"], job=always)
    cluster.expect("no crash was counted", job["crash_count"] == 0, job["crash_count"], job=always)


@row(12, "host out of memory: the kernel kills a rank")
def host_out_of_memory(cluster: Cluster) -> None:
    """SIGKILL from within the rank, which is what the kernel's killer sends; no memory limit is set here."""
    cluster.start(workers=1)
    struck = time.time()
    job_id = cluster.client.create("[die at step 4 on attempt 1]", tries=10)
    assert job_id is not None
    cluster.load(4).join()
    reran(cluster, job_id, since=struck)
    error = cluster.attempts(job_id)[0]["error"] or {}
    cluster.expect("the end by SIGKILL is named", "SIGKILL" in error.get("message", ""), error, job=job_id)


@row(13, "SIGTERM during a job, long grace")
def drain_long(cluster: Cluster) -> None:
    cluster.start(workers=1)
    job_id = slow_job(cluster, step=0.4)
    waiting = [cluster.client.create(tries=10) for _ in range(2)]
    cluster.until(lambda: cluster.job(job_id)["completed_steps"] >= 1)
    time.sleep(0.5)
    worker = cluster.workers[0]
    worker.send(signal.SIGTERM)
    time.sleep(1.0)
    held = [job for job in waiting if job and cluster.job(job)["state"] != "queued"]
    cluster.expect("what was prefetched is released within 1 s", not held, held)
    status = worker.wait(60)
    job = cluster.job(job_id)
    cluster.expect("the worker leaves with status 0", status == 0, status)
    cluster.expect(
        "the job was finished", job["state"] == "completed" and job["attempt"] == 1, job["state"], job=job_id
    )
    cluster.start_worker()
    cluster.wait_ready()


@row(14, "SIGTERM during a job, short grace")
def drain_short(cluster: Cluster) -> None:
    cluster.start(workers=1, shutdown_grace_seconds=1.0)
    job_id = slow_job(cluster, step=1.0)
    cluster.workers[0].send(signal.SIGTERM)
    status = cluster.workers[0].wait(30)
    job = cluster.job(job_id)
    cluster.expect("the worker leaves with status 0", status == 0, status)
    cluster.expect(
        "requeued without a crash", (job["state"], job["crash_count"]) == ("queued", 0), job["state"], job=job_id
    )
    struck = time.time()
    cluster.start_worker()
    cluster.load(4).join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.recovery_seconds = cluster.attempts(job_id)[-1]["claimed_at"].timestamp() - struck
    cluster.expect("completed", job["state"] == "completed", job["state"], job=job_id)


@row(15, "rolling restart of all workers under load")
def rolling_restart(cluster: Cluster) -> None:
    cluster.start(workers=2)
    load = cluster.load(60, gap_seconds=0.4)
    for round_ in range(4):
        worker = cluster.workers[-2]
        worker.send(signal.SIGTERM)
        cluster.expect(f"restart {round_}: status 0", (status := worker.wait(60)) == 0, status)
        cluster.start_worker()
        cluster.wait_ready()
    load.stop()
    crashes = sum(row["crash_count"] for row in cluster.query("SELECT crash_count FROM jobs"))
    cluster.expect("no crash was counted", crashes == 0, crashes)
    cluster.lifted()


not_run(16, "second-node agent lost", "played by tests/integration/test_worker_nodes.py")
