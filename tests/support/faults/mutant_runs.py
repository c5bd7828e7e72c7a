"""Proof that the checker can fail: a guarantee is taken away, a fault that needs it is played, and it must be seen."""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from support.faults import campaign_rows
from support.faults.checker import Violation, check
from support.faults.cluster import Cluster
from support.faults.history import load
from support.faults.rows import at_point, slow_job
from support.faults.servers import Servers
from support.faults.store_rows import s3_flipped


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guarantee taken away.

    `env` is `FAULT_MUTANT` of every process; `prepare` changes the database; `is_caught` False is a control: another
    layer must hold.
    """

    fault: str
    play: Callable[[Cluster], None]
    env: str
    prepare: Callable[[Cluster], None] | None = None
    is_caught: bool = True


def play_mutant(mutant: Mutant, servers: Servers, folder: Path, *, seed: int) -> list[Violation]:
    """What the checker says of a run without the guarantee."""
    with Cluster(servers, folder, seed=seed, mutant=mutant.env) as cluster:
        if mutant.prepare is not None:
            mutant.prepare(cluster)
        # a control that was not played to its end would prove nothing
        with suppress(TimeoutError, AssertionError) if mutant.is_caught else nullcontext():
            mutant.play(cluster)
        if not mutant.is_caught:
            refused = any("CheckViolation" in worker.log.read_text(errors="replace") for worker in cluster.workers)
            cluster.expect("the guard refused a statement", refused)
        _finish_soon(cluster)
        history = cluster.history.path
    return check(load(history))


def _finish_soon(cluster: Cluster) -> None:
    """A mutant may never come to rest: half a minute is enough to tell."""
    with suppress(TimeoutError):
        cluster.until(cluster._is_at_rest, seconds=25)
    cluster.quiesce = lambda: None  # type: ignore[method-assign]
    cluster.finish()


def _drop_guard(cluster: Cluster) -> None:
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("DROP TRIGGER guard ON jobs")


def _stale_publisher(cluster: Cluster) -> None:
    """Row 6 without its demands."""
    job_id, stopped = at_point(cluster, "before complete:stop", prompt="a wave [step 0.6 on attempt 2]")
    cluster.start_worker()
    cluster.until(lambda: cluster.job(job_id)["attempt"] == 2 and cluster.job(job_id)["state"] == "running")
    stopped.resume()


def _stale_publisher_of_a_queued_job(cluster: Cluster) -> None:
    """The stopped worker goes on while its job waits in the queue for another attempt."""
    job_id, stopped = at_point(cluster, "before complete:stop")
    cluster.until(lambda: cluster.job(job_id)["state"] == "queued")
    stopped.resume()
    time.sleep(1.0)


def _killed_api(cluster: Cluster) -> None:
    """The API is killed right after it accepted a few jobs."""
    cluster.start(workers=1)
    for _ in range(3):
        cluster.client.create()
    cluster.parts[0].send(signal.SIGKILL)
    cluster.start_api()
    time.sleep(1)


def _some_jobs(cluster: Cluster) -> None:
    cluster.start(workers=1)
    cluster.load(4, cancels=0.0, deletes=0.0).join()


def _killed_supervisor(cluster: Cluster) -> None:
    cluster.start(workers=2)
    import os

    os.kill(cluster.supervisor_of(slow_job(cluster)), signal.SIGKILL)


def _open_everything(cluster: Cluster) -> None:
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION open_holds(key text) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN"
            " UPDATE jobs SET hold = NULL WHERE api_key = key AND hold IS NOT NULL; RETURN 0; END $$"
        )


def _limited_jobs(cluster: Cluster) -> None:
    cluster.start(workers=2)
    limited = cluster.limited_client(max_running=1)
    cluster.load(6, client=limited, cancels=0.0, deletes=0.0, step_seconds=(0.1, 0.2)).join()


def _paused_jobs(cluster: Cluster) -> None:
    cluster.start(workers=1)
    cluster.client.ask("POST", "/v1/queue/pause")
    cluster.mark("paused", project="default")
    time.sleep(1.5)
    cluster.load(3, cancels=0.0, deletes=0.0).join()
    time.sleep(2)
    cluster.mark("resumed", project="default")
    cluster.client.ask("POST", "/v1/queue/resume")


def _count_no_failures(cluster: Cluster) -> None:
    """What counts the jobs of a campaign forgets those that fail."""
    with cluster.servers.connect(cluster.env) as connection:
        found = connection.execute("SELECT pg_get_functiondef('count_campaign_job'::regproc)").fetchone()
        assert found is not None
        mutated = found[0].replace("failed = counts.failed + excluded.failed", "failed = counts.failed")
        assert mutated != found[0]
        connection.execute(mutated)


def _campaign(cluster: Cluster) -> None:
    campaign_rows.start(cluster)
    campaign_rows.ends(cluster, campaign_rows.send(cluster, lines=12))


def _cancel_while_claimed(cluster: Cluster) -> None:
    """A worker is stopped between claim and start, and its job is cancelled meanwhile."""
    job_id, stopped = at_point(cluster, "before start:stop")
    with cluster.servers.connect(cluster.env) as connection:
        connection.execute("UPDATE jobs SET cancel_requested_at = now() WHERE id = %s", [job_id])
    time.sleep(1.5)
    stopped.resume()
    time.sleep(1.5)


MUTANT_RUNS: dict[str, Mutant] = {
    "no fence": Mutant("6, stopped before publish", _stale_publisher, "no fence"),
    "no state, no fence, guard on (control)": Mutant(
        "stopped before publish, job requeued", _stale_publisher_of_a_queued_job, "bare statements", is_caught=False
    ),
    "no state, no fence, no guard": Mutant(
        "stopped before publish, job requeued", _stale_publisher_of_a_queued_job, "bare statements", _drop_guard
    ),
    "commit after answer": Mutant("API killed after it answered", _killed_api, "commit after answer"),
    "acknowledgement lost": Mutant("none", _some_jobs, "ack lost"),
    "sweeper off": Mutant("1, supervisor killed", _killed_supervisor, "no sweeper"),
    "publish without verifying": Mutant("36, bits flipped", s3_flipped, "no verification"),
    "start ignores a cancel, guard on (control)": Mutant(
        "cancelled between claim and start", _cancel_while_claimed, "start ignores cancel", is_caught=False
    ),
    "start ignores a cancel, no guard": Mutant(
        "cancelled between claim and start", _cancel_while_claimed, "start ignores cancel", _drop_guard
    ),
    "every held job is opened": Mutant("none, two workers", _limited_jobs, "", _open_everything),
    "claims ignore pauses": Mutant("none", _paused_jobs, "no pause"),
    "failed jobs of campaigns are not counted": Mutant("none", _campaign, "", _count_no_failures),
}
