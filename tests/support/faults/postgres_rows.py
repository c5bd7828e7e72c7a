"""Rows 24 to 32: Postgres."""

import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster
from support.faults.proxy import Mode
from support.faults.rows import renders, row, slow_job, small_disk, statuses_of
from support.stack import libpq_url


@row(24, "Postgres immediate restart, five times", in_suite=True)
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


@row(25, "Postgres down for longer than the lease")
def postgres_down(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job_id = slow_job(cluster, step=0.6)
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
    answers = statuses_of(cluster, "create")
    cluster.expect("the API said 503 meanwhile", 503 in answers, sorted(set(answers)))


@row(26, "pg_terminate_backend twice a second")
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


@row(27, "Postgres behind a black hole")
def postgres_black_hole(cluster: Cluster) -> None:
    """15 s, of 40: nearly four leases. The proxy's own host goes on acknowledging, so no TCP time-out helps."""
    proxy = cluster.proxy_postgres()
    url = cluster.database_url(proxy)
    cluster.start_api()
    cluster.start_dispatcher()
    cluster.start_worker(database_url=url)
    cluster.start_worker(database_url=url)
    cluster.wait_ready()
    job_id = slow_job(cluster, step=0.8)
    proxy.set(Mode.BLACK_HOLE)
    struck = time.time()
    load = cluster.load(8, gap_seconds=0.5)
    time.sleep(15)
    stopped = [r["t_wall"] - struck for r in renders(cluster) if (r["job"], r["phase"]) == (job_id, "fail")]
    cluster.expect("the worker fenced itself", stopped and stopped[0] < LEASE_SECONDS + 2, stopped, job=job_id)
    proxy.set(Mode.PASS)
    cluster.lifted(limit=15)
    load.join()
    job = cluster.wait_state(job_id, *FINAL)
    cluster.expect("completed in the end", job["state"] == "completed", job["state"], job=job_id)
    cluster.meta(black_hole_seconds=time.time() - struck)


@row(28, "commit reply lost", in_suite=True)
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
    proxy.set(Mode.LOSE_REPLY, probability=0.12, triggers=(b"COMMIT\0", b"#", b"running", b"completed"))
    cluster.load(16, cancels=0.15, deletes=0.1).join()
    cluster.until(
        lambda: not cluster.query("SELECT 1 FROM jobs WHERE state IN ('queued', 'claimed', 'running')"), seconds=100
    )
    proxy.set(Mode.PASS)
    cluster.lifted()
    cluster.client.create(tries=5)
    cluster.expect("replies were lost", proxy.strikes > 3, proxy.strikes)


@row(29, "lock storm: ACCESS EXCLUSIVE on jobs")
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


@row(30, "old snapshot held")
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
    from rushes_core import claims, jobs
    from rushes_core.database import create_sync_engine
    from rushes_core.ids import new_video_id
    from sqlalchemy.orm import Session
    from support.new_jobs import insert_job

    engine = create_sync_engine(cluster.settings(), pool_size=1)
    times = []
    values = {"project": "default", "model": "nobody's", "prompt": "", "seed": 1, "width": 64, "height": 64}
    for _ in range(50):
        with Session(engine) as session, session.begin():
            insert_job(session, id=new_video_id(), num_frames=107, request={}, max_attempts=9, **values)
    for _ in range(count):
        began = time.monotonic()
        with Session(engine, expire_on_commit=False) as session, session.begin():
            job = session.execute(claims.claim(model="nobody's", owner="harness#1", lease_seconds=30)).scalar_one()
        times.append(time.monotonic() - began)
        with Session(engine) as session, session.begin():
            session.execute(jobs.release(job.id, fence=job.fence))
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE model = 'nobody''s'")
    engine.dispose()
    return sorted(times)


@row(31, "disk full for Postgres")
def postgres_disk_full(cluster: Cluster) -> None:
    """A file system of its own for Postgres, filled first by a file and then by rows, until nothing is left."""
    disk = cluster.keep(small_disk(cluster.folder / "servers" / "postgres", megabytes=320))
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
    answers = statuses_of(cluster, "create")
    cluster.expect("the API said nothing but yes and 503", set(answers) <= {200, 503}, sorted(set(answers)))


@row(32, "connection pool exhausted by slow clients")
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
    answers = statuses_of(cluster, "create")
    cluster.expect("refused ones get 503", set(answers) <= {200, 503} and 503 in answers, sorted(set(answers)))
    cluster.load(6).join()
