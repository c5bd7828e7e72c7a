"""Rows 33 to 38: the store, disks and clocks."""

import signal
import time
from typing import Any

from support.faults.cluster import FINAL, LEASE_SECONDS, Cluster
from support.faults.proxy import Request, S3Fault
from support.faults.rows import clips, row, small_disk


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


@row(33, "S3 answers 500 and 503")
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


@row(34, "S3 slow, and hanging after the body")
def s3_slow(cluster: Cluster) -> None:
    proxy = _with_s3(cluster)
    faults = [S3Fault.HANG_AFTER_BODY, S3Fault.SLOW]
    proxy.rule = lambda request: faults.pop() if faults and _is_put(request) else S3Fault.PASS
    load = cluster.load(4, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=100)
    _no_rerender(cluster)
    for job_id in load.accepted:
        keys = clips(cluster, job_id)
        cluster.expect("one object a job", len(keys) == 1, keys, job=job_id)
    cluster.expect("both faults struck", not faults, faults)


@row(35, "S3 takes the object and the reply is lost", in_suite=True)
def s3_reply_lost(cluster: Cluster) -> None:
    proxy = _with_s3(cluster)
    proxy.rule = lambda request: S3Fault.REPLY_LOST if _is_put(request) else S3Fault.PASS
    load = cluster.load(4, cancels=0.0, deletes=0.0)
    load.join()
    cluster.until(lambda: all(cluster.job(job)["state"] in FINAL for job in load.accepted), seconds=60)
    _no_rerender(cluster)
    for job_id in load.accepted:
        keys = clips(cluster, job_id)
        cluster.expect("one object a job", len(keys) == 1, keys, job=job_id)
    cluster.expect("replies were lost", proxy.strikes >= len(load.accepted), proxy.strikes)


@row(36, "S3 is sent other bytes than were meant")
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


@row(37, "worker scratch disk full")
def scratch_full(cluster: Cluster) -> None:
    """A file system of 64 MB for scratch, nearly filled by somebody else."""
    with small_disk(cluster.folder / "disk", megabytes=64) as disk:
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


@row(38, "clock skew on a worker and on the API host")
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
