"""The fault matrix: rows by number and name, each a function that breaks a running cluster, or a reason why not.

Times are scaled to the lease of the runs, which is 4 s: what must outlast a lease lasts two or three of them.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from redis import Redis
from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster, Worker
from support.faults.proxy import Mode, Request, S3Fault
from support.processes import children, descendants, is_alive
from support.stack import libpq_url

Scenario = Callable[[Cluster], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix."""

    number: int
    name: str
    play: Scenario | None
    why_not: str = ""
    in_suite: bool = False


class NotHere(Exception):
    """A scenario cannot be played on this machine; the message says why."""


ROWS: dict[int, Row] = {}


def _row(number: int, name: str, *, in_suite: bool = False) -> Callable[[Scenario], Scenario]:
    def register(play: Scenario) -> Scenario:
        ROWS[number] = Row(number, name, play, in_suite=in_suite)
        return play

    return register


def _not_run(number: int, name: str, reason: str) -> None:
    ROWS[number] = Row(number, name, None, reason)


def _slow_job(cluster: Cluster, *, attempt: int = 1, step: float = 0.4) -> str:
    """A job that is running, slow on this attempt alone."""
    job_id = cluster.client.create(f"a wave [step {step:g} on attempt {attempt}]", tries=10)
    assert job_id is not None
    cluster.wait_state(job_id, "running")
    return job_id


def _reran(cluster: Cluster, job_id: str, *, since: float, crash_count: int | None = 1) -> None:
    """The job ran again in time, and ended completed."""
    job = cluster.wait_state(job_id, *FINAL)
    attempts = cluster.attempts(job_id)
    cluster.expect(
        "the job was completed by its second attempt",
        job["state"] == "completed" and len(attempts) == 2,
        f"{job['state']} after {len(attempts)} attempts",
        job=job_id,
    )
    if len(attempts) > 1:
        seconds = attempts[1]["claimed_at"].timestamp() - since
        cluster.recovery_seconds = seconds
        cluster.expect(
            "the job ran again within lease + 10 s", seconds <= LEASE_SECONDS + 10, f"{seconds:.1f} s", job=job_id
        )
    if crash_count is not None:
        cluster.expect(
            f"crash_count is {crash_count}", job["crash_count"] == crash_count, job["crash_count"], job=job_id
        )


def _ends_within(cluster: Cluster, pids: Sequence[int], seconds: float, what: str) -> None:
    try:
        cluster.until(lambda: not any(map(is_alive, pids)), seconds=seconds)
        holds = True
    except TimeoutError:
        holds = False
    cluster.expect(f"{what} gone within {seconds:g} s", holds, [pid for pid in pids if is_alive(pid)])


# workers


@_row(1, "kill -9 supervisor in the middle of a job")
def kill_supervisor(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = _slow_job(cluster)
    load = cluster.load(12)
    time.sleep(cluster.random.uniform(0.2, 1.5))
    supervisor = cluster.supervisor_of(job_id)
    below = descendants(supervisor)
    struck = time.time()
    os.kill(supervisor, signal.SIGKILL)
    _ends_within(cluster, below, 2, "ranks and media process")
    cluster.lifted()
    load.join()
    _reran(cluster, job_id, since=struck)


@_row(2, "kill -9 one rank")
def kill_rank(cluster: Cluster) -> None:
    cluster.start(workers=1, layout="r1s2")
    job_id = _slow_job(cluster)
    load = cluster.load(8)
    supervisor = cluster.supervisor_of(job_id)
    (row,) = cluster.query("SELECT detail FROM replicas WHERE job_id = %s", job_id)
    ranks = row["detail"].get("ranks") or children(supervisor)
    struck = time.time()
    os.kill(cluster.random.choice(ranks), signal.SIGKILL)
    _ends_within(cluster, ranks, 5, "the whole group")
    load.join()
    _reran(cluster, job_id, since=struck)
    cluster.expect("the supervisor lives", is_alive(supervisor))


def _at_point(cluster: Cluster, point: str, *, prompt: str = "a wave") -> tuple[str, Worker]:
    """A job whose first holder meets `point`, once."""
    cluster.start_api()
    cluster.start_dispatcher()
    cluster.start_worker({"FAULT_POINT": point})
    cluster.wait_ready()
    job_id = cluster.client.create(prompt, tries=10)
    assert job_id is not None
    cluster.until((cluster.folder / "once").exists)
    return job_id, cluster.workers[0]


@_row(3, "kill -9 between upload and publish")
def kill_after_upload(cluster: Cluster) -> None:
    job_id, _ = _at_point(cluster, "before complete:kill")
    struck = time.time()
    cluster.start_worker()
    load = cluster.load(8)
    load.join()
    _reran(cluster, job_id, since=struck)
    keys = _clips(cluster, job_id)
    cluster.expect("two objects, one of them published", len(keys) == 2, keys, job=job_id)


@_row(4, "kill -9 between claim and start")
def kill_after_claim(cluster: Cluster) -> None:
    job_id, _ = _at_point(cluster, "before start:kill")
    struck = time.time()
    cluster.start_worker()
    cluster.load(6).join()
    _reran(cluster, job_id, since=struck, crash_count=None)
    first = cluster.attempts(job_id)[0]
    cluster.expect("the first attempt never ran", first["started_at"] is None, first["started_at"], job=job_id)


@_row(5, "kill -9 right after the publish commit")
def kill_after_publish(cluster: Cluster) -> None:
    job_id, _ = _at_point(cluster, "after complete:kill")
    cluster.lifted(limit=20)
    cluster.load(6).join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("no second run", job["state"] == "completed" and job["attempt"] == 1, job["attempt"], job=job_id)


@_row(6, "SIGSTOP worker for 2 leases, then SIGCONT", in_suite=True)
def stop_worker(cluster: Cluster) -> None:
    """It is stopped when its clip is stored and not yet published: nothing but the fence stands between."""
    job_id, stopped = _at_point(cluster, "before complete:stop", prompt="a wave [step 0.5 on attempt 2]")
    struck = time.time()
    cluster.start_worker()
    cluster.wait_ready(1)
    load = cluster.load(3)
    cluster.until(lambda: cluster.job(job_id)["attempt"] == 2 and cluster.job(job_id)["state"] == "running")
    time.sleep(max(0.0, struck + 2 * LEASE_SECONDS - time.time()))
    stopped.resume()
    cluster.mark("continued")
    load.join()
    _reran(cluster, job_id, since=struck)
    job, attempts = cluster.job(job_id), cluster.attempts(job_id)
    key = (job["result"] or {}).get("key", "")
    cluster.expect("the result is the second attempt's", f"/2-{attempts[-1]['fence']}/" in key, key, job=job_id)


@_row(7, "SIGSTOP idle worker, push hint, SIGKILL", in_suite=True)
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
    cluster.expect("claimed by another within 3 s", seconds <= 3, f"{seconds:.1f} s", job=job_id)
    cluster.expect("completed", job["state"] == "completed", job["state"], job=job_id)
    cluster.load(4).join()


@_row(8, "crash loop: a job kills every worker")
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


@_row(9, "sick replica: every job crashes there")
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


@_row(10, "engine hang: a rank sleeps for good")
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


@_row(11, "CUDA out of memory, simulated")
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


@_row(12, "host out of memory: the kernel kills a rank")
def host_out_of_memory(cluster: Cluster) -> None:
    """SIGKILL from within the rank, which is what the kernel's killer sends; no memory limit is set here."""
    cluster.start(workers=1)
    struck = time.time()
    job_id = cluster.client.create("[die at step 4 on attempt 1]", tries=10)
    assert job_id is not None
    cluster.load(4).join()
    _reran(cluster, job_id, since=struck)
    error = cluster.attempts(job_id)[0]["error"] or {}
    cluster.expect("the end by SIGKILL is named", "SIGKILL" in error.get("message", ""), error, job=job_id)


@_row(13, "SIGTERM during a job, long grace")
def drain_long(cluster: Cluster) -> None:
    cluster.start(workers=1)
    job_id = _slow_job(cluster, step=0.4)
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


@_row(14, "SIGTERM during a job, short grace")
def drain_short(cluster: Cluster) -> None:
    cluster.start(workers=1, shutdown_grace_seconds=1.0)
    job_id = _slow_job(cluster, step=1.0)
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


@_row(15, "rolling restart of all workers under load")
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


_not_run(16, "second-node agent lost", "a replica of this version lives on one node; there is no second-node agent")


# Redis


@_row(17, "Redis kill -9 and restart, append-only file on and off", in_suite=True)
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


@_row(18, "Redis FLUSHALL every 5 s")
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


@_row(19, "Redis down")
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


@_row(20, "Redis frozen")
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


@_row(21, "Redis CLIENT KILL of all connections every 2 s")
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


@_row(22, "Redis memory full, no eviction")
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


@_row(23, "Redis read-only: demoted to a replica")
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


# Postgres


@_row(24, "Postgres immediate restart, five times", in_suite=True)
def restart_postgres(cluster: Cluster) -> None:
    """With a lease that outlives each restart, as it does in production: no running job may be lost to it."""
    cluster.start(workers=2, lease_seconds=20)
    load = cluster.load(24, gap_seconds=0.3)
    for _ in range(5):
        time.sleep(cluster.random.uniform(0.4, 1.5))
        cluster.servers.restart("postgres", signal.SIGQUIT)
        cluster.lifted(limit=10)
    load.join()
    cluster.quiesce()
    crashes = sum(row["crash_count"] for row in cluster.query("SELECT crash_count FROM jobs"))
    cluster.expect("no crash was counted", crashes == 0, crashes)


@_row(25, "Postgres down for longer than the lease")
def postgres_down(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = _slow_job(cluster, step=0.6)
    cluster.servers.stop("postgres", signal.SIGQUIT)
    load = cluster.load(10, gap_seconds=0.2, tries=40)
    time.sleep(3 * LEASE_SECONDS)
    cluster.servers.launch("postgres")
    struck = time.time()
    cluster.lifted(limit=10)
    load.join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("the job ran again and was completed", job["state"] == "completed", job["state"], job=job_id)
    attempts = cluster.attempts(job_id)
    cluster.recovery_seconds = attempts[-1]["claimed_at"].timestamp() - struck
    answers = _answers(cluster, "create")
    cluster.expect("the API said 503 meanwhile", 503 in answers, sorted(set(answers)))


@_row(26, "pg_terminate_backend twice a second")
def terminate_backends(cluster: Cluster) -> None:
    """15 s, of 60."""
    cluster.start(workers=2)
    load = cluster.load(30, gap_seconds=0.4)
    with cluster.servers.connect(cluster.env) as connection:
        for _ in range(30):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            time.sleep(0.5)
    cluster.lifted()
    load.join()


@_row(27, "Postgres behind a black hole")
def postgres_black_hole(cluster: Cluster) -> None:
    """15 s, of 40: nearly four leases. The proxy's own host goes on acknowledging, so no TCP time-out helps."""
    proxy = cluster.proxy_postgres()
    url = cluster.database_url(proxy)
    cluster.start_api()
    cluster.start_dispatcher()
    cluster.start_worker(database_url=url)
    cluster.start_worker(database_url=url)
    cluster.wait_ready()
    job_id = _slow_job(cluster, step=0.8)
    proxy.set(Mode.BLACK_HOLE)
    struck = time.time()
    load = cluster.load(8, gap_seconds=0.5)
    time.sleep(15)
    stopped = [r["t_wall"] - struck for r in _renders(cluster) if (r["job"], r["phase"]) == (job_id, "fail")]
    cluster.expect("the worker fenced itself", stopped and stopped[0] < LEASE_SECONDS + 2, stopped, job=job_id)
    proxy.set(Mode.PASS)
    cluster.lifted(limit=15)
    load.join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("completed in the end", job["state"] == "completed", job["state"], job=job_id)
    cluster.meta(black_hole_seconds=time.time() - struck)


@_row(28, "commit reply lost", in_suite=True)
def commit_reply_lost(cluster: Cluster) -> None:
    """Of transactions that end with COMMIT, and of a worker's statements, which commit by themselves: those that name a
    replica, claims among them, and the transitions to running and completed."""
    proxy = cluster.proxy_postgres()
    url = cluster.database_url(proxy)
    cluster.start_api(database_url=url)
    cluster.start_dispatcher()
    for _ in range(2):
        cluster.start_worker(database_url=url)
    cluster.wait_ready()
    proxy.set(Mode.LOSE_REPLY, probability=0.12, triggers=(b"COMMIT", b"#", b"running", b"completed"))
    cluster.load(16, cancels=0.15, deletes=0.1).join()
    cluster.until(
        lambda: not cluster.query("SELECT 1 FROM jobs WHERE state IN ('queued', 'claimed', 'running')"), seconds=100
    )
    proxy.set(Mode.PASS)
    cluster.lifted()
    cluster.client.create(tries=5)
    cluster.expect("replies were lost", proxy.strikes > 3, proxy.strikes)


@_row(29, "lock storm: ACCESS EXCLUSIVE on jobs")
def lock_storm(cluster: Cluster) -> None:
    """12 s, of 20: three lock time-outs."""
    cluster.start(workers=2)
    load = cluster.load(16, gap_seconds=0.4)
    time.sleep(1)
    before = [worker.supervisors for worker in cluster.workers]
    with psycopg.connect(libpq_url(cluster.env)) as connection:
        connection.execute("SET lock_timeout = '20s'")
        connection.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
        time.sleep(12)
        connection.rollback()
    cluster.lifted(limit=10)
    load.join()
    after = [worker.supervisors for worker in cluster.workers]
    cluster.expect("no worker died", before == after, (before, after))


@_row(30, "old snapshot held")
def old_snapshot(cluster: Cluster) -> None:
    """About 20 s, of 10 minutes, and 800 updates of queued rows. A session of Rushes' own would be ended after 10 s."""
    cluster.start(workers=1)
    before = _claim_times(cluster, count=200)
    with psycopg.connect(libpq_url(cluster.env)) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM jobs")
        load = cluster.load(20, gap_seconds=0.4)
        during = _claim_times(cluster, count=400)
        load.join()
        connection.rollback()
    for name, times in (("before", before), ("during", during)):
        cluster.meta(**{f"claim_ms_{name}": [round(1000 * times[int(q * (len(times) - 1))], 1) for q in (0.5, 0.99)]})
    # medians: the tail belongs to whoever else uses the machine
    slower = during[len(during) // 2] / before[len(before) // 2]
    cluster.expect("claims take no more than three times as long", slower < 3, f"{slower:.1f} times")
    cluster.lifted()
    cluster.client.create(tries=5)


def _claim_times(cluster: Cluster, *, count: int) -> list[float]:
    """Seconds that claims and releases of another model's jobs take, sorted."""
    from rushes_core import jobs
    from rushes_core.database import create_sync_engine
    from rushes_core.ids import new_video_id
    from sqlalchemy.orm import Session

    engine = create_sync_engine(cluster.settings(), pool_size=1)
    times = []
    values = {"project": "default", "model": "nobody's", "prompt": "", "seed": 1, "width": 64, "height": 64}
    for _ in range(50):
        with Session(engine) as session, session.begin():
            session.execute(jobs.create(id=new_video_id(), num_frames=107, request={}, max_attempts=9, **values))
    for _ in range(count):
        began = time.monotonic()
        with Session(engine, expire_on_commit=False) as session, session.begin():
            job = session.execute(jobs.claim(model="nobody's", owner="harness#1", lease_seconds=30)).scalar_one()
        times.append(time.monotonic() - began)
        with Session(engine) as session, session.begin():
            session.execute(jobs.release(job.id, fence=job.fence))
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE model = 'nobody''s'")
    engine.dispose()
    return sorted(times)


@_row(31, "disk full for Postgres")
def postgres_disk_full(cluster: Cluster) -> None:
    """A file system of its own for Postgres, filled first by a file and then by rows, until nothing is left."""
    disk = cluster.keep(_small_disk(cluster.folder / "servers" / "postgres", megabytes=320))
    cluster.move(cluster.folder / "servers")
    cluster.start(workers=2)
    load = cluster.load(20, gap_seconds=0.3, tries=60)
    time.sleep(1)
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("CREATE TABLE junk (filler text)")
    filler = disk / "filler"
    _fill(filler)
    with suppress(psycopg.Error):
        while True:
            with cluster.servers.connect(cluster.env) as connection:
                # not compressible, so that it costs what it says
                connection.execute(
                    "INSERT INTO junk SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 200000)"
                )
    time.sleep(5)
    filler.unlink()
    cluster.servers.revive("postgres")
    cluster.lifted(limit=15)
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("DROP TABLE junk")
    load.join()
    _accepts_are_kept(cluster)


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 65_536)


def _accepts_are_kept(cluster: Cluster) -> None:
    answers = _answers(cluster, "create")
    cluster.expect("the API said nothing but yes and 503", set(answers) <= {200, 503}, sorted(set(answers)))


@_row(32, "connection pool exhausted by slow clients")
def pool_exhausted(cluster: Cluster) -> None:
    """A lock on jobs holds every request of 100 clients in the API's pool; workers have pools of their own."""
    cluster.start(workers=1)
    codes: list[Any] = []

    def slow() -> None:
        answer = cluster.client.create()
        codes.append(None if answer is None else "ok")

    with psycopg.connect(libpq_url(cluster.env)) as connection:
        connection.execute("LOCK TABLE jobs IN SHARE MODE")
        threads = [threading.Thread(target=slow, daemon=True) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.rollback()
    cluster.lifted(limit=10)
    answers = _answers(cluster, "create")
    cluster.expect("refused ones get 503", set(answers) <= {200, 503} and 503 in answers, sorted(set(answers)))
    cluster.load(6).join()


# the store


def _with_s3(cluster: Cluster, *, workers: int = 1) -> Any:
    proxy = cluster.proxy_s3()
    cluster.start_api()
    cluster.start_dispatcher()
    for _ in range(workers):
        cluster.start_worker(s3_endpoint_url=proxy.url)
    cluster.wait_ready()
    return proxy


def _is_put(request: Request) -> bool:
    """Whether a clip is stored by it."""
    return request.method == "PUT" and "/results/" in request.target and "video.mp4" in request.target


def _no_rerender(cluster: Cluster) -> None:
    again = cluster.query("SELECT id FROM jobs WHERE attempt > 1")
    cluster.expect("nothing was rendered twice", not again, again)


@_row(33, "S3 answers 500 and 503")
def s3_errors(cluster: Cluster) -> None:
    """15 s, of 2 minutes: nearly four leases."""
    proxy = _with_s3(cluster)
    proxy.rule = lambda request: cluster.random.choice([S3Fault.SLOW_DOWN, S3Fault.ERROR_AFTER_BODY])
    load = cluster.load(5, cancels=0.0, deletes=0.0)
    time.sleep(15)
    proxy.heal()
    cluster.mark("healed")
    struck = time.time()
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=90)
    cluster.recovery_seconds = time.time() - struck
    _no_rerender(cluster)
    cluster.expect("the store refused", proxy.strikes > 3, proxy.strikes)


@_row(34, "S3 slow, and hanging after the body")
def s3_slow(cluster: Cluster) -> None:
    proxy = _with_s3(cluster)
    faults = [S3Fault.HANG_AFTER_BODY, S3Fault.SLOW]
    proxy.rule = lambda request: faults.pop() if faults and _is_put(request) else S3Fault.PASS
    load = cluster.load(4, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=100)
    _no_rerender(cluster)
    for job_id in load.accepted:
        keys = _clips(cluster, job_id)
        cluster.expect("one object a job", len(keys) == 1, keys, job=job_id)
    cluster.expect("both faults struck", not faults, faults)


@_row(35, "S3 takes the object and the reply is lost", in_suite=True)
def s3_reply_lost(cluster: Cluster) -> None:
    proxy = _with_s3(cluster)
    proxy.rule = lambda request: S3Fault.REPLY_LOST if _is_put(request) else S3Fault.PASS
    load = cluster.load(4, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
    _no_rerender(cluster)
    for job_id in load.accepted:
        keys = _clips(cluster, job_id)
        cluster.expect("one object a job", len(keys) == 1, keys, job=job_id)
    cluster.expect("replies were lost", proxy.strikes >= len(load.accepted), proxy.strikes)


@_row(36, "S3 is sent other bytes than were meant")
def s3_flipped(cluster: Cluster) -> None:
    proxy = _with_s3(cluster)
    left = [4]

    def rule(request: Request) -> S3Fault:
        if not _is_put(request) or left[0] == 0:
            return S3Fault.PASS
        left[0] -= 1
        return S3Fault.FLIP

    proxy.rule = rule
    load = cluster.load(4, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
    _no_rerender(cluster)
    cluster.expect("bits were flipped", left[0] == 0, left)


@_row(37, "worker scratch disk full")
def scratch_full(cluster: Cluster) -> None:
    """A file system of 64 MB for scratch, nearly filled by somebody else."""
    with _small_disk(cluster.folder / "disk", megabytes=64) as disk:
        cluster.start(workers=1, scratch=disk / "scratch", scratch_free_bytes=24_000_000)
        filler = disk / "filler"
        filler.write_bytes(b"0" * 50_000_000)
        cluster.mark("full")
        load = cluster.load(4, cancels=0.0, deletes=0.0)
        load.join()
        time.sleep(3)
        claims = cluster.query("SELECT 1 FROM job_events WHERE new_state = 'claimed'")
        cluster.expect("it claims nothing while the disk is full", not claims, len(claims))
        filler.unlink()
        cluster.lifted()
        cluster.load(3).join()
        cluster.quiesce()
        cluster.expect("the worker lives", cluster.workers[0].is_running)
        _no_rerender(cluster)
        cluster.workers[0].send(signal.SIGTERM)
        cluster.workers[0].wait(30)


@contextmanager
def _small_disk(path: Path, *, megabytes: int) -> Iterator[Path]:
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        raise NotHere("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@_row(38, "clock skew on a worker and on the API host")
def clock_skew(cluster: Cluster) -> None:
    """Python's clock is shifted in the processes themselves: an hour on a worker, a quarter more on the API."""
    cluster.start_api()
    cluster.start_dispatcher()
    cluster.start_worker({"FAULT_CLOCK_SECONDS": "300"})
    cluster.start_worker({"FAULT_CLOCK_SECONDS": "-300"})
    cluster.wait_ready()
    load = cluster.load(10, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
    _no_rerender(cluster)
    cluster.parts[0].kill()
    cluster.start_api({"FAULT_CLOCK_SECONDS": "4500"})
    cluster.wait_ready()
    answer = cluster.client.content(load.accepted[0])
    cluster.expect(
        "the store refuses the API's signature: 503", answer is not None and answer.status_code == 503, answer
    )
    for worker in cluster.workers:
        worker.send(signal.SIGTERM)
        worker.wait(30)
    skewed = cluster.start_worker({"FAULT_CLOCK_SECONDS": "3600"})
    cluster.wait_ready(1)
    job_id = cluster.client.create(tries=10)
    assert job_id is not None
    cluster.until(lambda: any(record.get("event") == "upload_failed" for record in skewed.records()))
    job = cluster.job(job_id)
    cluster.expect("the lease is kept", (job["state"], job["attempt"]) == ("running", 1), job["state"], job=job_id)
    skewed.kill()
    cluster.start_worker()
    cluster.lifted(limit=LEASE_SECONDS + 10)
    cluster.wait_state(job_id, *FINAL)


@_row(39, "dispatcher killed, and three at once")
def dispatchers(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.parts[1].kill()
    load = cluster.load(10, gap_seconds=0.2)
    load.join()
    cluster.until(lambda: sum(cluster.job(job)["state"] in FINAL for job in load.accepted) >= 5, seconds=60)
    cluster.expect("jobs proceed by polling", True)
    job_id = _slow_job(cluster)
    struck = time.time()
    os.kill(cluster.supervisor_of(job_id), signal.SIGKILL)
    for _ in range(3):
        cluster.start_dispatcher()
    _reran(cluster, job_id, since=struck)
    cluster.load(8).join()


_not_run(40, "broken webhook receivers", "webhooks are not part of this version: there is no sender")
_not_run(41, "webhook sender killed before its commit", "webhooks are not part of this version: there is no sender")


@_row(42, "storm: 50 equal keys at once, submits, cancels, a new API in between")
def storm(cluster: Cluster) -> None:
    cluster.start(workers=2)
    cluster.meta(interactive_p95_seconds=6.0)
    # more than one of them wins only if the key and the job are not one commit
    _at_once([lambda: cluster.client.create(key="the-same", priority="bulk", tries=20)] * 50)
    jobs: list[str | None] = []
    _at_once([lambda: jobs.append(cluster.client.create(priority="bulk", tries=20))] * 60)
    urgent = cluster.load(8, cancels=0.0, deletes=0.0, gap_seconds=0.5, priorities=("interactive",))
    cancels = [lambda job=job: cluster.client.cancel(job) for job in jobs if job][:45]
    cluster.parts[0].send(signal.SIGTERM)
    cluster.start_api()
    _at_once(cancels)
    urgent.join()
    cluster.lifted()
    cluster.client.create(tries=10)


def _at_once(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _clips(cluster: Cluster, job_id: str) -> list[str]:
    from support.stack import s3_client

    answer = s3_client(cluster.env).list_objects_v2(Bucket=cluster.env["RUSHES_S3_BUCKET"])
    keys = [item["Key"] for item in answer.get("Contents", ())]
    return [key for key in keys if job_id in key and key.endswith("video.mp4")]


def _renders(cluster: Cluster) -> list[dict[str, Any]]:
    from support.faults.history import load

    path = cluster.folder / "renders.jsonl"
    return load(path) if path.exists() else []


def _answers(cluster: Cluster, op: str) -> list[int]:
    from support.faults.history import load

    statuses = [record["data"].get("status") for record in load(cluster.history.path) if record["op"] == op]
    return [status for status in statuses if status is not None]
